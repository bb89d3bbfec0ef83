"""Hashes of the pairs in a token store: one of all pairs in order, and one of each prompt and pair."""

import hashlib

import numpy as np
import pyarrow as pa

ROWS_PER_CHUNK = 1 << 20  # compared at a time
TABLE_BITS = 22  # the low bits of a hash that index the table in _is_member
# Odd, one per position in a text: texts with different ids almost never have equal sums (multilinear hashing).
MULTIPLIERS = np.random.default_rng(0).integers(2**64, size=2**16, dtype=np.uint64) | np.uint64(1)


def write_hashes(directory, num_pairs):
    """Write hashes.npy for the pairs in pairs.arrow: uint64 (pairs, 2), the hash of the prompt and of the whole pair.

    Returns the sha256 of all ids and lengths in order, which does not depend on how the pairs were batched.
    """
    whole = [hashlib.sha256() for _ in range(4)]  # lengths and ids of each side
    with open(directory / "hashes.npy", "wb") as out, pa.memory_map(str(directory / "pairs.arrow")) as file:
        np.lib.format.write_array_header_1_0(out, dict(descr="<u8", fortran_order=False, shape=(num_pairs, 2)))
        for batch in pa.ipc.open_stream(file):
            sides = [(np.asarray(side.offsets), np.asarray(side.values)) for side in batch.columns]
            for part, values in zip(whole, (x for offsets, ids in sides for x in (np.diff(offsets), ids)), strict=True):
                part.update(values)
            prompts, responses = (_hash_rows(*side) for side in sides)
            out.write(np.stack([prompts, prompts * MULTIPLIERS[0] + responses], axis=1))
    return hashlib.sha256(b"".join(part.digest() for part in whole)).hexdigest()


def _hash_rows(offsets, ids):
    """uint64 (rows,): hash of each row, the `ids` from one of `offsets` to the next; no row may be empty."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    positions = np.arange(len(ids), dtype=np.int32) - np.repeat(starts, lengths)
    return np.add.reduceat((ids.astype(np.uint64) + np.uint64(1)) * MULTIPLIERS[positions], starts)


def shared_pairs(validation, train):
    """(number of pairs in both TokenStores, number of other `validation` pairs whose prompt is in `train`)."""
    pairs = prompts = 0
    for mine in _chunks(validation.hashes):
        is_shared = np.zeros(mine.shape, bool)
        for theirs in _chunks(train.hashes):
            for side in (0, 1):
                is_shared[:, side] |= _is_member(mine[:, side], theirs[:, side])
        pairs += int(is_shared[:, 1].sum())
        prompts += int((is_shared[:, 0] & ~is_shared[:, 1]).sum())
    return pairs, prompts


def _is_member(mine, theirs):
    """bool (len(mine),): whether each hash of `mine` is in `theirs`, which may be much longer."""
    lowest_bits = np.uint64((1 << TABLE_BITS) - 1)
    wanted = np.zeros(1 << TABLE_BITS, bool)
    wanted[mine & lowest_bits] = True
    return np.isin(mine, theirs[wanted[theirs & lowest_bits]])  # only a few remain to sort


def _chunks(hashes):
    return (hashes[start : start + ROWS_PER_CHUNK] for start in range(0, len(hashes), ROWS_PER_CHUNK))


def describe_shared(validation, train):
    """One line about the pairs and prompts that both TokenStores have; "" if there are none."""
    pairs, prompts = shared_pairs(validation, train)
    if not pairs and not prompts:
        return ""
    return (
        f"{pairs:,} of {len(validation):,} validation pairs are also in the training file, {prompts:,} more share a "
        "prompt with it: the validation loss is lower than on unseen pairs"
    )
