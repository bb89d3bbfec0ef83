"""Everything between the options and the first step: data, tokenizer, model, optimizer, where the run stands, plan."""

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from config import T5ModelConfig, TrainConfig, global_batch, model_config
from model.chat_model import TextToTextModel
from model.checkpoint import TrainState, load_newest, load_optimizer
from model.dataset import TokenStore, describe_store, open_store
from model.device_memory import foreign_bytes, limit_memory, outside_bytes
from model.evaluate import answer_pairs, evaluate_loss, score
from model.export import as_hugging_face, check_fits, load_into, load_weights
from model.feed import Course
from model.memory import check_gates, free_bytes
from model.optim import check_warmup, make_optimizer, warmup_pairs
from model.plan import MemoryPlan, choose_plan
from model.ranks import Ranks, agree, broadcast, local_main_first
from model.rehearsal import estimate_for, plan_run, rehearse_update
from model.report import Progress
from model.request import ANOTHER_RUN
from model.run_dir import has_best
from model.tokenizer import ChatTokenizer, load_tokenizer
from model.watch import stop_asked

TOKENIZER_DIR, TOKENS_DIR = "model_save/tokenizer", "model_save/tokens"
LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from its first step to its last."""

    config: TrainConfig
    ranks: Ranks
    tokenizer: ChatTokenizer
    train: TokenStore
    validation: TokenStore
    model: TextToTextModel
    optimizer: torch.optim.Optimizer
    course: Course
    memory: dict = field(default_factory=dict)  # what the plan rests on, and what was measured
    differs: tuple = ()  # what is not as the checkpoint had it: bits may differ from there

    @property
    def dir(self):
        return Path(self.config.output_dir)

    def total_steps(self, state):
        """Number of the run's last step when every step from `state` on has the present global batch."""
        num_pairs, batch = len(self.train), self.course.global_batch
        left = self.course.total_pairs - state.pairs_seen
        in_this_epoch = left % num_pairs
        return state.step + -(-in_this_epoch // batch) + (left // num_pairs) * -(-num_pairs // batch)


def prepare_run(ranks, config, typed, resumed):
    """(Run, TrainState, MemoryPlan) for these options: a fresh start, or where the newest whole checkpoint stands.

    `typed`: names of the options on the command line. Raises ValueError when the options do not fit each
    other, the data or the checkpoint.
    """
    set_numerics(config, ranks.device)
    foreign = set_memory_limit(config, ranks.device)
    free = dict(start=free_bytes())
    batch = global_batch(config, ranks.world_size, typed)
    model_config(config.model)  # what can be refused is refused before hours of tokenising
    found = _newest_checkpoint(ranks, config) if resumed else None
    tokenizer, weights = tokenizer_and_weights(ranks, config, typed, resumed)
    shape = shape_of(config, tokenizer, found, weights)
    check_shape(config, typed, shape, found, weights)
    train, validation = (
        _open_data(ranks, config, file, tokenizer) for file in (config.train_file, config.validation_file)
    )
    total_pairs = len(train) * config.epochs
    warmup = warmup_pairs(config, total_pairs, found.state.first_batch if found else batch)
    check_warmup(config, typed, warmup / batch, total_pairs / batch)
    course = Course(total_pairs, warmup, batch, tokenizer.pad_id)
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    agree(ranks, "the numbers to compute in (--mixed_precision=no suits GPUs of any kind)", str(dtype))
    check_memory_fits(ranks, config, shape, dtype, train.lengths, batch, foreign)
    model = make_model(ranks, config, shape, weights)
    free["model"] = free_bytes()
    optimizer = make_optimizer(model, config)
    free["optimizer"] = free_bytes()
    rehearse_update(ranks, model, optimizer)
    run = Run(config, ranks, tokenizer, train, validation, model, optimizer, course)
    state = _starting_state(run, found)
    kept = MemoryPlan(**state.plan) if state.plan and state.device == ranks.device.type else None
    plan, memory = plan_run(run, kept, foreign)
    check_gates(free | dict(ready=free_bytes()), plan.predicted_peak_bytes)
    may_record = config.compile != "False" and model.uses_kernels and not config.dropout
    growth = kept_growth(state, plan, may_record)
    differs = found.state.differs(plan, state.world_size, config.exact) if found else ()
    state = replace(state, plan=asdict(plan), growth=growth, device=ranks.device.type)
    return replace(run, memory=memory, differs=differs), state, plan


def _starting_state(run, found):
    """The TrainState of a fresh start, or that of a Checkpoint, which is put into the run's model and optimizer.

    Raises ValueError where the checkpoint is not this run's.
    """
    fresh = TrainState(
        first_batch=run.course.global_batch, seed=run.config.seed, num_pairs=len(run.train),
        shape=asdict(run.model.shape), tokenizer_fingerprint=run.tokenizer.fingerprint,
        world_size=run.ranks.world_size, validation=run.validation.identity,
    )  # fmt: skip
    if not found:
        return fresh
    check_same_run(found, run.config, fresh)
    return _judged_by(run.validation, run.ranks, _restore(run.ranks, run.model, run.optimizer, found))


def kept_growth(state, plan, may_record):
    """The growth that a TrainState remembers, while `plan` is still its plan; not back to recordings unless it may."""
    if not state.growth or state.plan != asdict(plan):
        return None
    full = state.growth["full"]
    return state.growth | dict(full=full | dict(graphs=full["graphs"] and may_record))


def set_numerics(config, device):
    """What changes how numbers are computed, for the whole process."""
    if config.exact:
        if device.type != "cpu":
            raise ValueError(
                "--exact=True is for the CPU: a GPU's libraries choose the order of their sums themselves; set "
                "CUDA_VISIBLE_DEVICES= to train on the CPU, or type --deterministic=True instead, which gives the same "
                "bits on an equal number of equal GPUs"
            )
        torch.set_num_threads(1)
    if config.deterministic or config.exact:
        torch.use_deterministic_algorithms(True)


def set_memory_limit(config, device):
    """Bytes that others hold of `device`; from now on this process stays within its own limit."""
    foreign = foreign_bytes(device)
    limit_memory(device, config.gpu_memory_limit_gb, outside_bytes(device, foreign))
    return foreign


def tokenizer_and_weights(ranks, config, typed, resumed):
    """The tokenizer, and the weights to start from or None; raises ValueError when they do not belong together."""
    if resumed:
        kept = Path(config.output_dir) / "tokenizer"  # its fingerprint is checked, so another's files will do as well
        named = config.tokenizer_dir if "tokenizer_dir" in typed else ""
        return load_tokenizer(named or (kept if kept.exists() else config.tokenizer_dir or TOKENIZER_DIR)), None
    source = config.finetune_from_ckp_file
    weights = load_weights(source) if source else None
    beside = load_tokenizer(weights.tokenizer_dir) if weights and weights.tokenizer_dir else None
    tokenizer = beside if beside and not config.tokenizer_dir else load_tokenizer(config.tokenizer_dir or TOKENIZER_DIR)
    if beside and beside.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{source} was trained with tokenizer {beside.fingerprint}, and tokenizer_dir={config.tokenizer_dir} is "
            f"{tokenizer.fingerprint}: leave --tokenizer_dir out"
        )
    if weights and ranks.is_main:
        LOGGER.info("starting from the weights in %s", source)
    return tokenizer, weights


def _open_data(ranks, config, file, tokenizer):
    with Progress(f"tokenising {file}", None, unit="rows", shown=ranks.is_main) as progress:
        columns = (config.prompt_column, config.response_column)
        options = dict(columns=columns, progress=progress.update, stop=stop_asked)
        store = local_main_first(ranks, partial(open_store, file, tokenizer, config.max_seq_len, TOKENS_DIR, **options))
    agree(ranks, f"the content of {file}", store.meta["sha256"])
    if ranks.is_main:
        LOGGER.info(describe_store(store))
    return store


def shape_of(config, tokenizer, found, weights):
    """The model's T5ModelConfig: that of the Checkpoint or of the weights, where they tell it, else config.model's.

    Raises ValueError where its vocabulary is smaller than the tokenizer's.
    """
    known = T5ModelConfig(**found.state.shape) if found else weights and weights.shape
    shape = known or model_config(config.model)
    shape = replace(shape, vocab_size=shape.vocab_size or tokenizer.vocab_size)
    if shape.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model has {shape.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}: name the one "
            "that the model was trained with in --tokenizer_dir"
        )
    return shape


def check_memory_fits(ranks, config, shape, dtype, lengths, batch, foreign):
    """Raise NothingFits where not even one pair at a time fits the device: before anything is put there."""
    usable = limit_memory(ranks.device, config.gpu_memory_limit_gb, outside_bytes(ranks.device, foreign))
    if usable is not None:
        choose_plan(config, estimate_for(ranks, config, shape, dtype, lengths, batch), usable)


def make_model(ranks, config, shape, weights=None):
    """The model on this rank's device: random weights, or `weights`; equal on all ranks."""
    model = TextToTextModel(shape, config.dropout, compute_dtype(config.mixed_precision, ranks.device))
    if weights:
        load_into(model, weights, config.finetune_from_ckp_file)
    else:
        model.initialise(config.seed)
    if config.trainable == "decoder":
        model.freeze_all_but_decoder()
    model.to(ranks.device)
    broadcast(ranks, [model.flat.masters])
    return model


def compute_dtype(mixed_precision, device):
    """bf16 where asked for, or under auto where the GPU computes it natively; else float32."""
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if mixed_precision == "bf16" or (mixed_precision == "auto" and native) else torch.float32


def check_shape(config, typed, shape, found, weights):
    """Raise ValueError where --model asks for another shape than the weights have, or they do not fit theirs."""
    wanted = model_config(config.model)
    told = found or weights and weights.shape
    if told and "model" in typed and replace(wanted, vocab_size=shape.vocab_size) != shape:
        raise ValueError(f"--model={config.model} is {wanted}, and the weights are {shape}: leave --model out")
    if weights:
        with torch.device("meta"):
            check_fits(TextToTextModel(shape), weights, config.finetune_from_ckp_file)


def _newest_checkpoint(ranks, config):
    found = load_newest(config.output_dir, LOGGER.warning)
    if found is None:
        raise ValueError(f"no checkpoint in {config.output_dir} is whole: restore one, {ANOTHER_RUN}")
    agree(ranks, "the newest checkpoint", found.path.name)
    return found


def check_same_run(found, config, fresh):
    """Raise ValueError where the options would make `found` another run than the one it is of."""
    for what, name in (("tokenizer", "tokenizer_fingerprint"), ("seed", "seed"), ("training pairs", "num_pairs")):
        then, now = getattr(found.state, name), getattr(fresh, name)
        if then != now:
            raise ValueError(
                f"{found.path} was written with {what} {then}, and it is {now} now: go on with what it was, "
                f"{ANOTHER_RUN}"
            )


def _restore(ranks, model, optimizer, found):
    """Put a Checkpoint into model and optimizer; returns its TrainState."""
    load_into(model, found, found.path)
    load_optimizer(optimizer, model, found.optimizer)
    broadcast(ranks, [model.flat.masters])
    if ranks.is_main:
        LOGGER.info("going on from %s: step %d, %d pairs seen", found.path, found.state.step, found.state.pairs_seen)
    return replace(found.state, world_size=ranks.world_size)


def _judged_by(validation, ranks, state):
    """The TrainState for these validation pairs: the loss of best/ on others says nothing about them."""
    if state.validation == validation.identity:
        return state
    if ranks.is_main:
        LOGGER.info("the validation pairs are others, or cut elsewhere: best/ is chosen anew")
    return replace(state, validation=validation.identity, best_loss=None, best_step=0)


def prepare_test(ranks, config):
    """(Run, MemoryPlan) to measure a run's best/ model on test_file, which stands in place of both data files."""
    best = Path(config.output_dir) / "best"
    if not has_best(config.output_dir):
        raise ValueError(
            f"--output_dir={config.output_dir}: there is no {best} to test: train first, or, where the run is begun or "
            "finished, go on with --is_keep_training=True: the next evaluation writes it"
        )
    # what the training was told about its own memory and launches says nothing about a test
    free = dict(micro_batch_tokens=0, gradient_checkpointing="auto", compile="False", tokenizer_dir="")
    config = replace(config, finetune_from_ckp_file=str(best), **free)
    tokenizer, weights = tokenizer_and_weights(ranks, config, (), resumed=False)
    store = _open_data(ranks, config, config.test_file or config.validation_file, tokenizer)
    model = make_model(ranks, config, shape_of(config, tokenizer, None, weights), weights)
    course = Course(len(store), 0, config.batch_size_per_gpu * ranks.world_size, tokenizer.pad_id)
    run = Run(config, ranks, tokenizer, store, store, model, None, course)
    return run, plan_run(run, None, set_memory_limit(config, ranks.device))[0]


def measure(run, plan, step=0, note=lambda kind, **values: None):
    """Loss of the run's validation pairs, and BLEU and chrF of some answers; None when a stop was asked for.

    `note(kind, **values)` hears of each out of memory on the way.
    """
    model, config = run.model, run.config
    loss = evaluate_loss(run.ranks, model, run.validation, plan, run.tokenizer.pad_id, step, note)
    if loss is None or not config.bleu_pairs:
        return loss if loss is None else dict(loss=loss)
    answers = answer_pairs(
        run.ranks, as_hugging_face(model, run.tokenizer), run.validation, run.tokenizer, plan, config.bleu_pairs,
        config.max_new_tokens, model.compute_dtype, step, note,
    )  # fmt: skip
    return None if answers is None else dict(loss=loss, **score(answers))
