"""What doctor finds out about memory, disk and the run directory."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from model.display.catalogue import texts_here
from model.memory.estimate import disk_bytes, fixed_bytes
from model.run.run_dir import check_empty_or_run, check_name
from model.runtime.cgroup import host_memory

GIB = 2**30
MIN_SHM_BYTES = GIB  # NCCL takes some MiB per pair of GPUs; Docker gives 64 MiB in total by default


@dataclass(frozen=True)
class Row:
    """Result of one check."""

    what: str
    found: str
    remedy: str = ""  # empty: nothing to do
    fails: bool = False  # True: a run would fail


def memory_rows(limit_gb, spec):
    """Rows of free memory, of a GPU at most `limit_gb` GiB (0: all), against what every plan needs; no `spec`: unknown.

    Every plan needs weights, gradients and optimizer state.
    """
    needed, text = sum(fixed_bytes(spec).values()) if spec else 0, texts_here()
    size = f"{needed / GIB:.2f} GiB" if spec else text("doctor.unknown")
    places = [("host memory", host_memory()[0])]
    if torch.cuda.is_available():
        limit = limit_gb * GIB
        frees = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
        places = [
            (text("doctor.gpu_memory", index=i), min(free, limit) if limit else free) for i, free in enumerate(frees)
        ] + places
    for what, free in places:
        found = text("doctor.memory", free=free / GIB, size=size)
        is_used = what != "host memory" or len(places) == 1
        fails = free < needed and is_used
        yield Row(what, found, text("doctor.memory_remedy") if fails else "", fails)


def shared_memory_row():
    """Row of /dev/shm, where NCCL's channels are."""
    text = texts_here()
    if not os.path.isdir("/dev/shm"):
        return Row("/dev/shm", text("doctor.missing"), text("doctor.mount_shm"))
    free = shutil.disk_usage("/dev/shm").free
    remedy = text("doctor.more_shm") if free < MIN_SHM_BYTES else ""
    return Row("/dev/shm", text("doctor.free", free=free / GIB), remedy)


def output_dir_row(output_dir):
    """Row that says whether output_dir is, or can become, a run's directory."""
    folder, text = Path(output_dir).resolve(), texts_here()
    if blocking := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
        return Row("output_dir", text("doctor.is_file", path=blocking[0]), text("doctor.another_dir"), fails=True)
    try:
        check_name(output_dir)
        if folder.exists():
            check_empty_or_run(folder)
    except ValueError as error:
        return Row("output_dir", str(folder), str(error), fails=True)
    return Row("output_dir", text("doctor.exists" if folder.exists() else "doctor.created", folder=folder))


def disk_row(output_dir, num_kept, spec, resumed=False):
    """Row of the free disk space against `num_kept` checkpoints, one being written, best/ and last/.

    Without a `spec` their size is unknown. Those that a `resumed` run has count as free, since it replaces them.
    """
    folder, text = Path(output_dir).resolve(), texts_here()
    while not folder.is_dir():
        folder = folder.parent
    needed, free = disk_bytes(spec, num_kept) if spec else 0, shutil.disk_usage(folder).free
    free += _written_bytes(folder) if resumed else 0
    size = f"{needed / GIB:.2f} GiB" if spec else text("doctor.unknown")
    found = text("doctor.disk", free=free / GIB, folder=folder, size=size)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Row("disk", f"{folder}: {error.strerror}", text("doctor.unwritable"), fails=True)
    remedy = text("doctor.full") if free < needed else ""
    return Row("disk", found, remedy, fails=free < needed)


def _written_bytes(run_dir):
    """Bytes of a run's checkpoints and exports; a file with several links counts once."""
    files = [path for name in ("checkpoints", "best", "last") for path in (run_dir / name).rglob("*")]
    found = (path.lstat() for path in files if path.is_file() and not path.is_symlink())
    return sum({(status.st_dev, status.st_ino): status.st_size for status in found}.values())
