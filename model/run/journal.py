"""The journal of a run: an append-only file of JSON lines that stays readable after a kill at any byte."""

import logging
import math
import os
import time
from pathlib import Path

import ujson

from model.runtime.atomic_io import AppendedFile, open_own

LOGGER = logging.getLogger("chat_trainer")
MAX_TAIL_BYTES = 1 << 22  # a line has at most a step's example ids

# Kinds of line that a resume at an earlier step voids. Starts and resumes stay: they happened whatever was undone.
VOIDED_KINDS = {"train", "eval", "save", "oom", "not_finite", "skip", "stop"}


class Journal:
    """The append-only journal of a run. With a path of None (ranks other than the main one) it writes nothing."""

    def __init__(self, path: str | Path | None):
        self._file = None if path is None else AppendedFile(path)

    def write(self, kind: str, **values) -> None:
        """Append one line with its `kind` and `time` (Unix seconds). Non-finite floats become null.

        Floats keep 9 significant digits, which is every bit of a float32. A disk error is logged, and the line is
        written together with the next one.
        """
        if self._file is None:
            return
        record = {"kind": kind, "time": round(time.time(), 3)} | _plain(values)
        line = ujson.dumps(record, ensure_ascii=False, escape_forward_slashes=False, allow_nan=False) + "\n"
        # An undecodable byte of a file name is a lone surrogate; written with a backslash it is valid JSON.
        try:
            self._file.append(line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            LOGGER.error("the journal cannot be written now: %s", error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _plain(value):
    """`value` with floats that JSON can hold: 9 significant digits, or None if not finite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value


def read_journal(path: str | Path) -> list[dict]:
    """The valid lines of a journal, oldest first.

    Leaves out an incomplete last line, and lines of steps that a later resume undid. Raises ValueError, which names the
    line, if any other line is damaged, and FileNotFoundError if there is no journal.
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        record = _parse_line(line, number, path)
        if record["kind"] == "resume":
            records = [old for old in records if not is_undone(old, record)]
        records.append(record)
    return records


def last_stop(run_dir: str | Path) -> dict:
    """The newest stop line, which says why the run's last process ended; {} without one."""
    stops = [line for line in read_journal(Path(run_dir, "metrics.jsonl")) if line["kind"] == "stop"]
    return stops[-1] if stops else {}


class JournalTail:
    """Reads what was appended to a journal since the last call, so that following one costs only its new bytes."""

    def __init__(self, path: str | Path):
        self._path, self._offset, self._number, self._inode = Path(path), 0, 0, None

    def read(self) -> tuple[bool, list[dict]]:
        """(Whether the journal is another file than at the last call, its next lines); none while there are no more.

        A call reads MAX_TAIL_BYTES at most. Lines that a resume undid are among them: the caller
        applies `is_undone`.
        Raises ValueError for a damaged line.
        """
        try:
            with open_own(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                is_another = status.st_ino != self._inode or status.st_size < self._offset
                if is_another:
                    self._offset, self._number, self._inode = 0, 0, status.st_ino
                file.seek(self._offset)
                data = file.read(min(status.st_size - self._offset, MAX_TAIL_BYTES))
        except FileNotFoundError:
            return False, []
        return is_another, self._records(data[: data.rfind(b"\n") + 1])

    def _records(self, data):
        self._offset += len(data)
        records = []
        for line in data.split(b"\n")[:-1]:
            self._number += 1
            records.append(_parse_line(line, self._number, self._path))
        return records


def _parse_line(line: bytes, number: int, path: str | Path) -> dict:
    try:
        record = ujson.loads(line.decode())
    except ValueError as error:
        raise ValueError(f"{path} line {number} is damaged ({error}): delete that line") from error
    kind, step = (record.get("kind"), record.get("step")) if isinstance(record, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(step, int | float | None) or (kind == "resume" and step is None):
        raise ValueError(f"{path} line {number} is not a journal line, it has no kind or no step: delete that line")
    return record


def is_undone(record: dict, resume: dict) -> bool:
    """Whether `resume` restarts before the line `record`, or repeats its evaluation, which the checkpoint lacks."""
    step, resumed_step = record.get("step") or 0, resume["step"]
    is_repeated = record["kind"] == "eval" and step == resumed_step != resume.get("evaluated_step", resumed_step)
    return record["kind"] in VOIDED_KINDS and (step > resumed_step or is_repeated)
