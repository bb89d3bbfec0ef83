"""Directories and files that are whole or absent, whenever the machine stops."""

import ctypes
import errno
import functools
import logging
import os
import shutil
import stat
import threading
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import ujson

LOGGER = logging.getLogger("chat_trainer")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fs.h


@contextmanager
def whole_directory(target):
    """A new directory to fill; when the block ends well it takes the place of `target` at once, fsynced.

    When the block fails, `target` is as it was. One process at a time may write one `target`.
    """
    target = Path(target)
    make_directory(target.parent)
    put_back(target.parent, target.name)
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # by a process that was killed
        _delete(left)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            fsync(path)
        _take_place(draft, target)
        fsync(target.parent)
    finally:
        _delete(draft)


def make_directory(path):
    """Have the directory `path`, parents included, on the disk."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync(directory.parent)


def make_output_directory(path):
    """Have the directory `path` that a user named; raises ValueError where it cannot be made."""
    try:
        make_directory(path)
    except OSError as error:
        raise ValueError(
            f"{path}: the directory cannot be made ({error.strerror}: {error.filename}); give a path where no file "
            "stands in the way and that you may write to"
        ) from None


def remove_drafts(*directories):
    """Delete what a kill left unfinished in these directories, if it can be; nobody else may be writing there."""
    for directory in map(Path, directories):
        for draft in directory.glob(".*.tmp"):
            _delete(draft)


def put_back(directory, name="*"):
    """Have `name` in `directory` again where a kill left it aside; nobody else may be writing it."""
    for aside in Path(directory).glob(f".{name}.*.aside"):
        target = aside.with_name(aside.name[1:].rsplit(".", 2)[0])
        _delete(aside) if target.exists() else aside.rename(target)


def delete_aloud(directory):
    """Delete a directory that nobody needs; that it cannot be deleted is said once and ends nothing."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        _warn_once(f"{directory} is no longer needed and cannot be deleted ({error}): delete it when you can")


@functools.cache
def _warn_once(text):
    LOGGER.warning(text)


def _delete(path):
    """Delete a directory, a file or a link as far as the disk lets us; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _take_place(draft, target):
    if not target.exists():
        os.rename(draft, target)
    elif _exchange(draft, target) != 0:  # a file system without RENAME_EXCHANGE: `put_back` helps after a kill
        aside = draft.with_suffix(".aside")
        os.rename(target, aside)
        os.rename(draft, target)
        os.rename(aside, draft)


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


class AppendedFile:
    """A file that lines are appended to; what the disk refuses waits in memory and goes with the next line.

    A torn last line, left by a kill, is cut when the file is opened. Safe to use from several threads.
    """

    def __init__(self, path):
        self._path, self._waiting, self._lock = Path(path), b"", threading.Lock()
        self._file = self._open()

    def append(self, line):
        """Append bytes that end a line. Raises OSError when the disk refuses them for now."""
        with self._lock:
            self._waiting += line
            if os.fstat(self._file.fileno()).st_nlink == 0:  # deleted under the run
                self._file = self._open()
            whole_bytes = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(self._waiting) < len(self._waiting):
                    raise OSError(errno.ENOSPC, "only a part of a line found room", str(self._path))
            except OSError:
                os.truncate(self._file.fileno(), whole_bytes)
                raise
            self._waiting = b""

    def close(self):
        self._file.close()

    def _open(self):
        make_directory(self._path.parent)
        file = open_own(self._path, "a+b", buffering=0)
        file.truncate(end_of_last_line(file))
        return file


def end_of_last_line(file, end=None):
    """Where the last whole line within the first `end` bytes of a binary file (all) ends; reads as little as it can."""
    end = file.seek(0, os.SEEK_END) if end is None else end
    while end > 0:
        start = max(end - 65536, 0)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def open_own(path, mode, buffering=-1):
    """`open` for a file of our own, which is never followed through a link to somebody else's.

    Raises OSError where something stands in the file's place that is no plain file.
    """
    return open(path, mode, buffering, opener=_open_plain)


def _open_plain(path, flags):
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a pipe would wait for its other end
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(error.errno, "a link or a pipe stands in the place of a file: delete it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no plain file: delete it, or move it elsewhere", str(path))
    return descriptor


def check_no_link(paths):
    """Raise ValueError, naming it, where a link stands in the place of a file or directory of our own."""
    for path in paths:
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, and nothing is written through a link: delete it, or put in "
                "its place what it leads to (a run directory as a whole may be a link)"
            )


def fsync(path):
    """Have the disk hold what was written to a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path, values):
    """Write `values` (plain values) as readable JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ujson.dumps(values, indent=1, ensure_ascii=False, escape_forward_slashes=False)
    # An undecodable byte of a file name is a lone surrogate; written with a backslash it is valid JSON.
    write_file(path, text.encode("utf-8", "backslashreplace"))
