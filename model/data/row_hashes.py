"""Hashes of the rows in a token store: one of all rows in order, and one of each first column and row."""

import hashlib

import numpy as np
import pyarrow as pa

ROWS_PER_CHUNK = 1 << 20  # compared at a time
TABLE_BITS = 22  # the low bits of a hash that index the table in _is_member
# Odd, one per position in a text: texts with different ids almost never have equal sums (multilinear hashing).
MULTIPLIERS = np.random.default_rng(0).integers(2**64, size=2**16, dtype=np.uint64) | np.uint64(1)


def write_hashes(directory, num_rows, values):
    """Write hashes.npy for the rows in ids.arrow: uint64 (rows, 2), the hash of the first column and of the whole row.

    Returns the sha256 of all ids, lengths and `values` ({name: list of arrays}) in order, which does not depend on how
    the rows were batched.
    """
    with open(directory / "hashes.npy", "wb") as out, pa.OSFile(str(directory / "ids.arrow")) as file:
        np.lib.format.write_array_header_1_0(out, dict(descr="<u8", fortran_order=False, shape=(num_rows, 2)))
        reader = pa.ipc.open_stream(file)
        whole = [hashlib.sha256() for _ in range(2 * len(reader.schema))]  # lengths and ids of each column
        for batch in reader:
            columns = [(np.asarray(column.offsets), np.asarray(column.values)) for column in batch.columns]
            for part, data in zip(whole, (x for offsets, ids in columns for x in (np.diff(offsets), ids)), strict=True):
                part.update(data)
            first, *rest = (_hash_rows(*column) for column in columns)
            row = first
            for column in rest:
                row = row * MULTIPLIERS[0] + column
            out.write(np.stack([first, row], axis=1))
    whole += [hashlib.sha256(np.concatenate(parts)) for parts in values.values()]
    return hashlib.sha256(b"".join(part.digest() for part in whole)).hexdigest()


def _hash_rows(offsets, ids):
    """uint64 (rows,): hash of each row, the `ids` from one of `offsets` to the next; no row may be empty."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    positions = np.arange(len(ids), dtype=np.int32) - np.repeat(starts, lengths)
    return np.add.reduceat((ids.astype(np.uint64) + np.uint64(1)) * MULTIPLIERS[positions], starts)


def shared_rows(validation, train):
    """(rows in both TokenStores, number of other `validation` rows whose first column is in `train`)."""
    rows = firsts = 0
    for mine in _chunks(validation.hashes):
        is_shared = np.zeros(mine.shape, bool)
        for theirs in _chunks(train.hashes):
            for column in (0, 1):
                is_shared[:, column] |= _is_member(mine[:, column], theirs[:, column])
        rows += int(is_shared[:, 1].sum())
        firsts += int((is_shared[:, 0] & ~is_shared[:, 1]).sum())
    return rows, firsts


def _is_member(mine, theirs):
    """bool (len(mine),): whether each hash of `mine` is in `theirs`, which may be much longer."""
    lowest_bits = np.uint64((1 << TABLE_BITS) - 1)
    wanted = np.zeros(1 << TABLE_BITS, bool)
    wanted[mine & lowest_bits] = True
    return np.isin(mine, theirs[wanted[theirs & lowest_bits]])  # only a few remain to sort


def _chunks(hashes):
    return (hashes[start : start + ROWS_PER_CHUNK] for start in range(0, len(hashes), ROWS_PER_CHUNK))
