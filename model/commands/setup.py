"""Makes all that a run needs before its first step: data, tokenizer, model, optimizer, state and plan."""

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from config import TrainConfig, global_batch
from model.commands.adapter import with_adapter, without_adapter
from model.commands.network import (
    compute_dtype,
    load_weights,
    make_model,
    set_numerics,
    start_kernels,
    wait_for_kernels,
)
from model.commands.origin import (
    check_same_run,
    find_origin,
    newest_checkpoint,
    read_weights,
    restore,
    why_not_compared,
)
from model.data.row_hashes import describe_shared
from model.data.token_store import Source, describe_store, open_store
from model.data.tokenizer import ChatTokenizer
from model.generate.sampling import Sampling, generation_config
from model.memory.plan import MemoryPlan, choose_plan
from model.nn.lora import lora_values
from model.nn.registry import config_values, family_of
from model.run.checkpointer import checksum, try_export
from model.run.console import Progress
from model.run.run_dir import TOKENS_DIR, has_best
from model.run.train_state import TrainState, state_values
from model.runtime.device_memory import check_gates, free_bytes, limit_memory, non_torch_bytes, other_process_bytes
from model.runtime.distributed import agree, from_main, local_main_first
from model.runtime.laps import lap
from model.runtime.watchdog import stop_asked, untimed
from model.train.derive import derive, is_derived, with_derived, with_zeros
from model.train.dry_run import dry_run_update, plan_run
from model.train.evaluate import Evaluation
from model.train.examples import Examples
from model.train.footprint import estimate_for, has_dropout, plan_options
from model.train.loader import Loader, Schedule
from model.train.lr_schedule import LearnRate, check_warmup, warmup_pairs
from model.train.objectives.registry import objective_for
from model.train.optim import make_optimizer
from model.train.step import StepContext

LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Run:
    """The parts of a run that do not change between its steps."""

    config: TrainConfig
    tokenizer: ChatTokenizer
    context: StepContext
    evaluation: Evaluation
    memory: dict = field(default_factory=dict)  # predicted and measured bytes, as plan.json has them
    differs: tuple = ()  # what differs from the checkpoint, so that results may differ in their last bits

    @property
    def dir(self):
        return Path(self.config.output_dir)

    @property
    def ranks(self):
        return self.context.ranks

    @property
    def model(self):
        return self.context.model

    @property
    def optimizer(self):
        return self.context.optimizer

    @property
    def generation(self):
        """What the exported models' generation_config.json says."""
        return generation_config(self.evaluation.sampling, self.evaluation.max_new_tokens)

    @property
    def schedule(self):
        return self.context.loader.schedule

    @property
    def train(self):
        """The Examples that are trained on."""
        return self.context.loader.examples

    def export(self, name, weights_file=None):
        """Export the model to the directory `name` of the run; returns why that failed, or ""."""
        return try_export(self.model, self.tokenizer, self.dir / name, self.generation, weights_file)

    def total_steps(self, state):
        """Number of the run's last step, if every step after `state` has the current global batch."""
        num_pairs, batch = len(self.train), self.schedule.global_batch
        num_left = self.schedule.total_pairs - state.pairs_seen
        num_in_epoch = num_left % num_pairs
        return state.step + -(-num_in_epoch // batch) + (num_left // num_pairs) * -(-num_pairs // batch)


def prepare_run(ranks, config, typed, resumed):
    """(Run, TrainState, MemoryPlan) of a new run, or at the newest undamaged checkpoint if `resumed`.

    `typed` holds the names of the options on the command line. Raises ValueError if the options contradict each other,
    the data or the checkpoint.
    """
    set_numerics(config, ranks.device)
    other_process, usable = set_memory_limit(config, ranks.device)
    free = dict(start=free_bytes())
    batch = global_batch(config, ranks.world_size, typed)
    # errors in tokenizer, weights and model are found before tokenising, which may take hours
    found = newest_checkpoint(ranks, config.output_dir) if resumed else None
    origin = find_origin(ranks, config, typed, found)
    config = with_adapter(config, origin.adapter)
    lap("weights")
    kernels = start_kernels(ranks, config, origin.model_config)
    files = (config.train_file, config.validation_file)
    train, validation = (_open_examples(ranks, config, file, origin) for file in files)
    train = replace(train, dropout=has_dropout(config))
    schedule = _schedule(config, typed, len(train), batch, found)
    if ranks.is_main and (shared := describe_shared(validation.store, train.store)):
        LOGGER.warning(shared)
    lap("data")
    plan = first_plan(ranks, config, origin.model_config, train.histogram, batch, usable)
    model = make_model(ranks, config, origin.model_config, origin.weights, origin.adapter)
    reference, (train, validation) = _with_derived(model, ranks, config, found, (train, validation), plan)
    free["model"] = free_bytes()
    optimizer = make_optimizer(model, config)
    free["optimizer"] = free_bytes()
    lap("model")
    dry_run_update(ranks, model, optimizer)
    lap("update")
    wait_for_kernels(kernels)
    lap("kernels")
    context = StepContext(ranks, model, optimizer, Loader(ranks, train, schedule, config.exact), config)
    run = Run(config, origin.tokenizer, context, _evaluation(context, validation, origin.tokenizer))
    state = replace(_initial_state(run, found), reference=reference)
    run, state, plan = _planned(run, state, found, other_process)
    lap("dry run")
    check_gates(free | dict(ready=free_bytes()), plan.predicted_peak_bytes)
    agree(ranks, "the position of the run and its plan", state_values(state))
    return run, state, plan


def _schedule(config, typed, num_pairs, batch, found):
    """The Schedule of a run; ValueError if a warm-up that was typed is as long as the run."""
    total_pairs = num_pairs * config.epochs
    warmup = warmup_pairs(config, total_pairs, found.state.first_batch if found else batch)
    check_warmup(config, typed, warmup / batch, total_pairs / batch)
    rate = LearnRate(config.learn_rate, config.lr_schedule, warmup, total_pairs)
    return Schedule(total_pairs, batch, config.seed, rate)


def _evaluation(context, validation, tokenizer):
    """The Evaluation of a run."""
    config = context.options
    num_answers = config.bleu_pairs if validation.objective.has_answers else 0
    sampling = Sampling(no_repeat_ngram_size=config.no_repeat_ngram_size)
    sides = context.ranks, context.model, validation, tokenizer
    return Evaluation(*sides, num_answers, config.max_new_tokens, sampling)


def _planned(run, state, found, other_process):
    """(Run, TrainState, MemoryPlan) once the plan was tried on the device."""
    config, ranks = run.config, run.ranks
    stored_plan = MemoryPlan(**state.plan) if state.plan and state.device == ranks.device.type else None
    plan, memory = plan_run(run.context, run.evaluation, stored_plan, other_process)
    may_record = config.compile != "False" and run.model.uses_kernels
    recovery = kept_recovery(state, plan, may_record)
    differs = found.state.differs(plan, state.world_size, config.exact) if found else ()
    state = replace(state, plan=asdict(plan), growth=recovery, device=ranks.device.type)
    return replace(run, memory=memory, differs=differs), state, plan


def _initial_state(run, found):
    """TrainState of a new run, or of the Checkpoint `found`, which is loaded into the run's model and optimizer.

    Raises ValueError if the checkpoint belongs to another run.
    """
    train, validation = run.train.store, run.evaluation.examples.store
    fresh = TrainState(
        first_batch=run.schedule.global_batch, seed=run.config.seed, num_pairs=len(train),
        ids_sha256=train.meta["ids_sha256"], max_seq_len=run.config.max_seq_len,
        shape=config_values(run.model.config), lora=run.model.lora and lora_values(run.model.lora),
        tokenizer_fingerprint=run.tokenizer.fingerprint, world_size=run.ranks.world_size,
        validation=validation.identity, objective=run.config.objective,
    )  # fmt: skip
    if not found:
        return fresh
    check_same_run(found, run.config, fresh)
    if run.ranks.is_main and (why := why_not_compared(found.state, fresh)):
        LOGGER.info("%s: of the training pairs only their number, %d, is compared", why, fresh.num_pairs)
    state = restore(run.ranks, run.model, run.optimizer, found)
    state = _with_validation(validation, run.ranks, state)
    return replace(
        state, ids_sha256=fresh.ids_sha256, max_seq_len=fresh.max_seq_len, shape=fresh.shape, lora=fresh.lora
    )


def _with_derived(model, ranks, config, found, parts, plan):
    """(what identifies the weights that the derived columns are of, `parts` (Examples) with these columns).

    `model` has the weights that the run starts from, if they are random; a resumed run reads others again where the
    columns are lost.
    """
    if not parts[0].objective.derived:
        return "", parts
    reference = found.state.reference if found else str(checksum(model))
    missing = [examples for examples in parts if not is_derived(ranks, examples, reference)]
    if missing and found and config.finetune_from_ckp_file and not model.lora:
        weights = read_weights(ranks, config.finetune_from_ckp_file)
        load_weights(ranks, model, weights, config.finetune_from_ckp_file)
    with untimed("computing what the objective needs of the weights at the start"):
        for examples in missing:
            derive(ranks, model, examples, plan, reference)
    return reference, [with_derived(examples, reference) for examples in parts]


def kept_recovery(state, plan, may_record):
    """Plan recovery of a TrainState as plain values, or None if it has none or `plan` is not its plan.

    It leads back to CUDA graphs only if `may_record`.
    """
    if not state.growth or state.plan != asdict(plan):
        return None
    full = state.growth["full"]
    return state.growth | dict(full=full | dict(graphs=full["graphs"] and may_record))


def set_memory_limit(config, device):
    """Limit this process's memory on `device`; returns (bytes that other processes use there, bytes usable here)."""
    other_process = other_process_bytes(device)
    return other_process, limit_memory(device, config.gpu_memory_limit_gb, non_torch_bytes(device, other_process))


def _open_examples(ranks, config, file, origin):
    """Examples of `file`, tokenised first if needed; the same rows on all ranks."""
    family = family_of(origin.model_config)
    objective = objective_for(config, origin.model_config, origin.tokenizer)
    columns = (config.prompt_column, config.response_column)
    source = Source(file, objective, origin.tokenizer, config.max_seq_len, columns)
    with Progress(f"tokenising {file}", None, unit="rows", shown=ranks.is_main) as progress:
        store = local_main_first(ranks, partial(open_store, source, TOKENS_DIR, progress.update, stop_asked))
    agree(ranks, f"the pairs in {file}", dict(pairs=len(store), ids_sha256=store.meta["ids_sha256"]))
    if ranks.is_main:
        LOGGER.info(describe_store(store))
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    kernels = family.has_kernels(ranks.device, dtype, origin.model_config)
    first_id = family.first_id(origin.model_config, origin.tokenizer)
    examples = Examples(store, objective, family, first_id, config.seed, kernels)
    return with_zeros(examples) if objective.derived else examples


def first_plan(ranks, config, model_config, lengths, batch, usable):
    """A plan by prediction alone, before anything is allocated; raises NothingFits if not one example fits."""
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    agree(ranks, "the compute dtype (--mixed_precision=no works on every GPU)", str(dtype))
    estimate = estimate_for(ranks, config, model_config, dtype, lengths, batch)
    return choose_plan(plan_options(config), estimate, usable)


def _with_validation(validation, ranks, state):
    """`state` with the identity of the TokenStore `validation`; without best_loss if the pairs have changed."""
    # rank 0 decides: file_identity may differ between machines
    if from_main(ranks, lambda: state.validation in (validation.identity, validation.file_identity)):
        return replace(state, validation=validation.identity)
    if ranks.is_main:
        LOGGER.info("the validation pairs or max_seq_len have changed: best/ is chosen anew")
    return replace(state, validation=validation.identity, best_loss=None, best_step=0)


def prepare_test(ranks, config):
    """(Run, MemoryPlan) to evaluate a run's best/ model on test_file, which is used for both data files.

    Raises ValueError if there is no best/.
    """
    best = Path(config.output_dir) / "best"
    from_main(ranks, _check_best, best)
    # the training's options for memory and CUDA graphs do not apply to a test
    planned = dict(micro_batch_tokens=0, gradient_checkpointing="auto", compile="False", tokenizer_dir="")
    config = replace(without_adapter(config), finetune_from_ckp_file=str(best), **planned)  # best/ is merged
    origin = find_origin(ranks, config, ())
    examples = _open_examples(ranks, config, config.test_file or config.validation_file, origin)
    other_process, _ = set_memory_limit(config, ranks.device)
    model = make_model(ranks, config, origin.model_config, origin.weights)
    batch = config.batch_size_per_gpu * ranks.world_size
    schedule = _schedule(replace(config, epochs=1), (), len(examples), batch, None)
    context = StepContext(ranks, model, None, Loader(ranks, examples, schedule), config)
    run = Run(config, origin.tokenizer, context, _evaluation(context, examples, origin.tokenizer))
    return run, plan_run(context, run.evaluation, None, other_process)[0]


def _check_best(best):
    if not has_best(best.parent):
        raise ValueError(
            f"--output_dir={best.parent}: there is no {best} to test: train first; if the run exists, resume it "
            "with --is_keep_training=True: the next evaluation writes best/"
        )
