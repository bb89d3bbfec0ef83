"""Checkpoints: saved atomically, loaded exactly. Files are safetensors and JSON; a manifest has the sha256 of each.

Data order, learning rate and random numbers are functions of the position, so a checkpoint holds the weights, the
optimizer state and the few values of TrainState.
"""

import errno
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import ujson
from safetensors import SafetensorError
from safetensors.torch import load_file

from model.formats.weights import check_fits, write_tensors
from model.nn.lora import attach, lora_from
from model.nn.registry import config_from, family_of
from model.run.snapshot import named_average, snapshot_of
from model.run.train_state import LaterFormat, TrainState, state_of, state_values
from model.runtime import fault_injection
from model.runtime.atomic_io import fsync, make_directory, remove_drafts, try_delete, whole_directory, write_file
from model.runtime.json_stream import read_object

CHECKPOINT_NAME = re.compile(r"step_\d{8}")
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
AVERAGE_FILE = "average.safetensors"  # the weights again, with the average of those that are trained; not in every run
SPARE_BYTES = 2**20  # for the JSON files and the file headers


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in host memory."""

    path: Path
    state: TrainState
    tensors: dict  # weights by parameter name
    optimizer: dict  # state by <parameter name>/<field>
    average: dict = field(default_factory=dict)  # of the weights, by parameter name; empty: there is none


def files_of(snapshot):
    """{name of a file: its tensors by name} of a Snapshot."""
    files = dict(zip(TENSOR_FILES, (snapshot.weights, snapshot.optimizer), strict=True))
    return files | ({AVERAGE_FILE: snapshot.average} if snapshot.average else {})


def save_checkpoint(run_dir, state, snapshot, keep, drafts=None):
    """Write checkpoints/step_<step>/, then point LATEST at it and delete all but the newest `keep` checkpoints.

    Returns its path. `drafts` are Futures by name of a file, which are given its path once it is written, still in the
    checkpoint's draft. Raises OSError when the disk fails or is full; earlier checkpoints then stay as they were.
    """
    path = checkpoint_path(run_dir, state.step)
    folder = path.parent
    make_directory(folder)
    remove_drafts(folder)  # left by killed processes
    _check_space(folder, snapshot.bytes + SPARE_BYTES)
    with whole_directory(path) as draft:
        identities = _write_tensors(draft, snapshot, drafts or {})
        fault_injection.fire("save", state.step)
        _write_state(draft, state, identities)
    write_file(folder / "LATEST", path.name.encode())
    for old in checkpoint_paths(run_dir)[keep:]:
        try_delete(old)
    return path


def save_state(run_dir, state):
    """Replace the state in the checkpoint of `state.step`, whose tensors stay as they are; returns its path.

    Raises OSError when the disk fails or has no hard links; the checkpoint then stays as it was.
    """
    path = checkpoint_path(run_dir, state.step)
    manifest = read_object(path / "manifest.json")
    names = *TENSOR_FILES, *({AVERAGE_FILE} & manifest.keys())
    with whole_directory(path) as draft:
        for name in names:
            os.link(path / name, draft / name)
        fault_injection.fire("save", state.step)
        _write_state(draft, state, {name: manifest[name] for name in names})
    return path


def _write_state(draft, state, identities):
    """Write state.json and the manifest of a checkpoint; `identities` are those of its tensor files."""
    (draft / "state.json").write_text(ujson.dumps(state_values(state), indent=1))
    manifest = identities | {"state.json": _identity(draft / "state.json")}
    (draft / "manifest.json").write_text(ujson.dumps(manifest, indent=1))


def _identity(file):
    return dict(size=file.stat().st_size, sha256=_sha256(file))


def discard_after(run_dir, step):
    """Rename checkpoints newer than `step` so that the next save deletes them.

    A run that resumes at `step` has skipped them as damaged. Left in place, they would count among the checkpoints that
    are kept and push out valid ones.
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


def _write_tensors(draft, snapshot, drafts):
    """Write the files of tensors at the same time, and fsync them; returns their identities by name."""
    files, identities = files_of(snapshot), {}
    with ThreadPoolExecutor(len(files)) as threads:
        writes = {threads.submit(_write_file, tensors, draft / name): name for name, tensors in files.items()}
        for write in as_completed(writes):
            name = writes[write]
            identities[name] = threads.submit(_identity, write.result())
            if name in drafts and not drafts[name].done():  # done: the second attempt
                drafts[name].set_result(write.result())
        for name in files:
            fsync(draft / name)  # the disk writes while the files are hashed
        return {name: identities[name].result() for name in files}


def _write_file(tensors, path):
    """Write a file of tensors; returns its path."""
    try:
        write_tensors(tensors, path)
    except SafetensorError as error:  # safetensors raises it for a failed disk too
        raise OSError(f"{path} cannot be written: {error}") from None
    return path


def checkpoint_path(run_dir, step):
    """Directory of the checkpoint of a step."""
    return Path(run_dir) / "checkpoints" / f"step_{step:08d}"


def checkpoint_paths(run_dir):
    """Checkpoint directories of a run, newest first."""
    folder = Path(run_dir) / "checkpoints"
    return sorted((p for p in folder.glob("step_*") if CHECKPOINT_NAME.fullmatch(p.name) and p.is_dir()), reverse=True)


def load_newest(run_dir, say):
    """The newest undamaged Checkpoint, or None. Calls `say(text)` for each damaged one that it skips.

    Raises LaterFormat if a later version of this project wrote the checkpoint.
    """
    for path in checkpoint_paths(run_dir):
        try:
            return read_checkpoint(path)
        except LaterFormat:
            raise
        except ValueError as error:
            say(f"{error}; going back to the previous checkpoint")
    return None


def read_checkpoint(path):
    """The Checkpoint at `path`, with every file verified against the manifest.

    Raises ValueError if a file is missing, changed, a link or not in the manifest, LaterFormat (a ValueError) if a
    later version of this project wrote the checkpoint.
    """
    files = (*TENSOR_FILES, "state.json")
    try:
        paths = [path / name for name in (*files, AVERAGE_FILE, "manifest.json")]
        if irregular := [file.name for file in paths if file.is_symlink() or (file.exists() and not file.is_file())]:
            raise ValueError(f"{irregular[0]} is a link or not a regular file")
        manifest = read_object(path / "manifest.json")
        if set(manifest) - {AVERAGE_FILE} != set(files):
            raise ValueError(f"its manifest names {', '.join(map(repr, manifest))}; it must name {', '.join(files)}")
        for name in manifest:
            if not isinstance(manifest[name], dict) or manifest[name].get("sha256") != _sha256(path / name):
                raise ValueError(f"{name} has changed since it was written")
        state = state_of(read_object(path / "state.json"))
        if path.name != f"step_{state.step:08d}":
            raise ValueError(f"state.json is of step {state.step}")
        tensors = [load_file(path / name) for name in (*TENSOR_FILES, AVERAGE_FILE) if name in manifest]
        checkpoint = Checkpoint(path, state, *tensors)
        model_config = config_from(state.shape)
        with torch.device("meta"):  # takes no memory, however large the shape in state.json is
            model = family_of(model_config).build(model_config)
            model = attach(model, lora_from(state.lora)) if state.lora else model
            check_fits(model, checkpoint, files[0])
            if checkpoint.average:
                check_fits(model, replace(checkpoint, tensors=checkpoint.average), AVERAGE_FILE)
        return checkpoint
    except LaterFormat as error:
        raise LaterFormat(f"checkpoint {path} {error}") from None
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is damaged ({error})") from None


def load_optimizer(optimizer, model, tensors):
    """Copy `tensors`, the optimizer state of a Checkpoint, into the state of `optimizer`.

    Copied in place because a second state might not fit on the device; what ranks share is left to `deal`. Raises
    ValueError if the tensors belong to another optimizer or to other weights.
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
    if {field for fields in state.values() for field in fields} != optimizer.fields:
        raise ValueError("the checkpoint is of another optimizer: keep --optimizer, or start with --overwrite=True")
    current = snapshot_of(model, optimizer).optimizer
    wrong = [key for key in {**current, **tensors} if _shape(current, key) != _shape(tensors, key)]
    if wrong:
        raise ValueError(f"the checkpoint's optimizer state does not fit the weights: {', '.join(wrong[:3])}")
    with torch.no_grad():
        for key, tensor in current.items():
            if not tensor.is_meta:
                tensor.copy_(tensors[key])
    optimizer.count_steps()


def load_average(average, model, tensors):
    """Copy into a WeightAverage that of a Checkpoint; without one it begins with the weights of `model`."""
    if not tensors:
        average.restart()
        return
    with torch.no_grad():
        for name, tensor in named_average(average, model).items():
            tensor.copy_(tensors[name])


def _shape(tensors, key):
    return tensors[key].shape if key in tensors else None


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
