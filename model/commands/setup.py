"""Makes all that a run needs before its first step: data, tokenizer, model, optimizer, state and plan."""

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from config import TrainConfig
from model.commands.adapter import without_adapter
from model.commands.evaluation import Rules
from model.commands.foresight import check_disk, warn_of_data
from model.commands.network import (
    compute_dtype,
    draft_model,
    fill_model,
    make_model,
    start_kernels,
    wait_for_kernels,
)
from model.commands.no_model import check_tested
from model.commands.objective import objective_for
from model.commands.origin import find_origin, newest_checkpoint, read_derived, restore, with_validation
from model.commands.recipe import estimate_for, has_dropout, memory_spec, plan_options, update_options
from model.commands.run_length import check_warmup, global_batch, run_pairs, steps_between, warmup_pairs
from model.commands.same_run import check_same_run, why_not_compared
from model.commands.settled import settled
from model.commands.tokenising import write_beside
from model.data.file_list import data_files, unweighted_files
from model.data.row_hashes import describe_shared
from model.data.sampler import mixture_of
from model.data.token_store import Source, open_store
from model.data.tokenizer import ChatTokenizer
from model.display.console import Progress
from model.generate.sampling import Sampling, generation_config
from model.memory.plan import MemoryPlan, choose_plan
from model.nn.attention import has_kernels
from model.nn.lora import lora_values
from model.nn.registry import config_values, family_of
from model.run.run_dir import TOKENS_DIR
from model.run.train_state import TrainState, kept_recovery, state_values
from model.runtime.device_memory import check_gates, free_bytes, limit_memory, non_torch_bytes, other_process_bytes
from model.runtime.distributed import agree, from_main, local_main_first
from model.runtime.laps import lap
from model.runtime.watchdog import stop_asked
from model.train.derive import with_zeros
from model.train.dry_run import dry_run_update, gradient_seconds, plan_run
from model.train.evaluate import Evaluation
from model.train.examples import Examples, check_lengths
from model.train.loader import Loader, Schedule
from model.train.lr_schedule import LearnRate
from model.train.optim import make_optimizer
from model.train.step import StepContext

LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Run:
    """The parts of a run that do not change between its steps."""

    config: TrainConfig
    tokenizer: ChatTokenizer
    context: StepContext
    evaluation: Evaluation | None  # None: nothing is evaluated
    rules: Rules
    memory: dict = field(default_factory=dict)  # predicted and measured bytes, as plan.json has them
    differs: tuple = ()  # what differs from the checkpoint, so that results may differ in their last bits
    why_optimizer: str = "typed"  # as `choose_optimizer` says

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
        values = generation_config(sampling_of(self.config), self.config.max_new_tokens)
        values |= dict(prefix=self.config.prompt_prefix) if self.config.prompt_prefix else {}
        return values | (dict(chat_trainer=dict(single_turn=True)) if self.single_turn else {})

    @property
    def single_turn(self):
        """Whether every example is a question with nothing before it, so that the model learns no conversation."""
        meta = self.train.store.meta
        return self.config.single_turn or meta["rows"] > 0 and meta.get("single_pairs") == meta["rows"]

    @property
    def schedule(self):
        return self.context.loader.schedule

    @property
    def train(self):
        """The Examples that are trained on."""
        return self.context.loader.examples

    def total_steps(self, state):
        """Number of the run's last step, if every step after `state` has the current global batch."""
        schedule = self.schedule
        pairs = schedule.total_pairs, self.train.epoch_pairs
        return state.step + steps_between(state.pairs_seen, *pairs, schedule.global_batch)


def prepare_run(ranks, config, typed, resumed):
    """(Run, TrainState, MemoryPlan) of a new run, or at the newest undamaged checkpoint if `resumed`.

    `typed` holds the names of the options on the command line. Raises ValueError if the options contradict each other,
    the data or the checkpoint.
    """
    torch.use_deterministic_algorithms(config.deterministic)
    other_process, usable = set_memory_limit(config, ranks.device)
    free = dict(start=free_bytes())
    batch = global_batch(config, ranks.world_size, typed)
    # errors in tokenizer, weights and model are found before tokenising, which may take hours
    found = newest_checkpoint(ranks, config.output_dir) if resumed else None
    origin = find_origin(ranks, config, typed, found)
    config, why = settled(config, typed, origin)
    lap("weights")
    model = draft_model(ranks, config, origin.model_config, origin.adapter)
    spec = memory_spec(config, model.config, model.compute_dtype, "cpu")
    check_disk(ranks, config.output_dir, config.keep_latest_n_ckp, spec, resumed)
    kernels = start_kernels(ranks, config, model)
    train, *validation = _open_data(ranks, config, origin)
    schedule = _schedule(config, typed, train.epoch_pairs, batch, found)
    if ranks.is_main:
        warn_of_data(train, origin.tokenizer, config.finetune_from_ckp_file, batch)
    lap("data")
    plan = first_plan(ranks, config, origin.model_config, train.histogram, batch, usable)
    fill_model(ranks, config, model, origin.weights, origin.adapter)
    reference, (train, *validation) = read_derived(model, ranks, config, found, (train, *validation), plan)
    free["model"] = free_bytes()
    optimizer = make_optimizer(model, update_options(config), (ranks.rank, ranks.world_size))
    free["optimizer"] = free_bytes()
    lap("model")
    update_seconds = dry_run_update(ranks, model, optimizer, config.reduce_dtype)
    lap("update")
    wait_for_kernels(kernels)
    lap("kernels")
    context = StepContext(ranks, model, optimizer, Loader(ranks, train, schedule), update_options(config))
    evaluation = _evaluation(config, context, validation[0], origin.tokenizer) if validation else None
    run = Run(config, origin.tokenizer, context, evaluation, _rules(config), why_optimizer=why)
    state = replace(_initial_state(run, found), reference=reference)
    run, state, plan = _planned(run, state, found, other_process)
    run.memory["step_seconds"] = update_seconds + gradient_seconds(context, plan)
    lap("dry run")
    check_gates(free | dict(ready=free_bytes()), plan.predicted_peak_bytes)
    agree(ranks, "the position of the run and its plan", state_values(state))
    return run, state, plan


def _schedule(config, typed, epoch_pairs, batch, found):
    """The Schedule of a run; ValueError if a warm-up that was typed is as long as the run."""
    first_batch = found.state.first_batch if found else batch
    total_pairs = run_pairs(config, epoch_pairs, first_batch)
    warmup = warmup_pairs(config, total_pairs, first_batch)
    check_warmup(config, typed, warmup / batch, total_pairs / batch)
    rate = LearnRate(config.learn_rate, config.lr_schedule, warmup, total_pairs)
    return Schedule(total_pairs, batch, config.seed, rate)


def _evaluation(config, context, validation, tokenizer):
    """The Evaluation of a run."""
    num_answers = config.bleu_pairs if validation.objective.has_answers else 0
    sides = context.ranks, context.model, validation, tokenizer
    return Evaluation(*sides, num_answers, config.max_new_tokens, sampling_of(config))


def _rules(config):
    return Rules(config.eval_steps, config.best_metric, config.patience, config.early_stop, config.plots)


def sampling_of(config):
    """How answers are chosen, in evaluations and by whoever loads an exported model."""
    return Sampling(no_repeat_ngram_size=config.no_repeat_ngram_size)


def _planned(run, state, found, other_process):
    """(Run, TrainState, MemoryPlan) once the plan was tried on the device."""
    config, ranks = run.config, run.ranks
    stored_plan = MemoryPlan(**state.plan) if state.plan and state.device == ranks.device.type else None
    estimate = estimate_for(
        ranks, config, run.model.config, run.model.compute_dtype, run.train.histogram, run.schedule.global_batch
    )
    wanted = plan_options(config)
    plan, memory = plan_run(run.context, run.evaluation, estimate, wanted, stored_plan, other_process)
    may_record = config.compile != "False" and run.model.uses_kernels
    recovery = kept_recovery(state, plan, may_record)
    differs = found.state.differs(plan, state.world_size) if found else ()
    state = replace(state, plan=asdict(plan), growth=recovery, device=ranks.device.type)
    return replace(run, memory=memory, differs=differs), state, plan


def _initial_state(run, found):
    """TrainState of a new run, or of the Checkpoint `found`, which is loaded into the run's model and optimizer.

    Raises ValueError if the checkpoint belongs to another run.
    """
    train, validation = run.train.store, run.evaluation and run.evaluation.examples.store
    fresh = TrainState(
        first_batch=run.schedule.global_batch, seed=run.config.seed, num_pairs=len(train),
        ids_sha256=train.meta["ids_sha256"], max_seq_len=run.config.max_seq_len,
        shape=config_values(run.model.config), lora=run.model.lora and lora_values(run.model.lora),
        tokenizer_fingerprint=run.tokenizer.fingerprint, world_size=run.ranks.world_size,
        validation=validation.identity if validation else "", objective=run.config.objective,
        best_metric=run.config.best_metric, mixture=run.train.mixture.identity if run.train.mixture else "",
    )  # fmt: skip
    if not found:
        return fresh
    check_same_run(found, run.config, fresh)
    if run.ranks.is_main and (why := why_not_compared(found.state, fresh)):
        LOGGER.info("%s: of the training pairs only their number, %d, is compared", why, fresh.num_pairs)
    state = restore(run.ranks, run.model, run.optimizer, found)
    state = with_validation(validation, run.ranks, state) if validation else state
    if state.best_metric != run.config.best_metric:
        if run.ranks.is_main:
            LOGGER.info("best_metric was %s and is %s: best/ is chosen anew", state.best_metric, run.config.best_metric)
        state = replace(state.without_best(), best_metric=run.config.best_metric)
    return replace(
        state, ids_sha256=fresh.ids_sha256, max_seq_len=fresh.max_seq_len, shape=fresh.shape, lora=fresh.lora
    )


def set_memory_limit(config, device):
    """Limit this process's memory on `device`; returns (bytes that other processes use there, bytes usable here)."""
    other_process = other_process_bytes(device)
    return other_process, limit_memory(device, config.gpu_memory_limit_gb, non_torch_bytes(device, other_process))


def _open_data(ranks, config, origin):
    """[Examples to train on, Examples to evaluate on]; the second is missing where nothing is evaluated.

    Warns of pairs that are in both. Raises ValueError for files that cannot be read.
    """
    files = data_files(config.train_file)
    train = _open_examples(ranks, config, files, origin)
    mixture = mixture_of(train.store.rows_of_files, [file.weight for file in files])
    train = replace(train, dropout=has_dropout(config), mixture=mixture)
    if not config.validation_file:
        return [train]
    validation = _open_examples(ranks, config, unweighted_files(config.validation_file), origin, evaluated=True)
    if ranks.is_main and (shared := describe_shared(validation.store, train.store)):
        LOGGER.warning(shared)
    return [train, validation]


def _open_examples(ranks, config, files, origin, evaluated=False):
    """Examples of these DataFiles, tokenised first if needed; the same rows on all ranks.

    Raises ValueError for rows, and answers where they are `evaluated`, that are longer than the network can read.
    """
    family = family_of(origin.model_config)
    objective = objective_for(config, origin.model_config, origin.tokenizer)
    columns = (config.prompt_column, config.response_column)
    paths = tuple(file.path for file in files)
    source = Source(paths, objective, origin.tokenizer, config.max_seq_len, columns)
    names = ", ".join(paths)
    with Progress(f"tokenising {names}", None, unit="rows", shown=ranks.is_main) as progress:
        opened = partial(open_store, source, TOKENS_DIR, progress.update, stop_asked, write_beside)
        store = local_main_first(ranks, opened)
    agree(ranks, f"the pairs in {names}", dict(pairs=len(store), ids_sha256=store.meta["ids_sha256"]))
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    kernels = has_kernels(ranks.device, dtype, *origin.model_config.kernel_sizes)
    first_id = family.first_id(origin.model_config, origin.tokenizer)
    examples = Examples(store, objective, family, first_id, config.seed, kernels)
    examples = with_zeros(examples) if objective.derived else examples
    answers = evaluated and config.bleu_pairs and objective.has_answers
    check_lengths(examples, origin.model_config.max_tokens, config.max_new_tokens if answers else 0)
    return examples


def first_plan(ranks, config, model_config, lengths, batch, usable):
    """A plan by prediction alone, before anything is allocated; raises NothingFits if not one example fits."""
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    agree(ranks, "the compute dtype (--mixed_precision=no works on every GPU)", str(dtype))
    estimate = estimate_for(ranks, config, model_config, dtype, lengths, batch)
    return choose_plan(plan_options(config), estimate, usable)


def prepare_test(ranks, config):
    """(Run, MemoryPlan) to evaluate a run's model on test_file, which is used for both data files.

    The model is best/, and last/ of a run without evaluations. Raises ValueError if there is none.
    """
    tested = from_main(ranks, check_tested, config)
    file = config.test_file or config.validation_file
    if not file:
        raise ValueError("test_file and validation_file are empty: type --test_file=FILE")
    # the training's options for memory and CUDA graphs do not apply to a test
    planned = dict(micro_batch_tokens=0, gradient_checkpointing="auto", compile="False", tokenizer_dir="")
    options = without_adapter(config)  # an exported model is merged
    config = replace(options, finetune_from_ckp_file=tested, validation_file=file, **planned)
    origin = find_origin(ranks, config, ())
    config, _ = settled(config, (), origin)
    examples = _open_examples(ranks, config, unweighted_files(file), origin, evaluated=True)
    other_process, _ = set_memory_limit(config, ranks.device)
    model = make_model(ranks, config, origin.model_config, origin.weights)
    batch = config.batch_size_per_gpu * ranks.world_size
    schedule = _schedule(replace(config, epochs=1, max_steps=0), (), len(examples), batch, None)
    context = StepContext(ranks, model, None, Loader(ranks, examples, schedule), update_options(config))
    evaluation = _evaluation(config, context, examples, origin.tokenizer)
    run = Run(config, origin.tokenizer, context, evaluation, _rules(config))
    estimate = estimate_for(ranks, config, model.config, model.compute_dtype, examples.histogram, batch)
    return run, plan_run(context, evaluation, estimate, plan_options(config), None, other_process)[0]
