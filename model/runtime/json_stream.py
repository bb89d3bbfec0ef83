"""Read JSON of any size value by value (arrays, JSON lines, or a mixture), and small JSON files as a whole.

Memory is bounded by one value of at most MAX_ITEM_CHARS. Malformed JSON raises a ValueError that names the line.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

CHUNK_CHARS = 1 << 18
MAX_ITEM_CHARS = 1 << 24
MAX_OBJECT_BYTES = 64 << 20

OnMalformed = Callable[[str], None]  # called with the problem of a row; if it returns, the row is skipped

_SPACE = re.compile(r"[ \t\r\n]*")
_SIDE_BY_SIDE = re.compile(r"\}\s*\{")
_decode = json.JSONDecoder().raw_decode
NUM_CHECKED = 64  # values in which a name may come once; the check doubles the time


def _unique(items):
    """The object of these (name, value); ValueError for a name that comes twice."""
    found = dict(items)
    if len(found) < len(items):
        names = [name for name, _ in items]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


_decode_checked = json.JSONDecoder(object_pairs_hook=_unique).raw_decode


def read_object(path: Path) -> dict:
    """The JSON object in a file; raises ValueError for any other content and above MAX_OBJECT_BYTES."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if (num_bytes := path.stat().st_size) > MAX_OBJECT_BYTES:
        raise ValueError(f"{path} has {num_bytes:,} bytes: a file of this kind may have at most {MAX_OBJECT_BYTES:,}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again from where it was made") from None
    except RecursionError:
        raise ValueError(f"{path} has brackets nested too deep: copy it again from where it was made") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


class MalformedJson(ValueError):
    """A value of a JSON text is not valid JSON."""


class TooLong(ValueError):
    """A value of a JSON text has more than MAX_ITEM_CHARS."""


def refuse(problem: str) -> None:
    """The OnMalformed that skips nothing: raises ValueError."""
    raise ValueError(problem) from None


class JsonText:
    """A position in a JSON text, which is decoded value by value from a buffer of at most MAX_ITEM_CHARS."""

    def __init__(self, file: TextIO):
        self.file, self.text, self.at = file, "", 0
        self.lines_before = self.chars_before = 0
        self.begins_line, self.num_values = True, 0

    def values(self, on_malformed: OnMalformed = refuse) -> Iterator[Iterable]:
        """Yield an iterable for each top-level value: the items of an array, lazily, or a tuple of the value itself.

        Exhaust each iterable before asking for the next. Malformed JSON raises ValueError; a malformed line that can
        hold at most one row, or a value that is too long on a line of its own, is passed to on_malformed, and skipped
        if that returns.
        """
        while opening := self.peek():
            if opening == "[":
                yield self.items()
                continue
            begins_line = self.begins_line
            try:
                value = self.value()
            except MalformedJson as error:
                on_malformed(str(error))
                if not _is_row(self.take_line(), begins_line):
                    raise
            except TooLong as error:
                if not begins_line or "\n" in self.text[self.at :]:
                    raise
                on_malformed(str(error))
                self._drop_line()
            else:
                yield (value,)

    def line(self) -> int:
        """Number of the current line, from 1."""
        return self.lines_before + self.text.count("\n", 0, self.at) + 1

    def peek(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        self._skip_space()
        while self.at == len(self.text) and self._read_on():
            self._skip_space()
        return self.text[self.at : self.at + 1]

    def _skip_space(self) -> None:
        begin, self.at = self.at, _SPACE.match(self.text, self.at).end()
        self.begins_line = self.begins_line or self.text.find("\n", begin, self.at) >= 0

    def items(self) -> Iterator[object]:
        """Yield the values of the array that starts here."""
        self.at += 1
        separator = "]" if self.peek() == "]" else ","
        while separator == ",":
            if self.peek() == "]":
                raise self._error("a comma before the closing bracket; remove the comma")
            yield self.value()
            separator = self.peek()
            self.at += separator == ","
        if separator != "]":
            raise self._error("no , or ] after an item of the list; the file was cut or edited: write it again")
        self.at += 1
        self.begins_line = False

    def value(self) -> object:
        """Decode the value that starts at the next character."""
        self.peek()
        while True:
            try:
                value, end = (_decode_checked if self.num_values < NUM_CHECKED else _decode)(self.text, self.at)
            except RecursionError:
                raise self._error("brackets nested too deep; give a list of rows", self.at) from None
            except ValueError as error:
                # More text can help only at the end of the buffer, or in a string that continues beyond it.
                at, problem = getattr(error, "pos", self.at), getattr(error, "msg", str(error))
                may_continue = problem.startswith("Unterminated") or at > len(self.text) - 16
                if not (may_continue and self._read_on()):
                    raise self._error(self._said(problem, at), at) from None
            else:
                if end < len(self.text) or not self._read_on():
                    self.at, self.begins_line = end, False
                    self.num_values += 1
                    return value

    def take_line(self) -> str:
        """Return the rest of this line and move to its end."""
        while (end := self.text.find("\n", self.at)) < 0 and self._read_on():
            pass
        line = self.text[self.at : end if end >= 0 else None]
        self.at += len(line)
        return line

    def _drop_line(self) -> None:
        """Move to the end of this line without holding it."""
        while (end := self.text.find("\n", self.at)) < 0:
            self.at = len(self.text)
            if not self._read_on():
                return
        self.at = end

    def _read_on(self) -> bool:
        rest = self.text[self.at :]
        if len(rest) >= MAX_ITEM_CHARS:
            raise TooLong(
                f"{self.file.name} line {self.line():,} (character {self.chars_before + self.at:,}): an item has more "
                f"than {MAX_ITEM_CHARS:,} characters; write one JSON object per line, and a text that is longer in "
                "several of them"
            )
        more = self.file.read(min(max(CHUNK_CHARS, len(rest)), MAX_ITEM_CHARS - len(rest)))
        if more:
            self.lines_before += self.text.count("\n", 0, self.at)
            self.chars_before += self.at
            self.text, self.at = rest + more, 0
        return bool(more)

    def _said(self, problem: str, at: int) -> str:
        """The decoder's `problem` with the character `at`, and what to do."""
        if self.text[at : at + 1] in ("\n", "\r") and problem.startswith("Invalid control character"):
            problem = "the line ends within a text"
        if self.text[at : at + 1] == "'":
            problem = "a single quote (') where JSON has double quotes (\"), as Python prints objects"
        return f"{problem.removesuffix(' at').removesuffix(' starting')}; repair the file here, or write it again"

    def _error(self, problem: str, at: int | None = None) -> MalformedJson:
        """The error at the character `at` (None: the current one); what a line lacks at its end is on that line."""
        at = self.at if at is None else at
        line = self.lines_before + self.text.count("\n", 0, self.at + len(self.text[self.at : at].rstrip())) + 1
        return MalformedJson(
            f"{self.file.name} line {line:,} (character {self.chars_before + at:,}): malformed JSON: {problem}"
        )


def _is_row(line: str, begins_line: bool) -> bool:
    """True if skipping this line loses at most one row: it has no two objects and does not only open one."""
    return line.strip() != "{" and not _SIDE_BY_SIDE.search(line) and (begins_line or "{" not in line)
