"""Reads the rows of an .arrow file, memory-mapped, as Hugging Face datasets, polars and pyarrow write it."""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.types as kinds

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

FILE_MAGIC = b"ARROW1\0\0"  # before the stream, in the file format; the footer behind it is not used
SLICE_BYTES = 16 << 20
HEADER_TYPE, HEADER, DICTIONARY_DATA, COMPRESSION = 1, 2, 1, 3  # fields of Arrow's flatbuffers Message, …Batch
DICTIONARY_BATCH, RECORD_BATCH = 2, 3


def arrow_rows(path: Path, on_malformed: OnMalformed) -> Iterator[tuple[int, dict]]:
    """Yield (index, row) as `parquet_rows`; raises ValueError for a damaged file and one that expands without limit.

    Its pages are given back after each record batch, so the process does not grow with the file.
    """
    try:
        with open_seekable(path) as file:
            if not os.fstat(file.fileno()).st_size:
                raise OSError("it holds 0 bytes")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            yield from rows_of(path, len(mapped), _batches(path, file, mapped), on_malformed)
    except (pa.ArrowException, OSError, UnicodeDecodeError, struct.error) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: damaged or not arrow ({reason}); write or download it again") from None


def _batches(path, file, mapped):
    """Yield the record batches, valid and in slices of SLICE_BYTES and BATCH_ROWS at most."""
    stream = pa.py_buffer(mapped)[len(FILE_MAGIC) if mapped[: len(FILE_MAGIC)] == FILE_MAGIC else 0 :]
    _check_uncompressed(path, stream, mapped)
    reader = pa.ipc.open_stream(stream)
    check_widths(path, reader.schema)
    _check_kinds(path, reader.schema)
    most, num_rows, bytes_left = max_values(len(mapped)), 0, FREE_BYTES + CHARS_PER_BYTE * len(mapped)
    while (batch := _next_batch(reader)) is not None:
        if os.fstat(file.fileno()).st_size < len(mapped):  # reading behind the end would end this process
            raise ValueError(f"{path}: it was cut short while it was read: write it again as a whole")
        batch.validate()
        num_rows, bytes_left = num_rows + len(batch), bytes_left - batch.nbytes
        num_values = max([num_rows, *map(_most_values, batch.columns)])
        if num_values > most or bytes_left < 0:
            raise expansion_error(path, len(mapped), f"{num_values:,} values or more")
        batch.validate(full=True)
        yield from _slices(batch)
        del batch
        _give_back(mapped)


def _give_back(mapped):
    """Take the pages that were read out of this process; whoever reads one again gets it from the disk's cache."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _next_batch(reader):
    try:
        return reader.read_next_batch()
    except StopIteration:
        return None


def _slices(batch):
    rows = max(1, min(BATCH_ROWS, SLICE_BYTES * len(batch) // max(1, batch.nbytes)))
    for start in range(0, len(batch), rows):
        yield batch.slice(start, rows)


def _most_values(array):
    """Values in the longest array inside of this one, whose offsets are within bounds."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _most_values(array.storage)
    if kinds.is_dictionary(kind):
        return max(len(array), _most_values(array.dictionary))
    if kinds.is_struct(kind):
        return max([len(array), *(_most_values(array.field(i)) for i in range(kind.num_fields))])
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_map(kind) or kinds.is_fixed_size_list(kind):
        return max(len(array), _most_values(array.values))
    return len(array)


def _check_kinds(path, schema):
    """Raise ValueError for a column of a type whose values may overlap or repeat without being counted."""
    for field in schema:
        if _repeats(field.type):
            raise ValueError(f"{path}: column {field.name!r} has the type {str(field.type)[:80]}, which is not read; "
                             "write the file without this column")  # fmt: skip


def _repeats(kind):
    if isinstance(kind, pa.BaseExtensionType):
        return _repeats(kind.storage_type)
    if kinds.is_list_view(kind) or kinds.is_large_list_view(kind) or kinds.is_run_end_encoded(kind):
        return True
    return kinds.is_union(kind) or any(_repeats(kind.field(i).type) for i in range(kind.num_fields))


def _check_uncompressed(path, stream, mapped):
    """Raise ValueError for a stream with compressed buffers, which may claim any size; reads only its metadata."""
    messages = pa.ipc.MessageReader.open_stream(stream)
    while (message := _next_message(messages)) is not None:
        data = memoryview(message.metadata)
        kind, header = _field(data, _at(data, 0), HEADER_TYPE), _field(data, _at(data, 0), HEADER)
        kind, header = data[kind] if kind else 0, _at(data, header) if header else 0
        if kind == DICTIONARY_BATCH:
            header = _at(data, _field(data, header, DICTIONARY_DATA))
        if kind in (DICTIONARY_BATCH, RECORD_BATCH) and _field(data, header, COMPRESSION):
            raise ValueError(f"{path}: its record batches are compressed, which is not read: write it again without "
                             "compression, or as parquet")  # fmt: skip
        _give_back(mapped)  # the system maps sixteen pages where one is read


def _next_message(messages):
    try:
        return messages.read_next_message()
    except StopIteration:
        return None


def _at(data, place):
    """Position of the flatbuffers table that the offset at `place` leads to."""
    return place + struct.unpack_from("<I", data, place)[0]


def _field(data, table, number):
    """Position of field `number` of a flatbuffers table; 0 if the table does not have it."""
    names = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number + 2 > struct.unpack_from("<H", data, names)[0]:
        return 0
    offset = struct.unpack_from("<H", data, names + 4 + 2 * number)[0]
    return table + offset if offset else 0
