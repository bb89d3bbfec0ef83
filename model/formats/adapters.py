"""Adapters in PEFT's format: read beside the weights that they were trained on, written, and merged into them.

A directory holds adapter_config.json and adapter_model.safetensors, whose names are those of the network with a prefix;
the file's metadata adds what PEFT lacks, under one key: the base's sha256, and where it is as seen from the directory.
"""

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model.formats.adapter_fields import PLAIN, check_known
from model.formats.carried import generation_values, write_carried, write_json
from model.formats.model_card import CARD_FILE, CardFacts, adapter_card, hub_name, merged_card, model_name
from model.formats.tensor_files import read_tensors
from model.formats.weights import (
    INDEX,
    WEIGHTS,
    add_tokenizer,
    check_fits,
    load_weights,
    model_directory,
    read_config,
    weights_file,
    write_card,
    write_record,
    write_tensors,
    write_values,
)
from model.nn.layers import Linear
from model.nn.lora import LoraConfig, check_factors, is_factor
from model.nn.registry import family_of
from model.runtime.atomic_io import whole_directory
from model.runtime.json_stream import read_object
from model.runtime.paths import check_path, is_path

CONFIG, TENSORS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
SHARD_BYTES = 2 * 2**30  # of tensors in one file of a merged model
BASE = "base"  # key in the metadata of TENSORS[0]


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter's configuration, whose base is a directory that exists, and its tensors by name in the network."""

    lora: LoraConfig
    tensors: dict
    directory: Path


def weights_directory(path):
    """The first of `path`, its best/ and its last/ that holds a model or an adapter, or None.

    Raises ValueError for what can be no path.
    """
    check_path(path)
    path = Path(path)
    return next((d for d in (path, path / "best", path / "last") if _holds_adapter(d) or model_directory(d) == d), None)


def adapter_directory(path):
    """`weights_directory` if it holds an adapter, else None."""
    directory = weights_directory(path)
    return directory if directory and _holds_adapter(directory) else None


def tokenizer_directory(path):
    """Where a model's or an adapter's tokenizer is: beside it, or beside an adapter's base; None if nothing is there.

    Raises ValueError as `read_adapter` does.
    """
    directory = weights_directory(path)
    if directory and _holds_adapter(directory) and not (directory / "tokenizer.json").is_file():
        return Path(read_adapter(directory).lora.base)
    return directory


def _holds_adapter(directory):
    return (directory / CONFIG).is_file() and any((directory / name).is_file() for name in TENSORS)


def keep_base(source, target):
    """Write to the folder `target` the configurations of the model or adapter in `source`; nothing for a .bin file."""
    directory = weights_directory(source)
    if directory:
        config_dir = read_adapter(directory).lora.base if _holds_adapter(directory) else directory
        write_carried(config_dir, directory, target)


def load_merged(path):
    """LoadedWeights as of `load_weights`, or those of an adapter directory: of its base, to which `read` adds it.

    Raises ValueError as `load_weights` and `read_adapter` do, and if the two do not fit.
    """
    directory = adapter_directory(path)
    if directory is None:
        return load_weights(path)
    adapter = read_adapter(directory)
    base = load_weights(adapter.lora.base)
    try:
        check_factors(base.tensors, adapter.tensors)
    except ValueError as error:
        raise ValueError(f"{directory} does not fit {adapter.lora.base}: {error}") from None
    return replace(base, tokenizer_dir=tokenizer_directory(directory), lora=adapter.lora, factors=adapter.tensors)


def export_merged(weights, tokenizer, directory, generation=None, card=""):
    """Write the LoadedWeights of `load_merged` as a Hugging Face directory, in place of `directory` atomically.

    `card` is the adapter's, of which the merged model's keeps what it says of the training; empty: it has none. Each
    tensor has the dtype of the base's, and no more are in memory than one file holds: SHARD_BYTES or one tensor.
    Raises ValueError if they do not fit their configuration, OSError if they cannot be written.
    """
    family = family_of(weights.model_config)
    with torch.device("meta"):  # takes no memory
        model = family.build(weights.model_config)
    check_fits(model, weights, directory)
    tensors, shards = weights.tensors, _shards(weights.tensors)
    base = weights.lora.base if weights.lora else None
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    with whole_directory(directory) as draft:
        dtype = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
        values = write_values(model, tokenizer, draft, generation, dtype, base)
        write_card(values, draft, _facts_of_merge(weights.lora) if weights.lora else None)
        if "library_name: peft" in card:
            text = merged_card(card, values.get("is_encoder_decoder", False))
            (draft / CARD_FILE).write_text(text, encoding="utf-8", errors="replace")
        write_record(draft, weights.optimizer)
        try:
            for file, names in shards.items():
                write_tensors(
                    {name: weights.read(name).to(tensors[name].dtype, copy=True) for name in names}, draft / file
                )
        except SafetensorError as error:  # safetensors raises it for a full or failing disk
            raise OSError(f"{directory} cannot be written: {error}") from None
        if len(shards) > 1:
            index = dict(metadata=dict(total_size=sum(tensor.nbytes for tensor in tensors.values())))
            index |= dict(weight_map={name: file for file, names in shards.items() for name in names})
            (draft / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        add_tokenizer(family, tokenizer, draft, (generation or {}).get("prefix", ""))


def _facts_of_merge(lora):
    """CardFacts of a merged model whose adapter has no card."""
    name = model_name(lora.base)
    training = dict(trained=f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {name}, merged")
    return CardFacts(
        summary=f"{name} with an adapter merged into it.", tables=dict(Training=training), base=hub_name(lora.base)
    )


def _shards(tensors):
    """{file name: names of its tensors} of a directory in several files, as transformers names them, or in one."""
    shards, held = [[]], 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > SHARD_BYTES:
            shards, held = [*shards, []], 0
        shards[-1].append(name)
        held += tensor.nbytes
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    return dict(zip(names if len(shards) > 1 else [WEIGHTS], shards, strict=True))


def read_adapter(directory):
    """LoadedAdapter of a directory that PEFT or `export_adapter` wrote.

    Raises ValueError if it is damaged or of another kind, or if its base is missing or has changed.
    """
    values = read_object(directory / CONFIG)
    check_known(values, directory / CONFIG)
    path = next(directory / name for name in TENSORS if (directory / name).is_file())
    metadata = metadata_of(path)
    base = _base_of(directory, values.get("base_model_name_or_path"), metadata)
    family, model_config, _ = read_config(base / "config.json")
    tensors = _without_prefix(read_tensors(path), family.adapter_prefix, path)
    layers = {name.rsplit(".", 2)[0] for name in tensors}
    try:
        lora = LoraConfig(
            rank=values["r"], alpha=values["lora_alpha"], targets=_targets(layers, family, model_config),
            dropout=values.get("lora_dropout", 0.0), use_rslora=values.get("use_rslora", False), base=str(base),
            base_sha256=metadata.get("sha256", ""),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise ValueError(f"{directory / CONFIG} is not a LoRA configuration: {error!s:.500}") from None
    check_base(lora, f"the adapter in {directory}")
    return LoadedAdapter(lora, tensors, directory)


def metadata_of(path):
    """The dict that `export_adapter` adds to a file; empty if it lacks it."""
    if path.suffix != ".safetensors":
        return {}
    try:
        with safe_open(path, "pt") as file:
            values = json.loads((file.metadata() or {}).get(BASE, "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from None
    is_known = isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
    return values if is_known else {}


def _base_of(directory, named, metadata):
    """The directory of an adapter's base: as its configuration names it, else as seen from the adapter."""
    if not isinstance(named, str) or not is_path(named):
        raise ValueError(f"{directory / CONFIG} says base_model_name_or_path={named!r:.80}: write the base's directory")
    seen_from_here = metadata.get("seen_from_here")
    places = [Path(named), directory / named, *([directory / seen_from_here] if seen_from_here else [])]
    found = next(filter(None, map(model_directory, places)), None)
    if found is None:
        raise ValueError(
            f"the adapter in {directory} was trained on {named}, and no model is there: put it there, or write its "
            f"directory as base_model_name_or_path in {directory / CONFIG}"
        )
    return found.resolve()


def _without_prefix(tensors, prefix, path):
    """The tensors by name in the network; ValueError unless they are pairs of factors."""
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    stems = {name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight") for name in named}
    pairs = {f"{stem}.{kind}.weight" for stem in stems for kind in ("lora_A", "lora_B")}
    if not named or named.keys() != pairs or not all(tensor.dim() == 2 for tensor in named.values()):
        odd = sorted(pairs ^ named.keys())[:3]
        raise ValueError(f"{path} does not hold the factors lora_A and lora_B of linear layers alone: {odd}")
    return named


def _targets(layers, family, model_config):
    """The targets that give exactly these layers: the last parts of their names if they do, else the full names."""
    with torch.device("meta"):  # takes no memory
        known = [name for name, module in family.build(model_config).named_modules() if isinstance(module, Linear)]
    last = {name.rpartition(".")[2] for name in layers}
    same = {name for name in known if name.rpartition(".")[2] in last}
    return tuple(sorted(last if same == layers else layers))


def check_base(lora, what):
    """Raise ValueError if the weights in `lora.base` are not those that the adapter (`what`) was trained on."""
    if lora.base_sha256 and (now := identity_of(lora.base)) != lora.base_sha256:
        raise ValueError(
            f"{what} was trained on weights with sha256 {lora.base_sha256[:16]}…, and {lora.base} has changed to "
            f"{now[:16]}…: put the same weights there"
        )


def identity_of(directory):
    """sha256 of the weights in a Hugging Face directory; of several files, that of their sha256s in order of names."""
    digests = []
    for path in sorted(Path(directory).glob("model*.safetensors")) or [weights_file(directory)]:
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def export_adapter(model, tokenizer, directory, generation=None, facts=None, base=None):
    """Write an adapter directory, tokenizer and model card included, in place of `directory` atomically.

    `generation` is a dict of values for its generation_config.json, `facts` are the CardFacts of its README.md, `base`
    is export_model's, by default the adapter's. Raises OSError if it cannot be written.
    """
    family, lora, directory = family_of(model.config), model.lora, Path(directory)
    values = PLAIN | dict(
        task_type=family.task_type, r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets),
        lora_dropout=lora.dropout, use_rslora=lora.use_rslora, base_model_name_or_path=lora.base, inference_mode=True,
    )  # fmt: skip
    origin = dict(sha256=lora.base_sha256, seen_from_here=os.path.relpath(lora.base, directory.resolve()))
    tensors = {family.adapter_prefix + name: t.detach().cpu() for name, t in model.saved_tensors().items()}
    assert all(is_factor(name) for name in tensors)
    with whole_directory(directory) as draft:
        write_json(draft / CONFIG, values)
        try:
            save_file(tensors, draft / TENSORS[0], {BASE: json.dumps(origin)})  # one key: several have no order
        except SafetensorError as error:  # safetensors raises it for a full or failing disk
            raise OSError(f"{directory} cannot be written: {error}") from None
        facts = replace(facts or CardFacts(), base=hub_name(lora.base))
        model_type = getattr(model.config, "model_type", family.name)
        card = adapter_card(facts, model_type, family.task_type == "SEQ_2_SEQ_LM", lora.base)
        (draft / CARD_FILE).write_text(card, encoding="utf-8", errors="replace")
        values = generation_values(model, tokenizer, generation or {}, base or lora.base)
        write_json(draft / "generation_config.json", values)
        add_tokenizer(family, tokenizer, draft, (generation or {}).get("prefix", ""))
