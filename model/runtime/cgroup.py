"""How much memory and how many processors a container or a batch system leaves to this process. Standard library only.

Both versions of Linux's control groups are read. A limit holds for all that is below its group, so the least on the way
from this process's group up to the topmost that can be seen is what counts.
"""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

MEMINFO = "proc/meminfo"
MEMORY_V2 = ("memory.max", "memory.current", "inactive_file")
MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def num_cpus(root="/"):
    """Processors that this process may keep busy: those that it may run on, and the groups' quotas; at least 1."""
    quotas = [quota for group in _groups(root, "cpu") for quota in _quota(group)]
    # a thread that has used up the quota would keep the others waiting, so a part of a processor does not count
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def host_memory(root="/"):
    """(bytes that this process and others could still get, bytes in all) of the machine or of a group below its limit.

    (0, 0) where the system does not say.
    """
    sizes = _meminfo(Path(root, MEMINFO))
    available, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    for group in _groups(root, "memory"):
        for limit, used in _memory(group):
            available, total = min(available, max(limit - used, 0)), min(total, limit)
    return available, total


def limit_threads(root="/"):
    """Before torch is imported: let it compute with as many threads as the quota allows, if that is the limit."""
    if (allowed := num_cpus(root)) < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(allowed))


def _groups(root, controller):
    """Folders of this process's group and of those above it, for a controller; the topmost last."""
    folders = []
    for line in _text(Path(root, "proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        tops = ("cgroup", "cgroup/unified") if not names else (f"cgroup/{names}", f"cgroup/{controller}")
        inner = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for top in dict.fromkeys(tops):
            # in a container the path may be that of its host, of which only the end can be seen
            folders += [Path(root, "sys/fs", top, group) for group in (inner, *inner.parents)]
    return list(dict.fromkeys(folders))


def _quota(group):
    """The processors that a group may keep busy, in a list; empty without a limit."""
    words = _text(group / "cpu.max").split() or [
        _text(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    with suppress(ValueError, ZeroDivisionError):
        quota, period = map(int, words)  # "max" is no number
        return [quota / period] if quota > 0 else []
    return []


def _memory(group):
    """(limit, bytes in use that cannot be given back) of a group, in a list; empty without a limit."""
    for limit, used, cache in (MEMORY_V2, MEMORY_V1):
        with suppress(ValueError):
            stat = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines())
            in_use = int(_text(group / used) or 0) - int(stat.get(cache, 0))
            return [(int(_text(group / limit)), max(in_use, 0))]
    return []


def _meminfo(path):
    """{name: bytes} of /proc/meminfo."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def _text(path):
    """The text of a file, "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""
