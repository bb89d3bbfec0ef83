"""Text files in UTF-8 or GB18030, and the rows of csv and tsv tables, one at a time."""

import codecs
import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from model.runtime.json_stream import MAX_ITEM_CHARS, OnMalformed

ENCODING_SAMPLE_BYTES = 1 << 20


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """The file as text, its line ends as they are; ValueError where it is in no known encoding."""
    with open(path, encoding=_find_encoding(path), newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: the start is {error.encoding}, but not all before byte {file.buffer.tell():,} is "
                f"({error.reason}); save the whole file as UTF-8"
            ) from None


def _find_encoding(path: Path) -> str:
    with open(path, "rb") as file:
        sample = file.read(ENCODING_SAMPLE_BYTES)
        is_whole = not file.read(1)
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            codecs.getincrementaldecoder(encoding)().decode(sample, is_whole)
            return encoding
        except UnicodeDecodeError as error:
            problem = f"byte {error.start:,}: {error.reason}"
    raise ValueError(
        f"{path}: neither UTF-8 nor GB18030 ({problem}); save it as UTF-8, or write it again if it was cut"
    )


def table_rows(path: Path, on_malformed: OnMalformed) -> Iterator[dict]:
    """Every row of a csv or tsv table as {column: text}; a row with too many cells goes to `on_malformed`.

    In csv, quotes around a cell protect the separators and line ends in it. In tsv they do where that suits the file
    (see _is_quoted): programs write such quotes too, but in what people write a quote is a character like any other.
    """
    is_tsv = path.suffix.lower() == ".tsv"
    quoting = csv.QUOTE_NONE if is_tsv and not _is_quoted(path) else csv.QUOTE_MINIMAL
    with open_text(path) as file:
        reader = csv.reader(_lines(file), delimiter="\t" if is_tsv else ",", quoting=quoting)
        try:
            rows = filter(None, reader)
            header = [name.strip() for name in next(rows, [])]
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
                'look for a quote (") that is never closed'
            ) from None


def _is_quoted(path: Path) -> bool:
    """Whether the quotes of a tsv file stand around cells, as Python's csv module and pandas write them.

    The file is read both ways. Quotes around cells that hold line ends or tabs, read as characters, leave rows that
    do not have as many cells as the header; a lone quote, read as the beginning of a cell, joins rows, which then have
    too many or too few. So the way with fewer wrong rows is meant; of equal ones the way with more rows, and of those
    the quoted one.
    """
    if not _has_opening_quote(path):
        return False
    return _fit(path, csv.QUOTE_MINIMAL) <= _fit(path, csv.QUOTE_NONE)


def _has_opening_quote(path: Path) -> bool:
    with open_text(path) as file:
        return any(line.startswith('"') or '\t"' in line for line in _lines(file))


def _fit(path: Path, quoting: int) -> tuple[int, int]:
    """(rows that have not as many cells as the header or cannot be read, minus the number of the others)."""
    wrong = right = width = 0
    with open_text(path) as file:
        reader = csv.reader(_lines(file), delimiter="\t", quoting=quoting, strict=True)
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return wrong, -right
            except csv.Error:  # the reader goes on at the next line
                wrong += 1
                continue
            width = width or len(cells)
            right += len(cells) == width
            wrong += 0 < len(cells) != width


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_ITEM_CHARS):
        if len(line) == MAX_ITEM_CHARS:
            raise ValueError(f"{file.name}: a line is longer than {MAX_ITEM_CHARS:,} characters; is this a text table?")
        yield line
