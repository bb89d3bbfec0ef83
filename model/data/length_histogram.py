"""How long the examples are: a histogram that stands for a corpus of any size."""

from dataclasses import dataclass

import numpy as np

PART = 2**20  # examples that are counted together


@dataclass(frozen=True)
class Lengths:
    """Histogram of the examples: distinct (prompt, response) lengths in tokens, and how many examples have each."""

    tokens: np.ndarray  # (kinds, 2)
    counts: np.ndarray  # (kinds,)

    @property
    def longest(self):
        """Tokens of both sides of the longest example."""
        return int(self.tokens.sum(axis=1).max())

    @property
    def mean(self):
        """Tokens of both sides of an example on average."""
        return float((self.tokens.sum(axis=1) * self.counts).sum() / self.counts.sum())

    @property
    def deviation(self):
        """Standard deviation of that number of tokens."""
        squares = (self.tokens.sum(axis=1) - self.mean) ** 2 * self.counts
        return float(np.sqrt(squares.sum() / self.counts.sum()))


def histogram(lengths):
    """Lengths of the examples with `lengths` (examples, 2)."""
    parts = []
    for first in range(0, len(lengths), PART):  # a corpus of millions is never copied as a whole
        prompt, response = np.asarray(lengths[first : first + PART], dtype=np.int64).T
        parts.append(np.unique(prompt << 32 | response, return_counts=True))
    keys, places = np.unique(np.concatenate([part for part, _ in parts]), return_inverse=True)
    counts = np.bincount(places, np.concatenate([count for _, count in parts])).astype(np.int64)
    return Lengths(np.stack([keys >> 32, keys & 0xFFFFFFFF], axis=1), counts)
