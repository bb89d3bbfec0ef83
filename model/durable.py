"""Directories and files that are whole or absent, whenever the machine stops."""

import ctypes
import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fs.h


@contextmanager
def whole_directory(target):
    """A new directory to fill; when the block ends well it takes the place of `target` at once, fsynced.

    When the block fails, `target` is as it was. One process at a time may write one `target`.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            fsync(path)
        _take_place(draft, target)
        fsync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_drafts(*directories):
    """Delete what a kill left unfinished in these directories; nobody else may be writing there."""
    for directory in map(Path, directories):
        for draft in directory.glob(".*.tmp"):
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def _take_place(draft, target):
    if not target.exists():
        os.rename(draft, target)
    elif _exchange(draft, target) != 0:  # a file system without RENAME_EXCHANGE: two renames, absent in between
        old = draft.with_suffix(".old")
        os.rename(target, old)
        os.rename(draft, target)
        shutil.rmtree(old)


def _exchange(one, other):
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)


def write_file(path, data):
    """Write bytes to `path` so that it holds either its old content or all of `data`, fsynced."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        draft.write_bytes(data)
        fsync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    fsync(path.parent)


def fsync(path):
    """Have the disk hold what was written to a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
