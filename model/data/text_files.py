"""Opens text files in UTF-8 or GB18030, compressed or not, and reads csv and tsv tables row by row."""

import codecs
import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from model.data.compressed import data_suffix, open_bytes
from model.runtime.json_stream import MAX_ITEM_CHARS, OnMalformed

ENCODING_SAMPLE_BYTES = 1 << 20
SEPARATORS = {",": ".csv", "\t": ".tsv", ";": "", "；": "", "|": ""}  # and the suffix of files with them


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open the file as text and keep its line ends. Raises ValueError if it is neither UTF-8 nor GB18030."""
    with TextIOWrapper(open_bytes(path), encoding=_find_encoding(path), newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: it begins as {error.encoding}, but has other bytes before byte {file.buffer.tell():,} "
                f"({error.reason}); save the whole file as UTF-8"
            ) from None


def _find_encoding(path: Path) -> str:
    with open_bytes(path) as file:
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
    """Yield each row of a csv or tsv table as {column: text}; a row with too many cells goes to `on_malformed`.

    In csv a quoted cell may contain separators and line ends. In tsv this depends on the file (see _is_quoted):
    programs quote such cells, but people who write tsv by hand use a quote as an ordinary character.
    Raises ValueError for a cell or a line that is too long, and for columns with another separator.
    """
    is_tsv = data_suffix(path) == ".tsv"
    quoting = csv.QUOTE_NONE if is_tsv and not _is_quoted(path) else csv.QUOTE_MINIMAL
    with open_text(path) as file:
        reader = csv.reader(_lines(file), delimiter="\t" if is_tsv else ",", quoting=quoting)
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
                'look for a quote (") that is never closed'
            ) from None


def _check_separator(path: Path, header: list[str]) -> None:
    """Raise ValueError for one column whose name holds what separates the columns of other tables."""
    found = [separator for separator in SEPARATORS if len(header) == 1 and separator in header[0]]
    if found:
        suffix = SEPARATORS[found[0]]
        remedy = f"give it the suffix {suffix}" if suffix else "save it with commas as .csv, or with tabs as .tsv"
        raise ValueError(f"{path}: its columns are separated by {found[0]!r}: {remedy}")


def _is_quoted(path: Path) -> bool:
    """True if quotes in a tsv file enclose cells, as Python's csv module and pandas write them.

    The file is read both ways. If enclosing quotes are read as characters, a cell with a line end or a tab in it gives
    rows whose number of cells differs from the header's. If a lone quote is read as an opening quote, it joins rows,
    with the same effect. The way with fewer such rows wins; on a tie the way with more rows, then the quoted way.
    """
    if not _has_opening_quote(path):
        return False
    return _fit(path, csv.QUOTE_MINIMAL) <= _fit(path, csv.QUOTE_NONE)


def _has_opening_quote(path: Path) -> bool:
    with open_text(path) as file:
        return any(line.startswith('"') or '\t"' in line for line in _lines(file))


def _fit(path: Path, quoting: int) -> tuple[int, int]:
    """(number of rows that are unreadable or differ from the header's number of cells, minus number of other rows)."""
    num_wrong = num_right = width = 0
    with open_text(path) as file:
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
            raise ValueError(f"{file.name}: a line is longer than {MAX_ITEM_CHARS:,} characters; is this a text table?")
        yield line
