"""Weights in and out: Hugging Face directories, run directories and .bin files."""

import math
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from config import T5ModelConfig
from model.data.tokenizer import copy_tokenizer
from model.nn.t5.huggingface import (
    ALIASES,
    as_hugging_face,
    canonical_tensors,
    check_family,
    check_family_beside,
    read_t5_config,
)
from model.runtime.atomic_io import whole_directory

SAFE_LOAD = (2, 10)  # the first torch whose weights_only=True keeps its promise
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# What pickle builds for a state dict of floats: anything else could take any memory before the tensors are looked at.
PICKLED = {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch DoubleStorage",
}  # fmt: skip
ZIP_BEGINS, LEGACY_PICKLES = b"PK\x03\x04", 5  # torch before 1.6 wrote pickles one after the other, then bytes


def export_model(model, tokenizer, directory):
    """Write an ordinary Hugging Face directory, tokenizer included; `directory` is whole at every moment.

    Raises OSError when the disk fails.
    """
    with whole_directory(directory) as draft:
        try:
            # on the host: transformers copies tensors that share their storage, for which a GPU may have no room
            as_hugging_face(model, tokenizer, "cpu").save_pretrained(draft)
        except SafetensorError as error:  # how this library says that the disk failed
            raise OSError(f"{directory} cannot be written: {error}") from None
        try:
            copy_tokenizer(tokenizer.directory, draft)
        except ValueError as error:  # changed under the run: the weights can wait for the next export
            raise OSError(str(error)) from None


@dataclass(frozen=True)
class LoadedWeights:
    """What a checkpoint holds: tensors by Hugging Face name, the shape and the tokenizer's place where it tells."""

    tensors: dict
    model_config: T5ModelConfig | None
    tokenizer_dir: Path | None


def load_weights(path):
    """Weights of a Hugging Face directory, a run directory (its best/, else last/) or a .bin state dict.

    Raises ValueError when `path` is none of these or not a T5 v1.0. Never runs code from a file, and takes no more time
    and memory than a file of its size is worth.
    """
    path = Path(path)
    if path.is_file():
        check_family_beside(path)
        return LoadedWeights(canonical_tensors(read_tensors(path), path), None, None)
    directory = model_directory(path)
    if directory is None:
        raise ValueError(
            f"finetune_from_ckp_file={path}: no model there; name a Hugging Face directory (config.json and "
            "model.safetensors), a run directory with best/, or a .bin file"
        )
    model_config, values = read_t5_config(directory / "config.json")
    check_family(values, directory / "config.json")
    tensors = canonical_tensors(read_tensors(directory / "model.safetensors"), directory)
    if model_config.num_layers + model_config.num_decoder_layers > len(tensors):  # before a model so deep is built
        raise ValueError(f"{directory} does not fit its config.json: {len(tensors)} tensors for {model_config}")
    return LoadedWeights(tensors, model_config, directory)


def model_directory(path):
    """The directory in which the weights of a Hugging Face or a run directory lie, or None."""
    for directory in (path, path / "best", path / "last"):
        if (directory / "config.json").is_file() and (directory / "model.safetensors").is_file():
            return directory
    return None


def read_tensors(path):
    """Tensors of finite floats by name, without wrappers' prefixes, in a .safetensors file or a pickled state dict.

    Raises ValueError for anything else, and for tensors that claim more bytes than the file has.
    """
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from None
    except Exception as error:  # torch.load raises pickle's own error, which this project does not import
        raise ValueError(f"{path} is not a plain state dict and is refused: {type(error).__name__}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(
            f"{path} is not a state dict of tensors: give the file that torch.save(model.state_dict()) wrote"
        )
    for prefix in ("module.", "_orig_mod.", "model."):
        tensors = {name.removeprefix(prefix): tensor.detach() for name, tensor in tensors.items()}
    _check_plain(tensors, path)
    return tensors


def _unpickled(path):
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_LOAD:
        raise ValueError("torch before 2.10 can be made to run code by such a file (CVE-2026-24747): upgrade it")
    with open(path, "rb") as file:
        if file.read(len(ZIP_BEGINS)) == ZIP_BEGINS:
            _check_zip(file)
        else:
            file.seek(0)
            for _ in range(LEGACY_PICKLES):
                _check_pickle(file)
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_zip(file):
    """Raise ValueError for an archive that unpacks to more bytes than it has, or whose pickle is no state dict's."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            pickles = [part for part in parts if part.filename.endswith("/data.pkl")]
            num_bytes = sum(part.file_size for part in parts)
            if len(pickles) != 1 or num_bytes > file.seek(0, 2) or any(part.compress_type for part in parts):
                raise ValueError(f"an archive of {num_bytes:,} bytes that torch.save did not write")
            with archive.open(pickles[0]) as inner:
                _check_pickle(inner)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"a damaged archive ({error})") from None


def _check_pickle(file):
    """Raise ValueError where the next pickle of `file` names what no state dict of floats holds."""
    for opcode, name, _ in pickletools.genops(file):
        if "GLOBAL" in opcode.name and name not in PICKLED:
            raise ValueError(f"it is not a plain state dict of floats, it holds {name!r:.80}")


def _check_plain(tensors, path):
    """Raise ValueError unless all are dense floats, finite, and together no larger than the file at `path`."""
    odd = [name for name, t in tensors.items() if t.dtype not in FLOATS or t.layout != torch.strided or t.is_meta]
    if odd:
        tensor = tensors[odd[0]]
        raise ValueError(
            f"{path}: {odd[0]:.200} is {tensor.dtype}, {tensor.layout} on {tensor.device}: weights must be dense "
            "float32, float16 or bfloat16; save the model again in one of these"
        )
    if any(length < 0 for tensor in tensors.values() for length in tensor.shape):
        raise ValueError(f"{path} holds a tensor of a negative length: save the model again")
    sizes = {name: math.prod(tensor.shape) * tensor.itemsize for name, tensor in tensors.items()}  # nbytes can overflow
    claimed = max([0, *sizes.values(), sum(size for name, size in sizes.items() if name not in ALIASES)])
    if claimed > path.stat().st_size:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes and its tensors {claimed:,}: they are expanded or share memory; "
            "save each one on its own, with tensor.contiguous().clone()"
        )
    for name, tensor in tensors.items():
        if not math.isfinite(tensor.sum(dtype=torch.float64)):
            raise ValueError(f"{path}: {name:.200} holds NaN or infinity: take a checkpoint from before that")


def load_into(model, weights, source):
    """Copy `weights.tensors` into `model`; raises ValueError naming what does not fit."""
    check_fits(model, weights, source)
    model.load_state_dict(weights.tensors)


def check_fits(model, weights, source):
    """Raise ValueError, naming what does not fit, unless `weights.tensors` are those of `model` in name and shape."""
    own = model.state_dict()
    missing, extra = own.keys() - weights.tensors.keys(), weights.tensors.keys() - own.keys()
    wrong = [n for n in own.keys() & weights.tensors.keys() if own[n].shape != weights.tensors[n].shape]
    if missing or extra or wrong:
        shapes = [f"{n}: {tuple(weights.tensors[n].shape)} there, {tuple(own[n].shape)} here" for n in wrong[:3]]
        raise ValueError(
            f"{source} does not fit this model: {len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(wrong)} of another shape; {'; '.join([*shapes, *sorted(missing)[:3], *sorted(extra)[:3]])}"
            + ("; a .bin file does not tell its shape: name it in --model" if Path(source).is_file() else "")
        )
