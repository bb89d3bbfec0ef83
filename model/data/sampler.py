"""Chooses the examples of a step and divides them among the ranks.

The examples of a step are a pure function of (seed, pairs seen, global batch). They do not depend on the number of
ranks, the micro-batch or the memory.
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
    """The Step after `pairs_seen` pairs. Each epoch is a permutation of all pairs; its last step may be smaller."""
    epoch, offset = divmod(pairs_seen, num_pairs)
    positions = np.arange(offset, min(offset + global_batch, num_pairs))
    return Step(permute(positions, num_pairs, f"{seed}/{epoch}"), epoch + 1)


def permute(positions, num_items, key):
    """int64: the items at `positions` of a pseudorandom permutation of range(num_items), in O(1) per position.

    `key` selects the permutation. A Feistel network permutes the numbers of the next even number of bits and is applied
    again to results outside the range (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    half_bits = np.uint64(max((max(num_items - 1, 1)).bit_length() + 1, 2) // 2)
    round_keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype=np.uint64)[:FEISTEL_ROUNDS]
    values = _feistel(np.asarray(positions, dtype=np.uint64), half_bits, round_keys)
    while (is_outside := values >= num_items).any():
        values[is_outside] = _feistel(values[is_outside], half_bits, round_keys)
    return values.astype(np.int64)


def _feistel(values, half_bits, round_keys):
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


def _mix(values):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): each output bit depends on all input bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def share_of(ids, lengths, rank, world_size):
    """The examples of `ids` for `rank`; the ranks get equal numbers of examples to within one, and similar lengths.

    `lengths` (len(ids), sides) in tokens. The ranks take turns from the longest example to the shortest, in an order
    that reverses every round: 0, 1, 2, 2, 1, 0, ...
    """
    order = np.lexsort((ids, lengths.sum(axis=1, dtype=np.int64)))[::-1]
    turn = np.arange(len(ids)) % (2 * world_size)
    owner = np.minimum(turn, 2 * world_size - 1 - turn)
    return ids[order[owner == rank]]
