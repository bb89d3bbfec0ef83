"""What the adapter of a run starts from: a checkpoint, an adapter's directory, or its base alone."""

from dataclasses import dataclass, field, replace

from model.commands.no_model import check_source
from model.commands.stored_options import ANOTHER_RUN
from model.formats.adapters import adapter_directory, check_base, identity_of, read_adapter
from model.formats.weights import model_directory
from model.nn.lora import LoraConfig, lora_from, lora_values
from model.nn.registry import family_of
from model.runtime.distributed import from_main


@dataclass(frozen=True)
class AdapterStart:
    """The adapter that a run trains, and its first weights."""

    lora: LoraConfig
    tensors: dict = field(default_factory=dict)  # only on rank 0; empty: drawn at random, or those of a checkpoint


@dataclass(frozen=True)
class Base:
    """The frozen weights of a run's adapter, and the adapter itself where it exists already."""

    directory: str
    sha256: str
    lora: LoraConfig | None
    tensors: dict


def find_base(ranks, config, typed, found):
    """The Base of a run with an adapter, equal on all ranks but for the tensors, which only rank 0 has.

    `found` is the Checkpoint of a resumed run. Raises ValueError if there is none, if it has changed, or if it does not
    go with the options; `typed` holds the names of those on the command line.
    """
    read = []
    values = from_main(ranks, _read_base, config, typed, found and found.state.lora, read)
    return read[0] if read else Base(*values[:2], values[2] and lora_from(values[2]), {})


def _read_base(config, typed, stored, read):
    base = _base_of_checkpoint(config, typed, lora_from(stored)) if stored else _base_of_source(config, typed)
    read.append(base)
    return base.directory, base.sha256, base.lora and lora_values(base.lora)


def _base_of_checkpoint(config, typed, lora):
    source = config.finetune_from_ckp_file
    places = [source] if "finetune_from_ckp_file" in typed else [lora.base, source]
    found = next(filter(None, map(_base_in, filter(None, places))), None)
    if found is None:
        raise ValueError(
            f"this run trains an adapter on the weights in {places[0]}, and no model is there: put it there, or type "
            "--finetune_from_ckp_file=DIR with the directory where it is now"
        )
    lora = replace(lora, base=str(found.resolve()), dropout=config.lora_dropout)
    try:
        check_base(lora, "this run's adapter")
    except ValueError as error:
        raise ValueError(f"{error}, or type --finetune_from_ckp_file=DIR with a directory that has them") from None
    return Base(lora.base, lora.base_sha256, lora, {})


def _base_in(place):
    """The directory of the model in `place`, or that of the base of the adapter there; None if there is neither."""
    directory = adapter_directory(place)
    return model_directory(read_adapter(directory).lora.base if directory else place)


def _base_of_source(config, typed):
    source = config.finetune_from_ckp_file
    directory = source and adapter_directory(source)
    if directory:
        adapter = read_adapter(directory)
        _check_typed(config, typed, adapter.lora, directory)
        if "lora_init" in typed:
            raise ValueError(f"--lora_init={config.lora_init}: the adapter in {directory} has weights: leave it out")
        lora = adapter.lora
        if "lora_dropout" in typed:
            lora = replace(lora, dropout=config.lora_dropout)
        lora = lora if lora.base_sha256 else replace(lora, base_sha256=identity_of(lora.base))
        return Base(lora.base, lora.base_sha256, lora, adapter.tensors)
    directory = model_directory(source) if source else None
    if directory is None:
        if source:
            check_source(source)
        named = f"{source} holds none" if source else "none is typed"
        raise ValueError(
            f"an adapter (--lora_rank={config.lora_rank}) is trained on a model, and {named}: type "
            "--finetune_from_ckp_file=DIR with a Hugging Face directory (config.json and model.safetensors) or a run's"
        )
    return Base(str(directory.resolve()), identity_of(directory), None, {})


def _check_typed(config, typed, lora, directory):
    """Raise ValueError if an option that was typed, or the rank, is not the adapter's."""
    there = dict(lora_rank=lora.rank, lora_alpha=lora.alpha, lora_targets=set(lora.targets), use_rslora=lora.use_rslora)
    here = {name: getattr(config, name) for name in there}
    here["lora_targets"] = {name.strip() for name in config.lora_targets.split(",")}
    for name in there:
        if (name in typed or name == "lora_rank") and here[name] != there[name]:
            value = ",".join(lora.targets) if name == "lora_targets" else there[name]
            raise ValueError(
                f"--{name}={getattr(config, name)}: the adapter in {directory} has {value}: type --{name}={value}, or "
                f"merge it first (python scripts/merge_lora.py {directory} DIR) and train another on DIR"
            )


def start_of(config, model_config, base):
    """The AdapterStart on a Base (None: no weights are there, so only their sizes count); None without an adapter."""
    if base and base.lora:
        return AdapterStart(replace(base.lora, base_precision=config.base_precision), base.tensors)
    lora = lora_of(config, model_config, *([base.directory, base.sha256] if base else []))
    return lora and AdapterStart(lora)


def lora_of(config, model_config, base="", base_sha256=""):
    """LoraConfig of a new adapter on the weights in the directory `base`; None if the run trains none."""
    if not config.lora_rank:
        return None
    known = family_of(model_config).adapter_targets(model_config)
    targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()]
    return LoraConfig(
        rank=config.lora_rank, alpha=config.lora_alpha or 2.0 * config.lora_rank, targets=tuple(targets or known),
        dropout=config.lora_dropout, use_rslora=config.use_rslora, base=base, base_sha256=base_sha256,
        base_precision=config.base_precision,
    )  # fmt: skip


def with_adapter(config, start):
    """`config` with the options of an AdapterStart's adapter; unchanged for None."""
    if start is None:
        return config
    lora = start.lora
    return replace(
        config, lora_rank=lora.rank, lora_alpha=float(lora.alpha), lora_targets=",".join(lora.targets),
        lora_dropout=float(lora.dropout), use_rslora=lora.use_rslora,
    )  # fmt: skip


def without_adapter(config):
    """`config` of a run that trains no adapter."""
    nothing = dict(lora_rank=0, lora_alpha=0.0, lora_targets="", lora_dropout=0.0, use_rslora=False)
    nothing |= dict(lora_init="uniform", base_precision="auto")
    return replace(config, **nothing)


def check_adapter_of(found, config):
    """Raise ValueError unless a Checkpoint and the options both have an adapter, or neither has one."""
    if found and bool(found.state.lora) != bool(config.lora_rank):
        kind = "an adapter" if found.state.lora else "all weights"
        raise ValueError(f"{found.path} is of a run that trains {kind}: keep --lora_rank, {ANOTHER_RUN}")
