"""What a run starts from: stored options, a checkpoint or weights, read on rank 0 and sent to the other ranks.

The machines need no shared disk.
"""

import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch

from config import T5ModelConfig, load_model_config
from model.commands.options import ANOTHER_RUN, parse_options, stored_options, with_stored_options
from model.nn.t5.network import TextToTextModel
from model.nn.weights_io import LoadedWeights, check_fits, load_into, load_weights
from model.run.checkpoint import Checkpoint, load_newest, load_optimizer, snapshot_of
from model.run.train_state import state_of, state_values
from model.runtime.distributed import agree, broadcast, from_main, from_main_before_joining
from model.train.optim import count_steps

LOGGER = logging.getLogger("chat_trainer")


def broadcast_request(stray, options, keep_training=False):
    """Request of a command line, on every rank; rank 0 reads the stored options of a resumed run for all."""
    typed = parse_options(stray, options, keep_training)
    arguments = typed.config.output_dir, typed.keep_training, keep_training
    return with_stored_options(typed, from_main_before_joining(typed.config.ddp_timeout_s, stored_options, *arguments))


def agree_on(ranks, request):
    """Raise RuntimeError unless all ranks have the same Request."""
    flags = dict(is_keep_training=request.keep_training, overwrite=request.overwrite, typed=sorted(request.typed))
    agree(ranks, "the options", asdict(request.config) | flags)


def newest_checkpoint(ranks, run_dir):
    """Newest undamaged Checkpoint of a run; only rank 0 has its tensors. Raises ValueError if there is none."""
    loaded = []
    path, values = from_main(ranks, _read_newest, run_dir, loaded)
    return loaded[0] if loaded else Checkpoint(Path(path), state_of(values), {}, {})


def _read_newest(run_dir, loaded):
    """(path, state) of the newest Checkpoint as plain values; the Checkpoint itself is appended to `loaded`."""
    found = load_newest(run_dir, LOGGER.warning)
    if found is None:
        raise ValueError(f"every checkpoint in {run_dir} is damaged: restore one, {ANOTHER_RUN}")
    loaded.append(found)
    return str(found.path), state_values(found.state)


def read_weights(ranks, source):
    """LoadedWeights of the path `source`, or None if it is empty; only rank 0 has their tensors."""
    if not source:
        return None
    loaded = []
    model_config = from_main(ranks, _read_weights, source, loaded)
    return loaded[0] if loaded else LoadedWeights({}, model_config and T5ModelConfig(**model_config), None)


def _read_weights(source, loaded):
    """Model config of the weights in `source` as plain values, or None; the weights are appended to `loaded`."""
    loaded.append(load_weights(source))
    LOGGER.info("starting from the weights in %s", source)
    return loaded[0].model_config and asdict(loaded[0].model_config)


def resolve_model_config(config, tokenizer, found, weights):
    """T5ModelConfig of the Checkpoint `found`, else of the weights if they have one, else of config.model.

    Raises ValueError if its vocabulary is smaller than the tokenizer's.
    """
    known = T5ModelConfig(**found.state.shape) if found else weights and weights.model_config
    model_config = known or load_model_config(config.model)
    model_config = replace(model_config, vocab_size=model_config.vocab_size or tokenizer.vocab_size)
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model has {model_config.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}: give the "
            "tokenizer that the model was trained with in --tokenizer_dir"
        )
    return model_config


def check_model_config(ranks, config, typed, model_config, found, weights):
    """Raise ValueError if a typed --model differs from the checkpoint or weights, or if the weights do not fit."""
    has_own_config = found or weights and weights.model_config
    if has_own_config and "model" in typed:
        wanted = load_model_config(config.model)
        if replace(wanted, vocab_size=model_config.vocab_size) != model_config:
            raise ValueError(
                f"--model={config.model} is {wanted}, and the weights are {model_config}: leave --model out"
            )
    if weights:
        from_main(ranks, _check_weights, model_config, weights, config.finetune_from_ckp_file)


def _check_weights(model_config, weights, source):
    with torch.device("meta"):
        check_fits(TextToTextModel(model_config), weights, source)


def check_same_run(found, config, fresh):
    """Raise ValueError if the Checkpoint `found` does not belong to a run with these options.

    `fresh` is the TrainState of a new run with them; without ids_sha256 only the number of pairs is compared.
    """
    then = found.state
    for what, name in (("tokenizer", "tokenizer_fingerprint"), ("seed", "seed"), ("training pairs", "num_pairs")):
        if getattr(then, name) != getattr(fresh, name):
            raise ValueError(
                f"{found.path} was written with {what} {getattr(then, name)}, now {getattr(fresh, name)}: "
                f"resume with the same, {ANOTHER_RUN}"
            )
    if not why_not_compared(then, fresh) and then.ids_sha256 != fresh.ids_sha256:
        raise ValueError(
            f"{found.path} was written on other training pairs, or in another order, than {config.train_file} holds "
            f"now: resume with the same pairs (--train_file=), {ANOTHER_RUN}"
        )


def why_not_compared(then, now):
    """Why the ids of the training pairs of two TrainStates cannot be compared, or "" if they can."""
    if not (then.ids_sha256 and now.ids_sha256):
        return "the checkpoint does not hold a hash of its pairs"
    if then.max_seq_len != now.max_seq_len:
        return f"max_seq_len was {then.max_seq_len}, and is {now.max_seq_len}"
    return ""


def restore(ranks, model, optimizer, found):
    """Load a Checkpoint into model and optimizer on every rank; returns its TrainState.

    `optimizer` must have its state allocated, as after `dry_run_update`. Raises ValueError if the checkpoint does not
    fit.
    """
    from_main(ranks, _load, model, optimizer, found)
    broadcast(ranks, [model.flat.masters, *snapshot_of(model, optimizer).optimizer.values()])
    count_steps(optimizer)
    if ranks.is_main:
        LOGGER.info("resuming from %s: step %d, %d pairs seen", found.path, found.state.step, found.state.pairs_seen)
    return replace(found.state, world_size=ranks.world_size)


def _load(model, optimizer, found):
    load_into(model, found, found.path)
    load_optimizer(optimizer, model, found.optimizer)
