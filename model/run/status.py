"""The status files of a run: what each rank does now and the memory that it uses. Imports no torch.

Each rank replaces its own small status_rank<r>.json, so a step needs no collective for it. A status is read while the
run lasts: it is not flushed to the disk, and a disk that refuses it costs nothing. A file that no run writes is read as
no status.
"""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import ujson

from model.runtime.atomic_io import open_own

MAX_BYTES = 1 << 14  # of a status file; a longer one is none of ours


@dataclass(frozen=True)
class Status:
    """What one rank wrote last."""

    time: float = 0.0  # Unix seconds; 0: the rank wrote none
    rank: int = 0
    host: str = ""
    pid: int = 0
    device: str = ""  # its name
    uuid: str = ""  # of a GPU; empty on a CPU
    reserved_bytes: int = 0  # of GPU memory, by PyTorch's allocator
    peak_bytes: int = 0  # the most that it had reserved
    limit_bytes: int = 0  # of GPU memory that the run may use; 0 on a CPU
    rss_bytes: int = 0  # resident memory of the process
    host_used_bytes: int = 0
    host_total_bytes: int = 0
    activity: str = ""
    done: int = 0
    total: int = 0  # 0: unknown
    saving: bool = False
    stopping: bool = False


KINDS = {field.name: (int, float) if field.type is float else field.type for field in fields(Status)}


def write_status(run_dir: str | Path, status: Status) -> bool:
    """Replace the status file of `status.rank`; False if the disk refused it."""
    path = _path(run_dir, status.rank)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with open_own(draft, "wb") as file:
            file.write(ujson.dumps(asdict(status)).encode("utf-8", "backslashreplace"))
        os.replace(draft, path)
    except OSError:
        return False
    return True


def read_statuses(run_dir: str | Path, world_size: int) -> list[Status]:
    """The status of each rank below `world_size` that has one here, by rank; of several machines, only this disk's."""
    found = [_read(_path(run_dir, rank)) for rank in range(world_size)]
    return [status for status in found if status.time]


def _path(run_dir, rank):
    return Path(run_dir, f"status_rank{rank}.json")


def _read(path):
    try:
        with open_own(path, "rb") as file:
            values = ujson.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return Status()
    if not isinstance(values, dict):
        return Status()
    return Status(**{name: value for name, value in values.items() if _is_valid(name, value)})


def _is_valid(name, value):
    if name not in KINDS or not isinstance(value, KINDS[name]) or (KINDS[name] is int and isinstance(value, bool)):
        return False
    return not isinstance(value, int | float) or 0 <= value < 2**63
