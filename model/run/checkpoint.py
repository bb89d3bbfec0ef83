"""What a run remembers: atomic save, exact load. safetensors and JSON only, each file's sha256 in a manifest.

Data order, learning rate and random numbers are functions of the position, so a checkpoint holds weights, optimizer
state and the few values of TrainState.
"""

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import ujson
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from config import T5ModelConfig
from model.nn.t5.network import TextToTextModel
from model.nn.weights_io import check_fits
from model.run.train_state import LaterFormat, TrainState, state_of, state_values
from model.runtime import fault_injection
from model.runtime.atomic_io import delete_aloud, make_directory, remove_drafts, whole_directory, write_file
from model.runtime.json_stream import read_object
from model.train.optim import STATE_FIELDS, count_steps

NAME = re.compile(r"step_\d{8}")
SPARE_BYTES = 2**20  # for what stands beside the tensors


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds beside its TrainState, as tensors that nobody changes any more."""

    weights: dict
    optimizer: dict  # by <parameter name>/<field>

    @property
    def bytes(self):
        return sum(t.nbytes for tensors in (self.weights, self.optimizer) for t in tensors.values())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, verified."""

    path: Path
    state: TrainState
    tensors: dict
    optimizer: dict


def snapshot_of(model, optimizer):
    """The Snapshot of what `model` and `optimizer` hold now, without a copy."""
    names = {p: name for name, p in model.named_parameters()}
    moments = {
        f"{names[p]}/{field}": torch.as_tensor(value)
        for p, fields in optimizer.state.items()
        for field, value in fields.items()
        if value is not None
    }
    return Snapshot(model.state_dict(), moments)


def save_checkpoint(run_dir, state, snapshot, keep):
    """Write checkpoints/step_<step>/, durable before LATEST names it; of those up to this one `keep` are kept.

    Returns its path. Raises OSError when the disk fails or lacks space; earlier checkpoints are then as they were.
    """
    folder = Path(run_dir) / "checkpoints"
    path = folder / f"step_{state.step:08d}"
    make_directory(folder)
    remove_drafts(folder)  # by processes that were killed
    _check_space(folder, snapshot.bytes + SPARE_BYTES)
    with whole_directory(path) as draft:
        _write_tensors(snapshot.weights, draft / "model.safetensors")
        fault_injection.fire("save", state.step)
        _write_tensors(snapshot.optimizer, draft / "optimizer.safetensors")
        (draft / "state.json").write_text(ujson.dumps(state_values(state), indent=1))
        manifest = {file.name: dict(size=file.stat().st_size, sha256=_sha256(file)) for file in draft.iterdir()}
        (draft / "manifest.json").write_text(ujson.dumps(manifest, indent=1))
    write_file(folder / "LATEST", path.name.encode())
    for old in checkpoint_paths(run_dir)[keep:]:
        delete_aloud(old)
    return path


def set_aside_later(run_dir, step):
    """Make drafts, which the next save deletes, of the checkpoints after `step`: the run went back past them.

    As what they are they would count among those that are kept, and push a whole one out.
    """
    for path in checkpoint_paths(run_dir):
        if path.name > f"step_{step:08d}":
            path.rename(path.with_name(f".{path.name}.damaged.tmp"))


def _check_space(folder, needed_bytes):
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC, f"a checkpoint takes {needed_bytes:,} bytes and the disk has {free_bytes:,} free: make room",
            str(folder),
        )  # fmt: skip


def _write_tensors(tensors, path):
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # how this library says that the disk failed
        raise OSError(f"{path} cannot be written: {error}") from None


def checkpoint_paths(run_dir):
    """Checkpoint directories of a run, the newest first."""
    folder = Path(run_dir) / "checkpoints"
    return sorted((p for p in folder.glob("step_*") if NAME.fullmatch(p.name) and p.is_dir()), reverse=True)


def load_newest(run_dir, say):
    """The newest Checkpoint that is whole, or None; `say(text)` hears about each one passed over.

    Raises LaterFormat where that is one of a later version.
    """
    for path in checkpoint_paths(run_dir):
        try:
            return read_checkpoint(path)
        except LaterFormat:
            raise
        except ValueError as error:
            say(f"{error}; going back to the checkpoint before it")
    return None


def read_checkpoint(path):
    """The Checkpoint at `path`; raises ValueError when a file is missing, cut, changed or not the folder's own.

    One of a later version is a LaterFormat.
    """
    files = ("model.safetensors", "optimizer.safetensors", "state.json")
    try:
        held = [path / name for name in (*files, "manifest.json")]
        if strange := [file.name for file in held if file.is_symlink() or (file.exists() and not file.is_file())]:
            raise ValueError(f"{strange[0]} is a link or no plain file")
        manifest = read_object(path / "manifest.json")
        if set(manifest) != set(files):
            raise ValueError(
                f"its manifest names {', '.join(map(repr, manifest))}, and the files are {', '.join(files)}"
            )
        for name in files:
            if not isinstance(manifest[name], dict) or manifest[name].get("sha256") != _sha256(path / name):
                raise ValueError(f"{name} has changed since it was written")
        state = state_of(read_object(path / "state.json"))
        if path.name != f"step_{state.step:08d}":
            raise ValueError(f"state.json is of step {state.step}")
        found = Checkpoint(path, state, load_file(path / files[0]), load_file(path / files[1]))
        with torch.device("meta"):  # before a model of that shape takes memory
            check_fits(TextToTextModel(T5ModelConfig(**state.shape)), found, files[0])
        return found
    except LaterFormat as error:
        raise LaterFormat(f"checkpoint {path} {error}") from None
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is damaged ({error})") from None


def load_optimizer(optimizer, model, tensors):
    """Copy the optimizer state of a Checkpoint over the one there is; a second one beside it might not fit the device.

    Raises ValueError for the state of another optimizer or of other weights.
    """
    names = {p: name for name, p in model.named_parameters()}
    names = [names[p] for p in optimizer.param_groups[0]["params"]]
    state = {}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        state.setdefault(name, {})[field] = tensor
    if not state and not optimizer.state:
        return  # saved before the first update
    if state.keys() != set(names):
        raise ValueError(
            f"the checkpoint has optimizer state for {len(state)} weights, and {len(names)} are trained now: keep "
            "--trainable"
        )
    if {field for fields in state.values() for field in fields} != STATE_FIELDS[type(optimizer)]:
        raise ValueError("the checkpoint is of another optimizer: keep --optimizer, or start with --overwrite=True")
    own = snapshot_of(model, optimizer).optimizer
    wrong = [key for key in {**own, **tensors} if _shape(own, key) != _shape(tensors, key)]
    if wrong:
        raise ValueError(f"the checkpoint's optimizer state does not fit the weights: {', '.join(wrong[:3])}")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(tensors[key])
    count_steps(optimizer)


def _shape(tensors, key):
    return tensors[key].shape if key in tensors else None


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
