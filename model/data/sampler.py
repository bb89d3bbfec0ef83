"""Which examples form step s, which rank takes which, and how they are packed into micro-batches.

A step is a set of examples, a pure function of (seed, position in pairs, global batch): never of the number of
ranks, of the micro-batch or of memory.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Step:
    """The examples of one optimizer step."""

    ids: np.ndarray  # rows of the token store, over all ranks
    epoch: int  # from 1


def step_at(pairs_seen, num_pairs, global_batch, seed):
    """The step that begins after `pairs_seen` pairs; an epoch is a permutation, and its last step may be smaller."""
    epoch, offset = divmod(pairs_seen, num_pairs)
    positions = np.arange(offset, min(offset + global_batch, num_pairs))
    return Step(permute(positions, num_pairs, f"{seed}/{epoch}"), epoch + 1)


def permute(positions, num_items, key):
    """Where a keyed permutation of range(num_items) sends each position: random order at any position in O(1).

    A Feistel network on the next even number of bits; results outside the range walk on until they are inside
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    half_bits = np.uint64(max((max(num_items - 1, 1)).bit_length() + 1, 2) // 2)
    round_keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype=np.uint64)[:FEISTEL_ROUNDS]
    values = _feistel(np.asarray(positions, dtype=np.uint64), half_bits, round_keys)
    while (outside := values >= num_items).any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
    return values.astype(np.int64)


def _feistel(values, half_bits, round_keys):
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


def _mix(values):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def share_of(ids, lengths, rank, world_size):
    """The examples of `ids` that `rank` takes: as many and as long as every other rank's, to within one.

    `lengths` (len(ids), 2) in tokens. Dealt from the longest to the shortest, forth and back.
    """
    order = np.lexsort((ids, lengths.sum(axis=1, dtype=np.int64)))[::-1]
    place = np.arange(len(ids)) % (2 * world_size)
    owner = np.minimum(place, 2 * world_size - 1 - place)
    return ids[order[owner == rank]]
