"""The journal of a run: JSON lines that are appended, and survive a kill at any byte."""

import logging
import math
import time
from pathlib import Path

import ujson

from model.runtime.atomic_io import AppendedFile

LOGGER = logging.getLogger("chat_trainer")

# What a resume undoes. Starts and resumes stay: they tell what happened to the run, not what it learned.
UNDONE_KINDS = {"train", "eval", "save", "oom", "not_finite", "skip", "stop"}


class Journal:
    """The append-only journal of a run; on a path of None it writes nothing (ranks other than the main one)."""

    def __init__(self, path: str | Path | None):
        self._file = None if path is None else AppendedFile(path)

    def write(self, kind: str, **values) -> None:
        """Append one line with its `kind` and `time` (unix seconds). Non-finite floats become null.

        Floats keep 9 significant digits, which is every bit of a float32. A disk that refuses is said aloud, and the
        line goes with the next one.
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
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value


def read_journal(path: str | Path) -> list[dict]:
    """The lines of a journal that still count, oldest first.

    A torn last line is ignored, and so are the lines of a step that a later resume went back behind.
    Raises ValueError that names the line if another one is damaged, FileNotFoundError if there is no journal.
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        record = _parse(line, number, path)
        if record["kind"] == "resume":
            records = [old for old in records if not _undone(old, record)]
        records.append(record)
    return records


def _parse(line: bytes, number: int, path: str | Path) -> dict:
    try:
        record = ujson.loads(line.decode())
    except ValueError as error:
        raise ValueError(f"{path} line {number} is damaged ({error}): delete that line") from error
    kind, step = (record.get("kind"), record.get("step")) if isinstance(record, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(step, int | float | None) or (kind == "resume" and step is None):
        raise ValueError(f"{path} line {number} is no journal line, it has no kind or no step: delete that line")
    return record


def _undone(record: dict, resume: dict) -> bool:
    """Whether a resume went back behind this line, or to an evaluation that its checkpoint does not know of."""
    step, last = record.get("step") or 0, resume["step"]
    again = record["kind"] == "eval" and step == last != resume.get("evaluated_step", last)
    return record["kind"] in UNDONE_KINDS and (step > last or again)
