"""Makes all that a run needs before its first step: data, tokenizer, model, optimizer, state and plan."""

import logging
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from config import TrainConfig, global_batch
from model.commands.origin import (
    check_model_config,
    check_same_run,
    newest_checkpoint,
    read_weights,
    resolve_model_config,
    restore,
    why_not_compared,
)
from model.data.pair_hashes import describe_shared
from model.data.token_store import TokenStore, describe_store, open_store
from model.data.tokenizer import ChatTokenizer, load_tokenizer
from model.memory.plan import MemoryPlan, choose_plan
from model.nn.t5.network import TextToTextModel
from model.nn.weights_io import load_into, model_directory
from model.run.console import Progress
from model.run.run_dir import TOKENIZER_DIR, TOKENS_DIR, has_best
from model.run.train_state import TrainState, state_values
from model.runtime.device_memory import check_gates, free_bytes, limit_memory, non_torch_bytes, other_process_bytes
from model.runtime.distributed import Ranks, agree, broadcast, from_main, local_main_first
from model.runtime.watchdog import stop_asked
from model.train.dry_run import dry_run_update, plan_run
from model.train.footprint import estimate_for
from model.train.loader import Schedule
from model.train.lr_schedule import check_warmup, warmup_pairs
from model.train.optim import make_optimizer

LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Run:
    """The parts of a run that do not change between its steps."""

    config: TrainConfig
    ranks: Ranks
    tokenizer: ChatTokenizer
    train: TokenStore
    validation: TokenStore
    model: TextToTextModel
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    memory: dict = field(default_factory=dict)  # predicted and measured bytes, as plan.json has them
    differs: tuple = ()  # what differs from the checkpoint, so that results may differ in their last bits

    @property
    def dir(self):
        return Path(self.config.output_dir)

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
    other_process = set_memory_limit(config, ranks.device)
    free = dict(start=free_bytes())
    batch = global_batch(config, ranks.world_size, typed)
    # errors in tokenizer, weights and model are found before tokenising, which may take hours
    found = newest_checkpoint(ranks, config.output_dir) if resumed else None
    weights = None if found else read_weights(ranks, config.finetune_from_ckp_file)
    tokenizer, model_config = _tokenizer_and_model_config(ranks, config, typed, found, weights)
    train, validation = (
        _open_data(ranks, config, file, tokenizer) for file in (config.train_file, config.validation_file)
    )
    total_pairs = len(train) * config.epochs
    warmup = warmup_pairs(config, total_pairs, found.state.first_batch if found else batch)
    check_warmup(config, typed, warmup / batch, total_pairs / batch)
    schedule = Schedule(total_pairs, warmup, batch, tokenizer.pad_id)
    if ranks.is_main and (shared := describe_shared(validation, train)):
        LOGGER.warning(shared)
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    agree(ranks, "the compute dtype (--mixed_precision=no works on every GPU)", str(dtype))
    check_memory_fits(ranks, config, model_config, dtype, train.lengths, batch, other_process)
    model = make_model(ranks, config, model_config, weights)
    free["model"] = free_bytes()
    optimizer = make_optimizer(model, config)
    free["optimizer"] = free_bytes()
    dry_run_update(ranks, model, optimizer)
    run = Run(config, ranks, tokenizer, train, validation, model, optimizer, schedule)
    state = _initial_state(run, found)
    stored_plan = MemoryPlan(**state.plan) if state.plan and state.device == ranks.device.type else None
    plan, memory = plan_run(run, stored_plan, other_process)
    check_gates(free | dict(ready=free_bytes()), plan.predicted_peak_bytes)
    may_record = config.compile != "False" and model.uses_kernels
    recovery = kept_recovery(state, plan, may_record)
    differs = found.state.differs(plan, state.world_size, config.exact) if found else ()
    state = replace(state, plan=asdict(plan), growth=recovery, device=ranks.device.type)
    agree(ranks, "the position of the run and its plan", state_values(state))
    return replace(run, memory=memory, differs=differs), state, plan


def _tokenizer_and_model_config(ranks, config, typed, found, weights):
    """ChatTokenizer and T5ModelConfig of the Checkpoint `found`, of `weights` or of the options; equal on all ranks."""
    tokenizer = tokenizer_for(config, typed, found)
    ids = dict(pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id)
    agree(ranks, "the tokenizer", dict(fingerprint=tokenizer.fingerprint) | ids)
    model_config = resolve_model_config(config, tokenizer, found, weights)
    check_model_config(ranks, config, typed, model_config, found, weights)
    agree(ranks, "the model's configuration", asdict(model_config))
    return tokenizer, model_config


def _initial_state(run, found):
    """TrainState of a new run, or of the Checkpoint `found`, which is loaded into the run's model and optimizer.

    Raises ValueError if the checkpoint belongs to another run.
    """
    fresh = TrainState(
        first_batch=run.schedule.global_batch, seed=run.config.seed, num_pairs=len(run.train),
        ids_sha256=run.train.meta["ids_sha256"], max_seq_len=run.config.max_seq_len,
        shape=asdict(run.model.config), tokenizer_fingerprint=run.tokenizer.fingerprint,
        world_size=run.ranks.world_size, validation=run.validation.identity,
    )  # fmt: skip
    if not found:
        return fresh
    check_same_run(found, run.config, fresh)
    if run.ranks.is_main and (why := why_not_compared(found.state, fresh)):
        LOGGER.info("%s: of the training pairs only their number, %d, is compared", why, fresh.num_pairs)
    state = restore(run.ranks, run.model, run.optimizer, found)
    state = _with_validation(run.validation, run.ranks, state)
    return replace(state, ids_sha256=fresh.ids_sha256, max_seq_len=fresh.max_seq_len)


def kept_recovery(state, plan, may_record):
    """Plan recovery of a TrainState as plain values, or None if it has none or `plan` is not its plan.

    It leads back to CUDA graphs only if `may_record`.
    """
    if not state.growth or state.plan != asdict(plan):
        return None
    full = state.growth["full"]
    return state.growth | dict(full=full | dict(graphs=full["graphs"] and may_record))


def set_numerics(config, device):
    """Set the process's threads and algorithms for `exact` and `deterministic`; ValueError if `exact` is on a GPU."""
    if config.exact:
        if device.type != "cpu":
            raise ValueError(
                "--exact=True works only on the CPU: the libraries of a GPU choose the order of their sums; set "
                "CUDA_VISIBLE_DEVICES= to train on the CPU, or type --deterministic=True instead: bit-equal "
                "results on the same number of equal GPUs"
            )
        torch.set_num_threads(1)
    if config.deterministic or config.exact:
        torch.use_deterministic_algorithms(True)


def set_memory_limit(config, device):
    """Limit this process's memory on `device`; returns the bytes that other processes use there."""
    other_process = other_process_bytes(device)
    limit_memory(device, config.gpu_memory_limit_gb, non_torch_bytes(device, other_process))
    return other_process


def tokenizer_for(config, typed, found):
    """Tokenizer of a run resumed from the Checkpoint `found`, or of a new run if that is None.

    Raises ValueError if it differs from the tokenizer beside the initial weights, where these are on this machine.
    """
    tokenizer_dir, source = Path(config.tokenizer_dir or TOKENIZER_DIR), config.finetune_from_ckp_file
    weights_dir = model_directory(Path(source)) if source else None
    if found and "tokenizer_dir" not in typed:
        # on machines other than rank 0's, output_dir may be missing or hold another run
        folders = [Path(config.output_dir) / "tokenizer", weights_dir, tokenizer_dir]
        return _find_tokenizer(folders, found.state.tokenizer_fingerprint)
    return load_tokenizer(tokenizer_dir) if found or not weights_dir else _tokenizer_of_weights(config, weights_dir)


def _find_tokenizer(folders, fingerprint):
    """First tokenizer in `folders` with the fingerprint, else the first one of all; entries may be None."""
    existing = [folder for folder in folders if folder and (folder / "tokenizer.json").is_file()] or folders[-1:]
    tokenizers = map(load_tokenizer, existing)
    first = next(tokenizers)
    return next((found for found in chain([first], tokenizers) if found.fingerprint == fingerprint), first)


def _tokenizer_of_weights(config, weights_dir):
    """Tokenizer beside the weights, else that of config.tokenizer_dir; ValueError if both exist and differ."""
    if not (weights_dir / "tokenizer.json").is_file():
        if not config.tokenizer_dir:
            raise ValueError(f"{weights_dir} has no tokenizer.json: give the weights' tokenizer in --tokenizer_dir")
        return load_tokenizer(config.tokenizer_dir)
    beside = load_tokenizer(weights_dir)
    given = load_tokenizer(config.tokenizer_dir) if config.tokenizer_dir else beside
    if given.fingerprint != beside.fingerprint:
        raise ValueError(
            f"{weights_dir} was trained with tokenizer {beside.fingerprint}, and tokenizer_dir={config.tokenizer_dir} "
            f"is {given.fingerprint}: leave --tokenizer_dir out"
        )
    return beside


def _open_data(ranks, config, file, tokenizer):
    """TokenStore of `file`, tokenised first if needed; the same pairs on all ranks."""
    with Progress(f"tokenising {file}", None, unit="rows", shown=ranks.is_main) as progress:
        columns = (config.prompt_column, config.response_column)
        options = dict(columns=columns, progress=progress.update, stop=stop_asked)
        store = local_main_first(ranks, partial(open_store, file, tokenizer, config.max_seq_len, TOKENS_DIR, **options))
    agree(ranks, f"the pairs in {file}", dict(pairs=len(store), ids_sha256=store.meta["ids_sha256"]))
    if ranks.is_main:
        LOGGER.info(describe_store(store))
    return store


def check_memory_fits(ranks, config, model_config, dtype, lengths, batch, other_process):
    """Raise NothingFits if not even one pair at a time fits the device; called before anything is allocated there."""
    usable = limit_memory(ranks.device, config.gpu_memory_limit_gb, non_torch_bytes(ranks.device, other_process))
    if usable is not None:
        choose_plan(config, estimate_for(ranks, config, model_config, dtype, lengths, batch), usable)


def make_model(ranks, config, model_config, weights=None):
    """Model on this rank's device with `weights` or random ones; equal on all ranks."""
    model = TextToTextModel(model_config, config.dropout, compute_dtype(config.mixed_precision, ranks.device))
    if not weights:
        model.initialise(config.seed)
    elif ranks.is_main:  # only rank 0 has the tensors
        load_into(model, weights, config.finetune_from_ckp_file)
    if config.trainable == "decoder":
        model.freeze_all_but_decoder()
    model.to(ranks.device)
    broadcast(ranks, [model.flat.masters])
    return model


def compute_dtype(mixed_precision, device):
    """bfloat16 if `mixed_precision` is bf16, or if it is auto and the GPU supports it natively; else float32."""
    is_native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if mixed_precision == "bf16" or (mixed_precision == "auto" and is_native) else torch.float32


def _with_validation(validation, ranks, state):
    """`state` with the identity of the TokenStore `validation`; without best_loss if the pairs have changed."""
    # rank 0 decides: file_identity may differ between machines
    is_same = from_main(ranks, lambda: state.validation in (validation.identity, validation.file_identity))
    if is_same:
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
    config = replace(config, finetune_from_ckp_file=str(best), **planned)
    weights = read_weights(ranks, str(best))
    tokenizer, model_config = _tokenizer_and_model_config(ranks, config, (), None, weights)
    store = _open_data(ranks, config, config.test_file or config.validation_file, tokenizer)
    model = make_model(ranks, config, model_config, weights)
    schedule = Schedule(len(store), 0, config.batch_size_per_gpu * ranks.world_size, tokenizer.pad_id)
    run = Run(config, ranks, tokenizer, store, store, model, None, schedule)
    return run, plan_run(run, None, set_memory_limit(config, ranks.device))[0]


def _check_best(best):
    if not has_best(best.parent):
        raise ValueError(
            f"--output_dir={best.parent}: there is no {best} to test: train first; if the run exists, resume it "
            "with --is_keep_training=True: the next evaluation writes best/"
        )
