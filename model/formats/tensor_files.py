"""Reads the tensors in files of weights that strangers wrote; runs no code from them.

Time and memory are bounded by the size of the file.
"""

import math
import pickletools
import zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.nn.registry import FAMILIES

SAFE_LOAD = (2, 10)  # the first torch whose weights_only=True runs no code from a file
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# The only names in the pickle of a state dict of floats. Any other could allocate without limit inside torch.load.
PICKLED = {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch DoubleStorage",
}  # fmt: skip
ZIP_BEGINS, LEGACY_PICKLES = b"PK\x03\x04", 5  # torch before 1.6 wrote five pickles, then the bytes of the tensors


def read_tensors(path):
    """{name: tensor of finite floats} of a .safetensors file or a pickled state dict.

    Strips the prefixes of wrappers (module., _orig_mod., model.) from names. Raises ValueError for any other file, and
    if the tensors take more bytes than the file has.
    """
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from None
    except Exception as error:  # pickle's error among others; this project does not import pickle
        raise ValueError(f"{path} is not a plain state dict and is refused: {type(error).__name__}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(
            f"{path} is not a state dict of tensors: give a file written by torch.save(model.state_dict(), FILE)"
        )
    for prefix in ("module.", "_orig_mod.", "model."):
        tensors = {name.removeprefix(prefix): tensor.detach() for name, tensor in tensors.items()}
    _check_plain(tensors, path)
    return tensors


def _unpickled(path):
    if tuple(map(int, torch.__version__.split(".")[:2])) < SAFE_LOAD:
        raise ValueError("such a file can run code in torch before 2.10 (CVE-2026-24747): upgrade torch")
    with open(path, "rb") as file:
        if file.read(len(ZIP_BEGINS)) == ZIP_BEGINS:
            _check_zip(file)
        else:
            file.seek(0)
            for _ in range(LEGACY_PICKLES):
                _check_pickle(file)
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_zip(file):
    """Raise ValueError if the archive is compressed, holds more bytes than the file, or fails `_check_pickle`."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            pickles = [part for part in parts if part.filename.endswith("/data.pkl")]
            num_bytes = sum(part.file_size for part in parts)
            if len(pickles) != 1 or num_bytes > file.seek(0, 2) or any(part.compress_type for part in parts):
                raise ValueError(f"an archive of {num_bytes:,} bytes that was not written by torch.save")
            with archive.open(pickles[0]) as inner:
                _check_pickle(inner)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"the archive is damaged ({error})") from None


def _check_pickle(file):
    """Raise ValueError if the next pickle of `file` names anything outside PICKLED."""
    for opcode, name, _ in pickletools.genops(file):
        if "GLOBAL" in opcode.name and name not in PICKLED:
            raise ValueError(f"it is not a plain state dict of floats: it holds {name!r:.80}")


def _check_plain(tensors, path):
    """Raise ValueError unless all tensors are dense, finite floats and together no larger than the file at `path`."""
    unsupported = [
        name for name, t in tensors.items() if t.dtype not in FLOATS or t.layout != torch.strided or t.is_meta
    ]
    if unsupported:
        tensor = tensors[unsupported[0]]
        raise ValueError(
            f"{path}: {unsupported[0]:.200} is {tensor.dtype}, {tensor.layout} on {tensor.device}: weights must be "
            "dense float32, float16 or bfloat16: save the model again in one of these"
        )
    if any(length < 0 for tensor in tensors.values() for length in tensor.shape):
        raise ValueError(f"{path} holds a tensor with a negative length: save the model again")
    # math.prod, because tensor.nbytes can overflow
    sizes = {name: math.prod(tensor.shape) * tensor.itemsize for name, tensor in tensors.items()}
    aliases = {name for family in FAMILIES.values() for name in family.aliases}
    claimed = max([0, *sizes.values(), sum(size for name, size in sizes.items() if name not in aliases)])
    if claimed > path.stat().st_size:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes but its tensors need {claimed:,}, because they are "
            "expanded or share memory: save tensor.contiguous().clone() of each"
        )
    for name, tensor in tensors.items():
        if not math.isfinite(tensor.sum(dtype=torch.float64)):
            raise ValueError(f"{path}: {name:.200} holds NaN or infinity: use an earlier checkpoint")
