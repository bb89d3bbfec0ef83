"""What doctor finds out about memory, disk and the run directory."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from model.memory.estimate import disk_bytes, fixed_bytes
from model.run.run_dir import check_empty_or_run, check_name
from model.runtime.cgroup import host_memory

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """Result of one check."""

    what: str
    found: str
    remedy: str = ""  # empty: nothing to do
    fails: bool = False  # True: a run would fail


def memory_rows(config, spec):
    """Rows of free memory against what every plan needs: weights, gradients and optimizer state; no `spec`: unknown."""
    needed = sum(fixed_bytes(spec).values()) if spec else 0
    size = f"{needed / GIB:.2f} GiB" if spec else "unknown"
    places = [("host memory", host_memory()[0])]
    if torch.cuda.is_available():
        limit = config.gpu_memory_limit_gb * GIB
        frees = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
        places = [(f"GPU {i} memory", min(free, limit) if limit else free) for i, free in enumerate(frees)] + places
    for what, free in places:
        found = f"{free / GIB:.1f} GiB free, {size} for weights, gradients, optimizer (plan: the rest)"
        is_used = what != "host memory" or len(places) == 1
        fails = free < needed and is_used
        yield Row(what, found, "choose a smaller --model, or stop other programs" if fails else "", fails)


def output_dir_row(config):
    """Row that says whether output_dir is, or can become, a run's directory."""
    folder = Path(config.output_dir).resolve()
    if blocking := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
        return Row("output_dir", f"{blocking[0]} is a file", "choose another --output_dir", fails=True)
    try:
        check_name(config.output_dir)
        if folder.exists():
            check_empty_or_run(folder)
    except ValueError as error:
        return Row("output_dir", str(folder), str(error), fails=True)
    return Row("output_dir", f"{folder}, {'exists' if folder.exists() else 'will be created'}")


def disk_row(output_dir, num_kept, spec, resumed=False):
    """Row of the free disk space against `num_kept` checkpoints, one being written, best/ and last/.

    Without a `spec` their size is unknown. Those that a `resumed` run has count as free, since it replaces them.
    """
    folder = Path(output_dir).resolve()
    while not folder.is_dir():
        folder = folder.parent
    needed, free = disk_bytes(spec, num_kept) if spec else 0, shutil.disk_usage(folder).free
    free += _written_bytes(folder) if resumed else 0
    size = f"{needed / GIB:.2f} GiB" if spec else "unknown"
    found = f"{free / GIB:.1f} GiB free in {folder}, {size} for checkpoints and exports"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "choose another --output_dir, or allow writing there"
        return Row("disk", f"{folder}: {error.strerror}", remedy, fails=True)
    remedy = "free some, lower --keep_latest_n_ckp, or choose another --output_dir" if free < needed else ""
    return Row("disk", found, remedy, fails=free < needed)


def _written_bytes(run_dir):
    """Bytes of a run's checkpoints and exports; a file with several links counts once."""
    files = [path for name in ("checkpoints", "best", "last") for path in (run_dir / name).rglob("*")]
    found = (path.lstat() for path in files if path.is_file() and not path.is_symlink())
    return sum({(status.st_dev, status.st_ino): status.st_size for status in found}.values())
