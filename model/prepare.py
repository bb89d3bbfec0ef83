"""Everything between the options and the first step: data, tokenizer, model, optimizer, where the run stands, plan."""

import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from config import T5ModelConfig, TrainConfig, global_batch, model_config
from model.chat_model import TextToTextModel
from model.checkpoint import TrainState, load_newest, load_optimizer
from model.dataset import TokenStore, describe_store, open_store
from model.export import load_into, load_weights
from model.memory import MemoryPlan, choose_plan, free_memory, limit_memory
from model.optim import check_adafactor_rate, make_optimizer
from model.ranks import Ranks, agree, broadcast, local_main_first, vote
from model.report import Progress
from model.step import Course
from model.tokenizer import ChatTokenizer, load_tokenizer
from model.watch import stop_asked

TOKENIZER_DIR, TOKENS_DIR = "model_save/tokenizer", "model_save/tokens"
STEPS_THAT_REPAY_RECORDING = 100  # eight recordings take about a second, and save up to 10 ms a step
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

    @property
    def dir(self):
        return Path(self.config.output_dir)


def prepare_run(ranks, config, given, resumed):
    """(Run, TrainState, MemoryPlan) for these options: a fresh start, or where the newest whole checkpoint stands.

    Raises ValueError when the options do not fit each other, the data or the checkpoint.
    """
    set_numerics(config, ranks.device)
    batch = global_batch(config, ranks.world_size, given)
    model_config(config.model)  # a model that cannot be read is refused before hours of tokenising
    found = _newest_checkpoint(ranks, config) if resumed else None
    tokenizer, weights = _tokenizer_and_weights(ranks, config, resumed)
    train, validation = (
        _open_data(ranks, config, file, tokenizer) for file in (config.train_file, config.validation_file)
    )
    shape = T5ModelConfig(**found.state.shape) if found else weights.shape if weights else None
    if shape and "model" in given:
        _check_same_shape(shape, config)
    model = make_model(ranks, config, tokenizer, weights, shape)
    optimizer = make_optimizer(model, config)
    state = TrainState(
        warmup_pairs=config.warmup_steps * batch, seed=config.seed, num_pairs=len(train), shape=asdict(model.shape),
        tokenizer_fingerprint=tokenizer.fingerprint, world_size=ranks.world_size,
    )  # fmt: skip
    if found:
        _check_same_run(found, config, state)
        state = _restore(ranks, model, optimizer, found)
    course = Course(len(train) * config.epochs, state.warmup_pairs, batch, tokenizer.pad_id)
    if config.optimizer == "adafactor":
        check_adafactor_rate(config, course.warmup_pairs, course.total_pairs, batch)
    plan = _plan(ranks, config, model, train, batch, state)
    return Run(config, ranks, tokenizer, train, validation, model, optimizer, course), state, plan


def set_numerics(config, device):
    """What changes how numbers are computed, for the whole process."""
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    limit_memory(device, config.gpu_memory_limit_gb)


def _tokenizer_and_weights(ranks, config, resumed):
    """The tokenizer, and the weights to start from or None; raises ValueError when they do not belong together."""
    if resumed:
        kept = Path(config.output_dir) / "tokenizer"  # its fingerprint is checked, so another's files will do as well
        return load_tokenizer(config.tokenizer_dir or (kept if kept.exists() else TOKENIZER_DIR)), None
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


def make_model(ranks, config, tokenizer, weights=None, shape=None):
    """The model on this rank's device: random weights, or `weights`; equal on all ranks.

    `shape` is the weights' or the checkpoint's where it is known, else config.model names it.
    """
    shape = shape or model_config(config.model)
    shape = replace(shape, vocab_size=shape.vocab_size or tokenizer.vocab_size)
    if shape.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model has {shape.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}: name the one "
            "that the model was trained with in --tokenizer_dir"
        )
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


def _check_same_shape(shape, config):
    """Raise ValueError where --model asks for another shape than the weights have."""
    wanted = model_config(config.model)
    if replace(wanted, vocab_size=shape.vocab_size) != shape:
        raise ValueError(f"--model={config.model} is {wanted}, and the weights are {shape}: leave --model out")


def _newest_checkpoint(ranks, config):
    found = load_newest(config.output_dir, LOGGER.warning)
    if found is None:
        raise ValueError(f"no checkpoint in {config.output_dir} is whole: start afresh with --overwrite=True")
    agree(ranks, "the newest checkpoint", found.path.name)
    return found


def _check_same_run(found, config, fresh):
    """Raise ValueError where the options would make `found` another run than the one it is of."""
    for what, name in (("tokenizer", "tokenizer_fingerprint"), ("seed", "seed"), ("training pairs", "num_pairs")):
        then, now = getattr(found.state, name), getattr(fresh, name)
        if then != now:
            raise ValueError(
                f"{found.path} was written with {what} {then}, and it is {now} now: go on with what it was, or start "
                f"another run with --finetune_from_ckp_file={config.output_dir}"
            )


def _restore(ranks, model, optimizer, found):
    """Put a Checkpoint into model and optimizer; returns its TrainState."""
    load_into(model, found, found.path)
    load_optimizer(optimizer, model, found.optimizer)
    broadcast(ranks, [model.flat.masters])
    if ranks.is_main:
        LOGGER.info("going on from %s: step %d, %d pairs seen", found.path, found.state.step, found.state.pairs_seen)
    return replace(found.state, world_size=ranks.world_size)


def _plan(ranks, config, model, store, batch, state):
    """The plan in the checkpoint while the options still ask for it, else a fresh one that all ranks can hold."""
    longest = int(store.lengths.sum(axis=1, dtype="int64").max())
    share_tokens = longest * -(-batch // ranks.world_size)
    free = free_memory(ranks.device, config.gpu_memory_limit_gb)
    free = None if free is None else -vote(ranks, -free)[0]  # the smallest over ranks
    parameters = sum(p.numel() for p in model.parameters())
    chosen = choose_plan(config, model.shape, parameters, free, model.compute_dtype, share_tokens, longest)
    chosen = replace(chosen, graphs=_records(config, model, chosen, free, store, batch))
    kept = MemoryPlan(**state.plan) if state.plan else None
    plan = (
        kept
        if kept and not config.micro_batch_tokens and kept.predicted_peak_bytes <= chosen.predicted_peak_bytes
        else chosen
    )
    if config.compile != "auto":
        plan = replace(plan, graphs=chosen.graphs)
    if ranks.is_main:
        LOGGER.info("plan: %s", ", ".join(f"{name}={value}" for name, value in asdict(plan).items()))
    return plan


def _records(config, model, plan, free_bytes, store, batch):
    """Whether steps are recorded: as config.compile says, or where it repays and there is room for a step beside them.

    Raises ValueError where config.compile asks for what cannot be.
    """
    if config.compile == "False":
        return False
    possible = model.uses_kernels and not config.dropout
    if config.compile == "True" and not possible:
        raise ValueError(
            "compile=True records CUDA graphs, for which a GPU, bf16 and dropout=0 are needed: leave it out"
        )
    roomy = possible and 2 * plan.predicted_peak_bytes <= free_bytes
    repaid = len(store) * config.epochs / batch >= STEPS_THAT_REPAY_RECORDING
    return config.compile == "True" or (roomy and repaid)


def prepare_test(ranks, config):
    """(Run, MemoryPlan) to measure a run's best/ model on test_file, which stands in place of both data files."""
    best = Path(config.output_dir) / "best"
    config = replace(config, finetune_from_ckp_file=str(best), tokenizer_dir="")
    tokenizer, weights = _tokenizer_and_weights(ranks, config, resumed=False)
    store = _open_data(ranks, config, config.test_file or config.validation_file, tokenizer)
    model = make_model(ranks, config, tokenizer, weights, weights.shape)
    course = Course(len(store), 0, config.batch_size_per_gpu * ranks.world_size, tokenizer.pad_id)
    plan = _plan(ranks, config, model, store, course.global_batch, TrainState())
    return Run(config, ranks, tokenizer, store, store, model, None, course), plan
