"""Opens text files in the encodings of people's data, compressed or not, and reads csv and tsv tables row by row."""

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TextIO

from model.data.compressed import data_suffix, open_bytes
from model.data.encodings import find_encoding
from model.runtime.json_stream import MAX_ITEM_CHARS, OnMalformed

EXCEL = re.compile(r"sep=(.)\r?\n?$")
SEPARATORS = {",": ".csv", "\t": ".tsv", ";": "", "；": "", "|": ""}  # and the suffix of files with them


@contextmanager
def open_text(path: Path, encoding: str = "") -> Iterator[TextIO]:
    """Open the file as text and keep its line ends; without a name its encoding is found (find_encoding).

    Raises ValueError for bytes that are no text in it.
    """
    with TextIOWrapper(open_bytes(path), encoding=encoding or find_encoding(path), newline="") as file:
        try:
            yield file
        except UnicodeError as error:
            reason = getattr(error, "reason", error)
            raise ValueError(
                f"{path}: it is read as {file.encoding}, but has other bytes before byte "
                f"{file.buffer.tell():,} ({reason}); save the whole file as UTF-8"
            ) from None


def table_rows(path: Path, on_malformed: OnMalformed, encoding: str = "") -> Iterator[dict]:
    """Yield each row of a csv or tsv table as {column: text}; a row with too many cells goes to `on_malformed`.

    In csv a quoted cell may contain separators and line ends. In tsv this depends on the file (see _is_quoted):
    programs quote such cells, but people who write tsv by hand use a quote as an ordinary character. A first line
    `sep=;` names the separator, as Excel reads it, and a csv in UTF-16 may be Excel's Unicode text, which has tabs.
    Raises ValueError for a cell or a line that is too long, and for columns with another separator.
    """
    is_tsv = data_suffix(path) == ".tsv"
    encoding = encoding or find_encoding(path)
    quoting = csv.QUOTE_NONE if is_tsv and not _is_quoted(path, encoding) else csv.QUOTE_MINIMAL
    with open_text(path, encoding) as file:
        lines = _lines(file)
        first = next(lines, "")
        separator = _separator(first, is_tsv, encoding)
        lines = lines if EXCEL.match(first) else chain([first], lines)
        reader = csv.reader(lines, delimiter=separator, quoting=quoting)
        try:
            rows = filter(None, reader)
            header = [name.strip() for name in next(rows, [])]
            _check_separator(path, header)
            for cells in rows:
                if any(cells[len(header) :]):
                    on_malformed(
                        f"{path} line {reader.line_num}: {len(cells)} cells under {len(header)} columns; "
                        'put "quotes" around a cell that holds the separator'
                    )
                    continue
                yield dict.fromkeys(header, "") | dict(zip(header, cells, strict=False))
        except csv.Error as error:
            raise ValueError(
                f"{path} line {reader.line_num}: {error}; a cell holds at most {csv.field_size_limit():,} characters: "
                'look for a quote (") that is never closed, or write longer texts as .jsonl or .parquet'
            ) from None


def _separator(first: str, is_tsv: bool, encoding: str) -> str:
    """What separates the cells of a table with this first line."""
    if named := EXCEL.match(first):
        return named[1]
    return "\t" if is_tsv or encoding.startswith("utf-16") and "\t" in first else ","


def _check_separator(path: Path, header: list[str]) -> None:
    """Raise ValueError for one column whose name holds what separates the columns of other tables."""
    found = [separator for separator in SEPARATORS if len(header) == 1 and separator in header[0]]
    if found:
        suffix = SEPARATORS[found[0]]
        remedy = f"give it the suffix {suffix}" if suffix else "save it with commas as .csv, or with tabs as .tsv"
        raise ValueError(f"{path}: its columns are separated by {found[0]!r}: {remedy}")


def _is_quoted(path: Path, encoding: str) -> bool:
    """True if quotes in a tsv file enclose cells, as Python's csv module and pandas write them.

    The file is read both ways. If enclosing quotes are read as characters, a cell with a line end or a tab in it gives
    rows whose number of cells differs from the header's. If a lone quote is read as an opening quote, it joins rows,
    with the same effect. The way with fewer such rows wins; on a tie the way with more rows, then the quoted way.
    """
    if not _has_opening_quote(path, encoding):
        return False
    return _fit(path, encoding, csv.QUOTE_MINIMAL) <= _fit(path, encoding, csv.QUOTE_NONE)


def _has_opening_quote(path: Path, encoding: str) -> bool:
    with open_text(path, encoding) as file:
        return any(line.startswith('"') or '\t"' in line for line in _lines(file))


def _fit(path: Path, encoding: str, quoting: int) -> tuple[int, int]:
    """(number of rows that are unreadable or differ from the header's number of cells, minus number of other rows)."""
    num_wrong = num_right = width = 0
    with open_text(path, encoding) as file:
        reader = csv.reader(_lines(file), delimiter="\t", quoting=quoting, strict=True)
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return num_wrong, -num_right
            except csv.Error:  # the next call continues at the next line
                num_wrong += 1
                continue
            width = width or len(cells)
            num_right += len(cells) == width
            num_wrong += 0 < len(cells) != width


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_ITEM_CHARS):
        if len(line) == MAX_ITEM_CHARS:
            raise ValueError(
                f"{file.name}: a line is longer than {MAX_ITEM_CHARS:,} characters; is this a text table? Cut a text "
                "that is so long into several rows"
            )
        yield line
