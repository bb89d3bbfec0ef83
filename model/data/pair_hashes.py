"""Which pairs a token store holds, as numbers: a hash of all of them in their order, and hashes of each."""

import hashlib

import numpy as np
import pyarrow as pa

ROWS_A_CHUNK = 1 << 20  # that are compared at a time
TABLE_BITS = 22  # of a hash
# Odd, by position in a text: two texts of different ids almost never have one sum of products (multilinear hashing).
MULTIPLIERS = np.random.default_rng(0).integers(2**64, size=2**16, dtype=np.uint64) | np.uint64(1)


def write_hashes(directory, num_pairs):
    """Write hashes.npy, of each pair in pairs.arrow: uint64 (pairs, 2), of the prompt's ids and of both sides' ids.

    Returns the sha256 of all ids and lengths in their order, the same however the pairs were batched.
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
    """A 64-bit hash of each row: of `ids`, those from one offset to the next, which are never none."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    places = np.arange(len(ids), dtype=np.int32) - np.repeat(starts, lengths)
    return np.add.reduceat((ids.astype(np.uint64) + np.uint64(1)) * MULTIPLIERS[places], starts)


def shared_pairs(validation, train):
    """(Pairs of the TokenStore `validation` that stand in `train` too, others whose prompt alone stands there)."""
    pairs = prompts = 0
    for mine in _chunks(validation.hashes):
        known = np.zeros(mine.shape, bool)
        for theirs in _chunks(train.hashes):
            for side in (0, 1):
                known[:, side] |= _held(mine[:, side], theirs[:, side])
        pairs += int(known[:, 1].sum())
        prompts += int((known[:, 0] & ~known[:, 1]).sum())
    return pairs, prompts


def _held(mine, theirs):
    """Of each of the hashes `mine`, whether it is one of `theirs`, which may be many more."""
    lowest_bits = np.uint64((1 << TABLE_BITS) - 1)
    wanted = np.zeros(1 << TABLE_BITS, bool)
    wanted[mine & lowest_bits] = True
    return np.isin(mine, theirs[wanted[theirs & lowest_bits]])  # few are left to sort


def _chunks(hashes):
    return (hashes[start : start + ROWS_A_CHUNK] for start in range(0, len(hashes), ROWS_A_CHUNK))


def describe_shared(validation, train):
    """One line on pairs and prompts that both TokenStores have, or nothing where they have none."""
    pairs, prompts = shared_pairs(validation, train)
    if not pairs and not prompts:
        return ""
    return (
        f"{pairs:,} of {len(validation):,} validation pairs stand in the training file too, {prompts:,} more share a "
        "prompt with it: the validation loss flatters the model"
    )
