"""Chooses the examples of a step and divides them among the ranks.

The examples of a step are a pure function of (seed, pairs seen, global batch). They do not depend on the number of
ranks, the micro-batch or the memory. With a Mixture an epoch takes each file by its weight: a file of weight 2 comes
twice, of one of weight 0.5 the half that the epoch before left out.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.data.row_draws import mixed_bits

FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Step:
    """The examples of one optimizer step."""

    ids: np.ndarray  # rows of the token store, over all ranks
    epoch: int  # from 1


@dataclass(frozen=True)
class Mixture:
    """Which rows an epoch takes: `taken[i]` of the `rows[i]` rows of file i."""

    rows: tuple[int, ...]
    taken: tuple[int, ...]

    @cached_property
    def epoch_pairs(self):
        """Pairs of an epoch."""
        return sum(self.taken)

    @property
    def identity(self):
        """Equal for mixtures that take the same rows."""
        return " ".join(f"{taken}/{rows}" for rows, taken in zip(self.rows, self.taken, strict=True))

    def weight_of(self, file):
        """The shortest number that, as the weight of file number `file`, takes what is taken of it."""
        rows, taken = self.rows[file], self.taken[file]
        weights = (float(f"{taken / max(rows, 1):.{digits}g}") for digits in range(1, 17))
        return next((weight for weight in weights if _taken(rows, weight) == taken), taken / max(rows, 1))

    def rows_at(self, places, epoch, seed):
        """int64: rows of the token store at these places, each below `epoch_pairs`, of an epoch, from 0.

        The rows of a file that is not taken once come in passes over it, each a permutation that goes on where the
        epoch before ended.
        """
        found, first_place, first_row = places.copy(), 0, 0
        for file, (rows, taken) in enumerate(zip(self.rows, self.taken, strict=True)):
            inside = (places >= first_place) & (places < first_place + taken)
            within = places[inside] - first_place
            if rows != taken:
                within = _in_passes(epoch * taken + within, rows, f"{seed}/file {file}")
            found[inside] = first_row + within
            first_place, first_row = first_place + taken, first_row + rows
        return found


def mixture_of(rows_of_files, weights):
    """The Mixture in which an epoch takes each file's rows as often as its weight says, one row at least.

    None where it takes each row once.
    """
    taken = [_taken(rows, weight) for rows, weight in zip(rows_of_files, weights, strict=True)]
    return Mixture(tuple(rows_of_files), tuple(taken)) if taken != list(rows_of_files) else None


def _taken(rows, weight):
    return max(1, round(rows * weight)) if rows else 0


def _in_passes(numbers, rows, key):
    """The rows that these takings of a file give: taking t is in pass t // rows."""
    passes, found = numbers // rows, np.empty_like(numbers)
    for one in np.unique(passes):
        found[passes == one] = permute(numbers[passes == one] % rows, rows, f"{key}/{one}")
    return found


def step_at(pairs_seen, num_pairs, global_batch, seed, mixture=None):
    """The Step after `pairs_seen` pairs. Each epoch is a permutation of its pairs; its last step may be smaller.

    The `num_pairs` of an epoch are the rows of a store, or what the Mixture takes of them.
    """
    epoch, offset = divmod(pairs_seen, num_pairs)
    positions = np.arange(offset, min(offset + global_batch, num_pairs))
    ids = permute(positions, num_pairs, f"{seed}/{epoch}")
    return Step(mixture.rows_at(ids, epoch, seed) if mixture else ids, epoch + 1)


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
        left, right = right, left ^ (mixed_bits(right ^ key) & mask)
    return left << half_bits | right


def shares_of(ids, lengths, num_shares):
    """The examples of `ids` in `num_shares` shares of equal numbers to within one, with similar tokens of each column.

    `lengths` (len(ids), columns) in tokens. Examples of similar length are dealt together, one to each share: that with
    the longest source to the share that has the fewest tokens of sources so far.
    """
    if num_shares == 1:
        return [ids]
    order = np.lexsort((ids, lengths.sum(axis=1, dtype=np.int64)))[::-1].tolist()
    sources, shares, tokens = lengths[:, 0].tolist(), [[] for _ in range(num_shares)], [0] * num_shares
    for start in range(0, len(order), num_shares):
        dealt = sorted(order[start : start + num_shares], key=sources.__getitem__, reverse=True)
        emptiest = sorted(range(num_shares), key=tokens.__getitem__)
        for share, example in zip(emptiest, dealt, strict=False):  # the last deal may be for some shares only
            shares[share].append(example)
            tokens[share] += sources[example]
    return [ids[share] for share in shares]
