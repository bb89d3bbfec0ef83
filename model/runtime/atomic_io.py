"""Write files and directories so that each is whole or absent, whenever the machine stops."""

import ctypes
import errno
import fcntl
import functools
import logging
import os
import shutil
import stat
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import ujson

LOGGER = logging.getLogger("chat_trainer")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fs.h
POLL_SECONDS = 0.2


@contextmanager
def whole_directory(target):
    """Yield a draft directory to fill; when the block succeeds, the draft is fsynced and replaces `target` atomically.

    When the block fails, `target` is unchanged. Only one process at a time may write a given `target`.
    """
    target = Path(target)
    make_directory(target.parent)
    put_back(target.parent, target.name)
    for stale_draft in target.parent.glob(f".{target.name}.*.tmp"):  # left by a killed process
        _delete(stale_draft)
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
    """Create the directory `path` and its parents, and fsync each entry made."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync(directory.parent)


@contextmanager
def output_directory(path):
    """The directory `path` that a user named, made for the block; where that fails, what was made is gone again.

    Raises ValueError if it cannot be created.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        _make_output(path)
        yield
    except BaseException:
        for directory in missing:
            with suppress(OSError):  # it was never made, or holds what another process wrote
                directory.rmdir()
        raise


def _make_output(path):
    try:
        make_directory(path)
    except OSError as error:
        raise ValueError(
            f"{path}: the directory cannot be made ({error.strerror}: {error.filename}); give a path where no file "
            "stands in the way and that you may write to"
        ) from None


def remove_drafts(*directories):
    """Delete the drafts that killed processes left in these directories; no other process may be writing there."""
    for directory in map(Path, directories):
        for draft in directory.glob(".*.tmp"):
            _delete(draft)


def put_back(directory, name="*"):
    """Restore `name` in `directory` if a kill between two renames left it aside; no other process may be writing it."""
    for aside in Path(directory).glob(f".{name}.*.aside"):
        target = aside.with_name(aside.name[1:].rsplit(".", 2)[0])
        _delete(aside) if target.exists() else aside.rename(target)


def try_delete(directory):
    """Delete a directory that is no longer needed; if that fails, log one warning per directory and error."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        _warn_once(f"{directory} is no longer needed and cannot be deleted ({error}): delete it when you can")


@functools.cache
def _warn_once(text):
    LOGGER.warning(text)


def _delete(path):
    """Delete a directory, a file or a link and ignore errors; the target of a link is never deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _take_place(draft, target):
    if not target.exists():
        os.rename(draft, target)
    elif _exchange(draft, target) != 0:  # no RENAME_EXCHANGE on this file system: after a kill, `put_back` restores
        aside = draft.with_suffix(".aside")
        os.rename(target, aside)
        os.rename(draft, target)
        os.rename(aside, draft)


def _exchange(one, other):
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)


def write_file(path, data):
    """Write bytes to `path` and fsync; after a crash it holds either its old content or all of `data`."""
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
    """A file that lines are appended to; lines that the disk refuses stay in memory and are written with the next one.

    Opening the file removes an incomplete last line, which a kill leaves. Thread-safe.
    """

    def __init__(self, path):
        self._path, self._pending, self._lock = Path(path), b"", threading.Lock()
        self._file = self._open()

    def append(self, line):
        """Append bytes that end with a newline. Raises OSError if the disk refuses them; the next call tries again."""
        with self._lock:
            self._pending += line
            if os.fstat(self._file.fileno()).st_nlink == 0:  # somebody deleted the file
                self._file = self._open()
            size_bytes = os.fstat(self._file.fileno()).st_size
            try:
                if self._file.write(self._pending) < len(self._pending):
                    raise OSError(errno.ENOSPC, "only a part of a line was written", str(self._path))
            except OSError:
                os.truncate(self._file.fileno(), size_bytes)
                raise
            self._pending = b""

    def close(self):
        self._file.close()

    def _open(self):
        make_directory(self._path.parent)
        file = open_own(self._path, "a+b", buffering=0)
        file.truncate(end_of_last_line(file))
        return file


def end_of_last_line(file, end=None):
    """Offset of the end of the last complete line in the first `end` bytes (None: all) of a binary file.

    Reads backwards, block by block, so that a large file costs one block.
    """
    end = file.seek(0, os.SEEK_END) if end is None else end
    while end > 0:
        start = max(end - 65536, 0)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def open_own(path, mode, buffering=-1):
    """`open` for a file that this program owns; links are not followed.

    Raises OSError if `path` is a link, a pipe, a directory or anything else but a regular file.
    """
    return open(path, mode, buffering, opener=_open_regular)


def _open_regular(path, flags):
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # opening a pipe would block
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(error.errno, "this is a link or a pipe, not a regular file: delete it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is not a regular file: delete it, or move it elsewhere", str(path))
    return descriptor


def check_no_link(paths):
    """Raise ValueError if one of `paths`, files and directories that this program owns, is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, and a run writes through no link: delete it, or put in its "
                "place the file or directory that it points to (only the run directory itself may be a link)"
            )


def fsync(path):
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path, values):
    """Write `values` (JSON types) as indented JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ujson.dumps(values, indent=1, ensure_ascii=False, escape_forward_slashes=False)
    # Python keeps an undecodable byte of a file name as a lone surrogate; as a backslash escape it is valid JSON.
    write_file(path, text.encode("utf-8", "backslashreplace"))


@contextmanager
def held_lock(path, stop):
    """Hold a file lock, which the system releases if this process dies; waits for another process that holds it.

    Raises KeyboardInterrupt when `stop()` returns true.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop():
                    raise KeyboardInterrupt from None
                time.sleep(POLL_SECONDS)
        yield
