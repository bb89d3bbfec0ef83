"""What a run goes on from or begins with: options, checkpoint or weights, read on rank 0 and sent to the others.

Ranks on other machines need no disk in common with rank 0.
"""

import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch

from config import T5ModelConfig, load_model_config
from model.commands.options import ANOTHER_RUN, going_on, read_words, stored_options
from model.nn.t5.network import TextToTextModel
from model.nn.weights_io import LoadedWeights, check_fits, load_into, load_weights
from model.run.checkpoint import Checkpoint, load_newest, load_optimizer, snapshot_of
from model.run.train_state import state_of, state_values
from model.runtime.distributed import agree, broadcast, from_main, from_main_before_joining
from model.train.optim import count_steps

LOGGER = logging.getLogger("chat_trainer")


def hear_request(stray, options, keep_training=False):
    """The Request of a command line; the options of a run that goes on are read on rank 0."""
    words = read_words(stray, options, keep_training)
    asked = words.config.output_dir, words.keep_training, keep_training
    return going_on(words, from_main_before_joining(words.config.ddp_timeout_s, stored_options, *asked))


def agree_on(ranks, request):
    """Raise RuntimeError unless all ranks have the same Request."""
    words = dict(is_keep_training=request.keep_training, overwrite=request.overwrite, typed=sorted(request.typed))
    agree(ranks, "the options", asdict(request.config) | words)


def newest_checkpoint(ranks, run_dir):
    """The newest whole Checkpoint of a run, which has its tensors on rank 0 alone; ValueError where there is none."""
    held = []
    path, values = from_main(ranks, _read_newest, run_dir, held)
    return held[0] if held else Checkpoint(Path(path), state_of(values), {}, {})


def _read_newest(run_dir, held):
    found = load_newest(run_dir, LOGGER.warning)
    if found is None:
        raise ValueError(f"no checkpoint in {run_dir} is whole: restore one, {ANOTHER_RUN}")
    held.append(found)
    return str(found.path), state_values(found.state)


def read_weights(ranks, source):
    """The LoadedWeights in `source`, or None where it is empty; they have their tensors on rank 0 alone."""
    if not source:
        return None
    held = []
    model_config = from_main(ranks, _read_weights, source, held)
    return held[0] if held else LoadedWeights({}, model_config and T5ModelConfig(**model_config), None)


def _read_weights(source, held):
    held.append(load_weights(source))
    LOGGER.info("starting from the weights in %s", source)
    return held[0].model_config and asdict(held[0].model_config)


def resolve_model_config(config, tokenizer, found, weights):
    """The model's T5ModelConfig: that of the Checkpoint or of the weights, where they tell it, else config.model's.

    Raises ValueError where its vocabulary is smaller than the tokenizer's.
    """
    known = T5ModelConfig(**found.state.shape) if found else weights and weights.model_config
    model_config = known or load_model_config(config.model)
    model_config = replace(model_config, vocab_size=model_config.vocab_size or tokenizer.vocab_size)
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model has {model_config.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}: name the one "
            "that the model was trained with in --tokenizer_dir"
        )
    return model_config


def check_model_config(ranks, config, typed, model_config, found, weights):
    """Raise ValueError where --model asks for another network than the weights are of, or they do not fit theirs."""
    told = found or weights and weights.model_config
    if told and "model" in typed:
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
    """Raise ValueError where the options would make `found` another run than the one it is of.

    `fresh` is the TrainState that these options would start from; what it leaves out of the pairs is not compared.
    """
    then = found.state
    for what, name in (("tokenizer", "tokenizer_fingerprint"), ("seed", "seed"), ("training pairs", "num_pairs")):
        if getattr(then, name) != getattr(fresh, name):
            raise ValueError(
                f"{found.path} was written with {what} {getattr(then, name)}, and it is {getattr(fresh, name)} now: "
                f"go on with what it was, {ANOTHER_RUN}"
            )
    if not why_not_compared(then, fresh) and then.ids_sha256 != fresh.ids_sha256:
        raise ValueError(
            f"{found.path} was written on other training pairs, or in another order, than {config.train_file} holds "
            f"now: go on with the pairs as they were (--train_file=), {ANOTHER_RUN}"
        )


def why_not_compared(then, now):
    """Why the ids of two TrainStates' training pairs say nothing about whether these are the same, or ""."""
    if not (then.ids_sha256 and now.ids_sha256):
        return "the checkpoint does not tell which pairs it was written on"
    if then.max_seq_len != now.max_seq_len:
        return f"max_seq_len was {then.max_seq_len}, and is {now.max_seq_len}"
    return ""


def restore(ranks, model, optimizer, found):
    """Put a Checkpoint into model and optimizer on every rank; returns its TrainState.

    `optimizer` must have its state, as after `dry_run_update`. Raises ValueError where the checkpoint does not fit.
    """
    from_main(ranks, _load, model, optimizer, found)
    broadcast(ranks, [model.flat.masters, *snapshot_of(model, optimizer).optimizer.values()])
    count_steps(optimizer)
    if ranks.is_main:
        LOGGER.info("going on from %s: step %d, %d pairs seen", found.path, found.state.step, found.state.pairs_seen)
    return replace(found.state, world_size=ranks.world_size)


def _load(model, optimizer, found):
    load_into(model, found, found.path)
    load_optimizer(optimizer, model, found.optimizer)
