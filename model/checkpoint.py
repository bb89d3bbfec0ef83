"""What a run remembers: atomic save, exact load. safetensors and JSON only, each file's sha256 in a manifest.

Data order, learning rate and random numbers are functions of the position, so a checkpoint holds weights, optimizer
state and the few values of TrainState.
"""

import errno
import hashlib
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import ujson
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from config import T5ModelConfig
from model import faults
from model.durable import make_directory, remove_drafts, whole_directory, write_file
from model.json_items import read_object
from model.optim import STATE_FIELDS

NAME = re.compile(r"step_\d{8}")
SPARE_BYTES = 2**20  # for what stands beside the tensors


@dataclass(frozen=True)
class TrainState:
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    pairs_seen: int = 0  # over all epochs
    warmup_pairs: int = 0  # fixed at the run's first start
    best_loss: float | None = None  # validation loss of best/
    best_step: int = 0
    seed: int = 0
    world_size: int = 1
    tokenizer_fingerprint: str = ""
    num_pairs: int = 0  # of the training file
    shape: dict | None = None  # of the model
    plan: dict | None = None  # how steps are cut
    growth: dict | None = None  # of a plan that was shrunk
    evaluated_step: int = 0  # the last step that was evaluated
    recent_norms: tuple = ()  # gradient norms that the spike guard compares with

    def after(self, result):
        return replace(
            self, step=result.step, pairs_seen=result.pairs_seen, plan=asdict(result.plan),
            growth=asdict(result.growth), recent_norms=result.recent_norms,
        )  # fmt: skip


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
        faults.fire("save", state.step)
        _write_tensors(snapshot.optimizer, draft / "optimizer.safetensors")
        (draft / "state.json").write_text(ujson.dumps(asdict(state), indent=1))
        manifest = {file.name: dict(size=file.stat().st_size, sha256=_sha256(file)) for file in draft.iterdir()}
        (draft / "manifest.json").write_text(ujson.dumps(manifest, indent=1))
    write_file(folder / "LATEST", path.name.encode())
    present = checkpoint_paths(run_dir)
    kept = [p for p in present if p <= path][:keep]  # later ones are damaged: the run went back past them
    for old in set(present).difference(kept):
        shutil.rmtree(old)
    return path


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
    """The newest Checkpoint that is whole, or None; `say(text)` hears about each one passed over."""
    for path in checkpoint_paths(run_dir):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            say(f"{error}; going back to the checkpoint before it")
    return None


def read_checkpoint(path):
    """The Checkpoint at `path`; raises ValueError when a file is missing, cut, changed or not the folder's own."""
    files = ("model.safetensors", "optimizer.safetensors", "state.json")
    try:
        if links := [name for name in (*files, "manifest.json") if (path / name).is_symlink()]:
            raise ValueError(f"{links[0]} is a link")
        manifest = read_object(path / "manifest.json")
        if set(manifest) != set(files):
            raise ValueError(f"its manifest names {', '.join(manifest)}, and the files are {', '.join(files)}")
        for name in files:
            if manifest[name]["sha256"] != _sha256(path / name):
                raise ValueError(f"{name} has changed since it was written")
        state = _state_of(read_object(path / "state.json"))
        return Checkpoint(path, state, load_file(path / files[0]), load_file(path / files[1]))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is damaged ({error})") from None


def _state_of(values):
    """The TrainState in a state.json; raises ValueError or TypeError for values of other kinds."""
    state = TrainState(**values | dict(recent_norms=tuple(values.get("recent_norms", ()))))
    for field in fields(TrainState):
        value = getattr(state, field.name)
        if not isinstance(value, field.type) or (field.type is int and value < 0):
            raise ValueError(f"state.json says {field.name}={value!r}")
    if not all(isinstance(norm, float) for norm in state.recent_norms):
        raise ValueError(f"state.json says recent_norms={state.recent_norms}")
    if state.shape:
        T5ModelConfig(**state.shape)
    return state


def load_optimizer(optimizer, model, tensors):
    """Put the optimizer state of a Checkpoint back; options such as weight decay stay what they are now.

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
    numbered = {i: state[name] for i, name in enumerate(names)}
    optimizer.load_state_dict(dict(state=numbered, param_groups=optimizer.state_dict()["param_groups"]))


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
