"""A histogram of example lengths, which represents a corpus of any size in little memory."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

CHUNK_EXAMPLES = 2**20  # counted at a time
MAX_BINS = 64


@dataclass(frozen=True)
class Lengths:
    """Distinct lengths of examples in tokens, one for each column, and the number of examples with each."""

    tokens: np.ndarray  # (kinds, columns)
    counts: np.ndarray  # (kinds,)

    @cached_property
    def longest(self):
        """Tokens of the longest example, all columns together."""
        return int(self.tokens.sum(axis=1).max())

    @cached_property
    def unit(self):
        """The greatest common divisor of the examples' tokens: whole examples have a multiple of it together."""
        return int(np.gcd.reduce(self.tokens.sum(axis=1)))

    @cached_property
    def mean(self):
        """Mean tokens per example, all columns together."""
        return float((self.tokens.sum(axis=1) * self.counts).sum() / self.counts.sum())

    @cached_property
    def deviation(self):
        """Standard deviation of the tokens per example."""
        squares = (self.tokens.sum(axis=1) - self.mean) ** 2 * self.counts
        return float(np.sqrt(squares.sum() / self.counts.sum()))

    def binned(self, column, most=MAX_BINS):
        """Examples by the tokens of their column: {"width": tokens, "counts": [...]}, at most `most` bins from 0 on."""
        tokens = self.tokens[:, column]
        width = max(1, -(-int(tokens.max() + 1) // most))
        counts = np.bincount(tokens // width, self.counts)
        return dict(width=width, counts=counts.astype(np.int64).tolist())


def histogram(lengths):
    """The histogram of `lengths` (examples, columns) in tokens; at most 3 columns, each below 2^21 tokens."""
    num_columns = lengths.shape[1]
    bits, parts = min(63 // num_columns, 32), []
    assert bits >= 21, f"{num_columns} columns do not fit one key"
    for first in range(0, len(lengths), CHUNK_EXAMPLES):  # never copies the lengths of the whole corpus
        keys = np.zeros(len(lengths[first : first + CHUNK_EXAMPLES]), np.int64)
        for column in np.asarray(lengths[first : first + CHUNK_EXAMPLES], dtype=np.int64).T:
            keys = keys << bits | column
        parts.append(np.unique(keys, return_counts=True))
    keys, indices = np.unique(np.concatenate([part for part, _ in parts]), return_inverse=True)
    counts = np.bincount(indices, np.concatenate([count for _, count in parts])).astype(np.int64)
    columns = [keys >> bits * place & (1 << bits) - 1 for place in reversed(range(num_columns))]
    return Lengths(np.stack(columns, axis=1), counts)


def mixed(lengths, mixture):
    """The histogram of an epoch of a Mixture of files, whose rows have these `lengths`; counts are rounded up."""
    parts, first = [], 0
    for rows, taken in zip(mixture.rows, mixture.taken, strict=True):
        if rows:
            part = histogram(lengths[first : first + rows])
            parts.append((part.tokens, np.ceil(part.counts * (taken / rows)).astype(np.int64)))
        first += rows
    tokens, indices = np.unique(np.concatenate([tokens for tokens, _ in parts]), axis=0, return_inverse=True)
    return Lengths(tokens, np.bincount(indices, np.concatenate([count for _, count in parts])).astype(np.int64))
