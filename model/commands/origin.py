"""What a run starts from: stored options, a checkpoint or weights, read on rank 0 and sent to the other ranks.

The machines need no shared disk.
"""

import logging
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from model.commands.adapter import AdapterStart, check_adapter_of, find_base, start_of
from model.commands.no_model import check_source
from model.commands.objective import objectives_for
from model.commands.options import parse_options, with_stored_options
from model.commands.stored_options import ANOTHER_RUN, stored_options
from model.commands.teachers import read_teachers
from model.data.tokenizer import ChatTokenizer, load_tokenizer
from model.data.turn_template import with_turn_end
from model.display.catalogue import texts_here
from model.formats.adapters import adapter_directory, load_merged, tokenizer_directory
from model.formats.weights import LoadedWeights, check_fits, load_into
from model.nn.lora import attach
from model.nn.registry import config_from, config_values, family_of, load_model_config
from model.run.checkpoint import Checkpoint, load_average, load_newest, load_optimizer
from model.run.run_dir import TOKENIZER_DIR
from model.run.snapshot import Snapshot, deal, snapshot_of
from model.run.train_state import state_of, state_values
from model.runtime.distributed import agree, broadcast, from_main, from_main_before_joining
from model.train.reduction import publish

LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Origin:
    """What a run starts from, equal on all ranks but for the tensors, which only rank 0 has."""

    found: Checkpoint | None  # of a resumed run
    weights: LoadedWeights | None  # of a new run, or those that an adapter is trained on; None: random ones
    tokenizer: ChatTokenizer | None  # None: missing, where that is allowed
    model_config: object  # of its family's config_class
    adapter: AdapterStart | None = None  # None: the run trains the weights themselves
    teachers: tuple = ()  # of TeacherStart


def find_origin(ranks, config, typed, found=None, vocab_size=None):
    """The Origin of a run resumed from the Checkpoint `found`, or of a new run.

    `typed` holds the names of the options on the command line. With a `vocab_size` the tokenizer may be missing; above
    0 it replaces the tokenizer's and the model's. Raises ValueError for what does not fit together.
    """
    check_adapter_of(found, config)
    base = None
    if config.lora_rank and (config.finetune_from_ckp_file or vocab_size is None):
        base = find_base(ranks, config, typed, found)
    source = base.directory if base else config.finetune_from_ckp_file
    weights = read_weights(ranks, source) if base or not found else None
    tokenizer = _tokenizer_for(config, typed, found, vocab_size)
    if tokenizer:
        ids = dict(pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id)
        agree(ranks, "the tokenizer", dict(fingerprint=tokenizer.fingerprint) | ids)
        _check_prefix(config, tokenizer)
    origin = Origin(found, weights, tokenizer, None)
    origin = replace(origin, model_config=_model_config(config, origin, vocab_size))
    if tokenizer and family_of(origin.model_config).reads_dialogues:
        origin = replace(origin, tokenizer=with_turn_end(tokenizer))
    origin = replace(origin, adapter=start_of(config, origin.model_config, base))
    if not vocab_size:
        _check_model_config(ranks, config, typed, origin)
    teachers = read_teachers(ranks, config.teacher, origin.model_config, origin.tokenizer)
    origin = replace(origin, teachers=teachers)
    agree(ranks, "the model's configuration", config_values(origin.model_config))
    return origin


def broadcast_request(stray, options, keep_training=False):
    """The CommandLine of these words, on every rank; rank 0 reads the stored options of a resumed run for all."""
    typed = parse_options(stray, options, keep_training)
    arguments = typed.config.output_dir, typed.keep_training, keep_training
    stored = from_main_before_joining(typed.config.ddp_timeout_s, stored_options, *arguments)
    request = with_stored_options(typed, stored)
    objectives_for(request.config)  # a run that goes on has its stored one
    return request


def agree_on(ranks, request):
    """Raise RuntimeError unless all ranks have the same CommandLine."""
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
    values, optimizer = from_main(ranks, _read_weights, source, loaded)
    return loaded[0] if loaded else LoadedWeights({}, values and config_from(values), optimizer=optimizer)


def _read_weights(source, loaded):
    """(model config of the weights in `source` as plain values or None, the optimizer that trained them last).

    The weights are appended to `loaded`.
    """
    check_source(source)
    loaded.append(load_merged(source))
    text, begins = texts_here(), texts_here()("begins.weights", source=source)
    LOGGER.info(text("begins.merged", text=begins) if adapter_directory(source) else begins)
    return loaded[0].model_config and config_values(loaded[0].model_config), loaded[0].optimizer


def _model_config(config, origin, vocab_size):
    """Model configuration of the checkpoint, else of the weights if they have one, else of config.model.

    Raises ValueError if its vocabulary is unknown, or smaller than the tokenizer's.
    """
    found, weights, tokenizer = origin.found, origin.weights, origin.tokenizer
    known = config_from(found.state.shape) if found else weights and weights.model_config
    model_config = known or load_model_config(config.model)
    num_tokens = tokenizer.vocab_size if tokenizer else 0
    model_config = replace(model_config, vocab_size=vocab_size or model_config.vocab_size or num_tokens)
    if not model_config.vocab_size:
        folder = config.tokenizer_dir or TOKENIZER_DIR
        raise ValueError(
            f"{folder}: there is no tokenizer, so the vocabulary size is unknown: make one with python "
            f"scripts/train_tokenizer.py FILES --output_dir {folder} --vocab_size 8000, or type --vocab_size=N"
        )
    if model_config.vocab_size < num_tokens and not vocab_size:
        raise ValueError(
            f"the model has {model_config.vocab_size} tokens and the tokenizer {num_tokens}: give the "
            "tokenizer that the model was trained with in --tokenizer_dir"
        )
    return model_config


def _check_model_config(ranks, config, typed, origin):
    """Raise ValueError if a typed --model differs from the checkpoint or weights, or if the weights do not fit."""
    weights, model_config = origin.weights, origin.model_config
    if (origin.found or weights and weights.model_config) and "model" in typed:
        wanted = replace(load_model_config(config.model), vocab_size=model_config.vocab_size)
        if wanted != model_config:
            whose = "this run" if origin.found else f"the weights in {config.finetune_from_ckp_file}"
            differences = _differences(config_values(wanted), config_values(model_config))
            raise ValueError(f"--model={config.model}: leave it out, {whose} set the sizes: {differences}")
    if weights:
        from_main(ranks, _check_weights, origin, config.finetune_from_ckp_file)
    if config.trainable not in (parts := model_config.parts):
        raise ValueError(f"--trainable={config.trainable}: this network can train {', '.join(parts)}")


def _differences(wanted, known):
    """The values of a model's configuration that differ from those of the weights, in words."""
    names = ["family"] if wanted["family"] != known["family"] else [n for n in wanted if wanted[n] != known[n]]
    return "; ".join(f"{name} {wanted[name]}, the weights have {known[name]}" for name in names)


def _check_weights(origin, source):
    adapter = origin.adapter
    with torch.device("meta"):
        model = family_of(origin.model_config).build(origin.model_config)
        check_fits(model, origin.weights, source)
        if adapter:
            attach(model, adapter.lora)
    if adapter and adapter.tensors:
        check_fits(model, adapter, source)


def _tokenizer_for(config, typed, found, vocab_size):
    """Tokenizer of a run resumed from the Checkpoint `found`, or of a new run if that is None.

    None if there is none, where a `vocab_size` is given. Raises ValueError if it differs from the tokenizer beside the
    initial weights, where these are on this machine.
    """
    tokenizer_dir, source = Path(config.tokenizer_dir or TOKENIZER_DIR), config.finetune_from_ckp_file
    weights_dir = tokenizer_directory(source) if source else None
    if found and "tokenizer_dir" not in typed:
        # on machines other than rank 0's, output_dir may be missing or hold another run
        folders = [Path(config.output_dir) / "tokenizer", weights_dir, tokenizer_dir]
        return _find_tokenizer(folders, found.state.tokenizer_fingerprint)
    if found or not weights_dir:
        is_missing = vocab_size is not None and not tokenizer_dir.is_dir()
        return None if is_missing else load_tokenizer(tokenizer_dir)
    return _tokenizer_of_weights(config, weights_dir)


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
            sentencepiece = f", or convert its own: python scripts/convert_tokenizer.py {weights_dir}"
            also = sentencepiece if any(weights_dir.glob("*.model")) else ""
            raise ValueError(
                f"{weights_dir} has no tokenizer.json: give the weights' tokenizer in --tokenizer_dir{also}"
            )
        return load_tokenizer(config.tokenizer_dir)
    beside = load_tokenizer(weights_dir)
    given = load_tokenizer(config.tokenizer_dir) if config.tokenizer_dir else beside
    if given.fingerprint != beside.fingerprint:
        raise ValueError(
            f"{weights_dir} was trained with tokenizer {beside.fingerprint}, and tokenizer_dir={config.tokenizer_dir} "
            f"is {given.fingerprint}: leave --tokenizer_dir out"
        )
    return beside


def restore(ranks, model, optimizer, found):
    """Load a Checkpoint into model and optimizer on every rank; returns its TrainState.

    `optimizer` must have its state allocated, as after `dry_run_update`. Raises ValueError if the checkpoint does not
    fit.
    """
    from_main(ranks, _load, model, optimizer, found)
    if model.flat.is_shared or model.flat.is_offloaded:
        deal(ranks, model, optimizer, Snapshot(found.tensors, found.optimizer))
        broadcast(ranks, model.flat.frozen)
        publish(ranks, model.flat)
    else:
        averages = [optimizer.average.values] if optimizer.average else []
        broadcast(ranks, [*model.flat.weights, *averages, *snapshot_of(model, optimizer).optimizer.values()])
    optimizer.count_steps()
    if ranks.is_main:
        values = dict(path=found.path, step=found.state.step, pairs=found.state.pairs_seen)
        LOGGER.info(texts_here()("begins.checkpoint", **values))
    return replace(found.state, world_size=ranks.world_size)


def _load(model, optimizer, found):
    load_into(model, LoadedWeights(found.tensors), found.path)
    load_optimizer(optimizer, model, found.optimizer)
    if optimizer.average:
        load_average(optimizer.average, model, found.average)
        if not found.average:
            LOGGER.info(texts_here()("begins.no_average", path=found.path))


def with_validation(validation, ranks, state):
    """`state` with the identity of the TokenStore `validation`; without best_loss if the pairs have changed."""
    # rank 0 decides: file_identity may differ between machines
    is_same = from_main(ranks, lambda: state.validation in (validation.identity, validation.file_identity))
    if is_same:
        return replace(state, validation=validation.identity)
    if ranks.is_main:
        LOGGER.info(texts_here()("begins.validation"))
    return replace(state.without_best(), validation=validation.identity, evaluated_step=state.evaluated_step)


def _check_prefix(config, tokenizer):
    """Raise ValueError if prompt_prefix leaves too little of a prompt for the question."""
    if (count := len(tokenizer.encode(config.prompt_prefix))) > config.max_seq_len // 2:
        raise ValueError(
            f"--prompt_prefix has {count} tokens, more than half of max_seq_len={config.max_seq_len}: shorten it, or "
            "raise --max_seq_len"
        )
