"""Reads the rows of a parquet file in bounded memory, even if a few hundred bytes of it encode millions of rows.

The footer and the size of the dictionary decide how each column is read: as a dictionary, which holds a value once
however many rows repeat it, or in batches, which are smaller the larger the dictionary is. The characters of a batch
are counted before it becomes Python objects.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.data.compressed import open_seekable
from model.data.record_batches import (
    BATCH_ROWS,
    CHARS_PER_BYTE,
    FREE_BYTES,
    check_widths,
    expansion_error,
    max_values,
    rows_of,
)
from model.runtime.json_stream import OnMalformed

BATCH_BYTES = 128 << 20
SMALL_CHUNK_BYTES = 8 << 20  # pyarrow copies a dictionary for each batch
MAX_COMPRESSION = 50  # how many times smaller text becomes; beyond that, rows repeat each other
MAX_NESTED_DELTA_BYTES = 1 << 28
MAX_FOOTER_BYTES, MAX_FOOTER_ITEMS = 16 << 20, 1_000_000


def parquet_rows(path: Path, on_malformed: OnMalformed) -> Iterator[tuple[int, dict]]:
    """Yield (index, row) for each row, the row as {column: value}.

    A row of more than MAX_ITEM_CHARS is reported to `on_malformed` and left out. Raises ValueError for a damaged file
    and for a file that expands to far more than text does.
    """
    try:
        with open_seekable(path) as source:  # pyarrow itself opens only names in UTF-8
            yield from _rows(path, source, on_malformed)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: damaged or not parquet ({reason}); write or download it again") from None


def _rows(path, source, on_malformed):
    limits = dict(thrift_string_size_limit=MAX_FOOTER_BYTES, thrift_container_size_limit=MAX_FOOTER_ITEMS)
    footer, file_bytes = pq.ParquetFile(source, **limits), os.fstat(source.fileno()).st_size
    _check_size(path, file_bytes, footer)
    yield from rows_of(path, file_bytes, _batches(path, source, footer), on_malformed)


def _batches(path, source, footer):
    for group in range(footer.num_row_groups):
        chunks = _chunks(source, footer.metadata.row_group(group), footer.schema)
        as_dictionary = [chunk.path for chunk in chunks if chunk.is_dictionary]
        # Without pre_buffer pyarrow reads a row group page by page, so a large row group needs no more memory.
        file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False, buffer_size=1 << 20,
                              read_dictionary=as_dictionary)  # fmt: skip
        yield from file.iter_batches(_batch_rows(path, chunks), row_groups=[group], use_threads=False)


def _check_size(path, file_bytes, file):
    """Raise ValueError if the footer claims more rows, values or bytes than a file of texts of this size has."""
    metadata, most = file.metadata, max_values(file_bytes)
    if not 0 <= metadata.num_rows <= most:
        raise expansion_error(path, file_bytes, f"{metadata.num_rows:,} rows")
    num_values, num_bytes = np.zeros(metadata.num_columns), [0]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = list(map(group.column, range(group.num_columns)))
        num_values += [abs(chunk.num_values) for chunk in chunks]
        num_bytes.append(sum(abs(chunk.total_uncompressed_size) for chunk in chunks))
    if num_values.max(initial=0) > most:
        raise expansion_error(path, file_bytes, f"{num_values.max():,.0f} values in a column")
    if max(num_bytes) > FREE_BYTES + MAX_COMPRESSION * file_bytes:
        groups = f"{max(num_bytes):,} in one group of rows (row_group_size=1000 makes smaller groups)"
        raise expansion_error(path, file_bytes, groups)
    # a long text that all rows share is compressed further than MAX_COMPRESSION, so all groups together may be larger
    if sum(num_bytes) > FREE_BYTES + CHARS_PER_BYTE * file_bytes:
        raise expansion_error(path, file_bytes, f"{sum(num_bytes):,}")
    check_widths(path, file.schema_arrow)


@dataclass(frozen=True)
class _Chunk:
    """A column of a row group: how it is read, and its size.

    is_nested: a row may hold any number of values. repeated_bytes: what a batch may take for each of its values,
    although the file holds those bytes once.
    """

    path: str
    is_dictionary: bool
    is_delta: bool
    is_nested: bool
    repeated_bytes: int
    num_bytes: int
    num_values: int


def _chunks(source, group, schema):
    chunks = []
    for i in range(group.num_columns):
        chunk, column = group.column(i), schema.column(i)
        num_bytes, is_delta = chunk.total_uncompressed_size, "DELTA_BYTE_ARRAY" in chunk.encodings
        is_nested = column.max_repetition_level > 0
        dictionary_bytes = min(_dictionary_bytes(source, chunk), num_bytes)
        is_small = num_bytes <= SMALL_CHUNK_BYTES or num_bytes > MAX_COMPRESSION * chunk.total_compressed_size
        is_readable = not {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"} & set(chunk.encodings)
        is_dictionary = 2 * dictionary_bytes > num_bytes or (is_nested and is_small)
        is_dictionary = is_dictionary and is_readable and column.physical_type == "BYTE_ARRAY"
        repeated_bytes = 4 * num_bytes if is_delta else dictionary_bytes  # pyarrow holds a delta's values several times
        chunks.append(
            _Chunk(column.path, is_dictionary, is_delta, is_nested, repeated_bytes, num_bytes, chunk.num_values)
        )
    return chunks


def _dictionary_bytes(source, chunk):
    """Uncompressed bytes of the dictionary page at the start of a chunk; 0 if the chunk starts with values.

    The page header is a Thrift struct whose first two integers are the kind of page (2: dictionary) and the size.
    """
    starts = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    source.seek(max(0, min(filter(None, starts), default=0)))
    header = source.read(8)
    if header[:3] != b"\x15\x04\x15":
        return 0
    size = sum((byte & 127) << 7 * i for i, byte in enumerate(header[3:]))
    last = next((i for i, byte in enumerate(header[3:]) if byte < 128), 4)
    return (size & (1 << 7 * (last + 1)) - 1) >> 1


def _batch_rows(path, chunks):
    """Number of rows per batch that keeps a batch within BATCH_BYTES.

    Raises ValueError for nested columns whose encoding hides how much they expand to.
    """
    rows = BATCH_ROWS
    for chunk in chunks:
        if chunk.is_delta and chunk.is_nested and chunk.num_values * chunk.num_bytes > MAX_NESTED_DELTA_BYTES:
            raise ValueError(f"{path}: lists in the encoding DELTA_BYTE_ARRAY may expand without limit; write the "
                             "file again with column_encoding='PLAIN'")  # fmt: skip
        if not chunk.is_dictionary:
            rows = min(rows, BATCH_BYTES * chunk.num_values // max(1, chunk.num_bytes))
            rows = min(rows, BATCH_BYTES // max(1, chunk.repeated_bytes))
    return max(1, rows)
