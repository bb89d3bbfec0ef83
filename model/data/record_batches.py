"""Turns Arrow record batches of strangers' files into rows in bounded memory, however far a small file expands.

The characters of a batch are counted before it becomes Python objects.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from model.runtime.json_stream import MAX_ITEM_CHARS, OnMalformed

BATCH_ROWS = 1000
FREE_BYTES, FREE_VALUES, VALUES_PER_BYTE = 64 << 20, 2_000_000, 4  # a file of any size may expand to the first two
LONG_ROW_CHARS = 1 << 20  # counted for a row that is too long to be read
CHARS_PER_BYTE = 1000  # limit for all rows per byte of the file; a repeated value counts each time
MAX_WIDTH = 1 << 14  # bytes or values in a fixed-size cell, which a null takes up too


def rows_of(
    path: Path, file_bytes: int, batches: Iterable[pa.RecordBatch], on_malformed: OnMalformed
) -> Iterator[tuple[int, dict]]:
    """Yield (index, row) for each row of the batches of a file of `file_bytes`, the row as {column: value}.

    A row of more than MAX_ITEM_CHARS is reported to `on_malformed` and left out. Raises ValueError for a file that
    expands to far more than text does.
    """
    index, chars_left = 0, FREE_BYTES + CHARS_PER_BYTE * file_bytes
    for batch in batches:
        chars = sum(map(count_chars, batch.columns), np.zeros(len(batch), np.int64))
        is_readable = chars <= MAX_ITEM_CHARS
        chars_left -= int(np.where(is_readable, chars, LONG_ROW_CHARS).sum())
        if chars_left < 0:
            raise expansion_error(path, file_bytes, f"more than {CHARS_PER_BYTE:,} characters per byte")
        for start, end in _runs(chars):
            if is_readable[start]:
                yield from enumerate(_as_rows(path, batch.slice(start, end - start)), index + start)
            else:
                on_malformed(f"{path} row {index + start + 1:,}: a row of {chars[start]:,} characters; "
                             f"at most {MAX_ITEM_CHARS:,} are read: cut its text into several rows")  # fmt: skip
        index += len(batch)


def expansion_error(path: Path, file_bytes: int, expanded: str) -> ValueError:
    """The error for a file whose bytes stand for far more than texts."""
    return ValueError(
        f"{path}: its {file_bytes:,} bytes expand to {expanded}, far more than a file of texts does; write it again"
    )


def max_values(file_bytes: int) -> int:
    """Most rows, and values in a column, that a file of this size may have."""
    return FREE_VALUES + VALUES_PER_BYTE * file_bytes


def check_widths(path: Path, schema: pa.Schema) -> None:
    """Raise ValueError for a column with cells of a fixed, large size."""
    for field in schema:
        if (width := _width(field.type)) > MAX_WIDTH:
            raise ValueError(f"{path}: column {field.name!r} has cells of {width:,} values, at most {MAX_WIDTH:,} are "
                             "read; write the file without this column")  # fmt: skip


def _width(kind):
    """Bytes or values that each cell of this Arrow type takes, nulls included; 1 if cells differ in size."""
    if kinds.is_fixed_size_binary(kind):
        return kind.byte_width
    size = kind.list_size if kinds.is_fixed_size_list(kind) else 1
    return size * sum(_width(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else 1


def count_chars(array: pa.Array) -> np.ndarray:
    """int64 (rows,): characters of text or bytes of binary values in each row of an Arrow array; others count 1."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return count_chars(array.storage)
    if kinds.is_dictionary(kind):
        lengths = np.append(count_chars(array.dictionary), 1)
        return lengths[array.indices.fill_null(len(lengths) - 1).to_numpy(zero_copy_only=False)]
    if len(array) and (kinds.is_string_view(kind) or kinds.is_binary_view(kind)):  # many views may share one text
        views = np.frombuffer(array.buffers()[1], np.int32, count=4 * (array.offset + len(array))).reshape(-1, 4)
        return np.maximum(views[array.offset :, 0].astype(np.int64), 1)
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return pc.utf8_length(array).fill_null(1).to_numpy(zero_copy_only=False).astype(np.int64)
    if kinds.is_binary(kind) or kinds.is_large_binary(kind):
        return pc.binary_length(array).fill_null(1).to_numpy(zero_copy_only=False).astype(np.int64)
    if kinds.is_struct(kind):
        return sum(map(count_chars, array.flatten()), np.ones(len(array), np.int64))
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_map(kind):
        offsets = array.offsets.to_numpy()
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        before = np.concatenate([[0], np.cumsum(count_chars(values))])
        return before[offsets[1:] - offsets[0]] - before[offsets[:-1] - offsets[0]] + 1
    if kinds.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return count_chars(values).reshape(len(array), kind.list_size).sum(axis=1) + 1
    return np.full(len(array), _width(kind))


def _runs(chars):
    """Yield (start, end) of consecutive rows with at most MAX_ITEM_CHARS in total; a longer row is alone."""
    start = total = 0
    for end, size in enumerate(chars.tolist()):
        if total + size > MAX_ITEM_CHARS and end > start:
            yield start, end
            start, total = end, 0
        total += size
    if start < len(chars):
        yield start, len(chars)


def _as_rows(path, batch):
    """The rows of a batch of the file at `path`; to_pylist is thirty times faster once dictionaries are decoded."""
    columns = [c.dictionary_decode() if kinds.is_dictionary(c.type) else c for c in batch.columns]
    try:
        rows = pa.record_batch(columns, names=batch.schema.names).to_pylist()
    except (ValueError, OverflowError) as error:  # such as a date of the year 10,000
        raise ValueError(f"{path}: a value cannot be read ({error}); write its column as text") from None
    for field in filter(lambda field: _holds_json(field.type), batch.schema):
        for row in rows:
            row[field.name] = _with_json(row[field.name], field.type)
    return rows


def _holds_json(kind):
    if isinstance(kind, pa.JsonType):
        return True
    return any(_holds_json(kind.field(i).type) for i in range(kind.num_fields))


def _with_json(value, kind):
    """The value with each text of Arrow's JSON type in it, as Hugging Face's Json feature keeps it, as what it says."""
    if isinstance(kind, pa.JsonType) and value is not None:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list):
        return [_with_json(each, kind.value_type) for each in value]
    if isinstance(value, dict):
        return {name: _with_json(each, kind.field(name).type) for name, each in value.items()}
    return value
