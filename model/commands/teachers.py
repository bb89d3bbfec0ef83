"""The teachers of a run: networks whose predictions it learns, read on rank 0 and sent to the other ranks."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from config import OPTIONS_WITH, TrainConfig
from model.commands.model_cache import how_to_get
from model.data.tokenizer import load_tokenizer
from model.formats.adapters import TENSORS, adapter_directory, identity_of, load_merged, tokenizer_directory
from model.formats.weights import LoadedWeights, load_into
from model.nn.attention import has_kernels
from model.nn.memory_spec import MemorySpec
from model.nn.registry import config_from, config_values, family_of
from model.runtime.distributed import broadcast, from_main


@dataclass(frozen=True)
class TeacherStart:
    """A network to learn from, equal on all ranks but for the tensors, which only rank 0 has."""

    source: str  # its directory, as it was typed
    model_config: object
    identity: str  # sha256 of its weights
    weights: LoadedWeights


def read_teachers(ranks, sources, model_config, tokenizer):
    """TeacherStart of each of `sources`, directories separated by commas, for a network of this configuration.

    `tokenizer` is the run's, None if it is not known. Raises ValueError for a model that cannot teach the network.
    """
    names = [name.strip() for name in sources.split(",") if name.strip()]
    return tuple(_read_teacher(ranks, name, model_config, tokenizer) for name in names)


def _read_teacher(ranks, source, model_config, tokenizer):
    loaded = []
    values, identity = from_main(ranks, _read, source, tokenizer and tokenizer.fingerprint, loaded)
    weights = loaded[0] if loaded else LoadedWeights({}, config_from(values))
    teacher = TeacherStart(source, weights.model_config, identity, weights)
    _check(teacher, model_config, tokenizer)
    return teacher


def _read(source, fingerprint, loaded):
    """(model configuration as plain values, sha256) of the model in `source`; its weights are appended to `loaded`."""
    folder = tokenizer_directory(source)
    if folder is None:
        hint = how_to_get(source) or "give a Hugging Face directory or a run directory"
        raise ValueError(f"--teacher={source}: no model there; {hint}")
    known = load_tokenizer(folder).fingerprint
    if fingerprint and known != fingerprint:
        raise ValueError(
            f"--teacher={source} has the tokenizer {known}, and this run {fingerprint}: a teacher's probabilities are "
            "of the same tokens, so it must have been trained with the same tokenizer"
        )
    loaded.append(load_merged(source))
    return config_values(loaded[0].model_config), _identity(source, loaded[0])


def _identity(source, weights):
    """sha256 of the weights in `source`; that of an adapter's and its base's, if it is one."""
    adapter = adapter_directory(source)
    if adapter is None:
        return identity_of(weights.tokenizer_dir)
    file = next(path for name in TENSORS if (path := Path(adapter, name)).is_file())
    return hashlib.sha256(identity_of(weights.lora.base).encode() + file.read_bytes()).hexdigest()


def _check(teacher, model_config, tokenizer):
    family, own = family_of(teacher.model_config), family_of(model_config)
    if family is not own:
        raise ValueError(
            f"--teacher={teacher.source} is of the family {family.name}, and this run trains one of {own.name}: their "
            "inputs differ, so take a teacher of the same family"
        )
    if tokenizer and (begins := family.first_id(teacher.model_config, tokenizer)) != own.first_id(
        model_config, tokenizer
    ):
        raise ValueError(
            f"--teacher={teacher.source} begins a response with the token {begins}, and this run's network with "
            f"{own.first_id(model_config, tokenizer)}: take another teacher"
        )


def place_teachers(ranks, teachers, dtype):
    """The LanguageModels of these TeacherStarts on this rank's device, frozen, in the dtype of the run."""
    return tuple(_place(ranks, teacher, dtype) for teacher in teachers)


def _place(ranks, teacher, dtype):
    with torch.device("meta"):
        model = family_of(teacher.model_config).build(teacher.model_config, 0.0, dtype).requires_grad_(False)
    model.place(ranks.device)
    if ranks.is_main:
        load_into(model, teacher.weights, teacher.source)
    broadcast(ranks, model.flat.weights)
    return model.eval()


def without_teacher(config):
    """`config` of a run that learns from no teacher."""
    return replace(config, **{name: getattr(TrainConfig, name) for name in ("teacher", *OPTIONS_WITH["teacher"])})


def taught(spec, teachers, machine, dtype):
    """`spec` with the MemorySpecs of these TeacherStarts; ValueError for one that cannot read its batches."""
    specs = []
    for teacher in teachers:
        config = teacher.model_config
        kernels = has_kernels(torch.device(machine.device_type), dtype, *config.kernel_sizes)
        if kernels != spec.kernels:
            without = f"--teacher={teacher.source}" if spec.kernels else "the network that is trained"
            raise ValueError(
                f"the attention kernels do not support the heads of {without} ({config.kernel_sizes}, and "
                f"{spec.model_config.kernel_sizes}), so the two read different batches: type --mixed_precision=no"
            )
        specs.append(MemorySpec(spec.family, config, spec.number_bytes, kernels))
    return replace(spec, teachers=tuple(specs))
