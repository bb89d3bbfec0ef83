"""A histogram of example lengths, which represents a corpus of any size in little memory."""

from dataclasses import dataclass

import numpy as np

CHUNK_EXAMPLES = 2**20  # counted at a time


@dataclass(frozen=True)
class Lengths:
    """Distinct (prompt, response) lengths in tokens, and the number of examples with each."""

    tokens: np.ndarray  # (kinds, 2)
    counts: np.ndarray  # (kinds,)

    @property
    def longest(self):
        """Tokens of the longest example, prompt and response together."""
        return int(self.tokens.sum(axis=1).max())

    @property
    def mean(self):
        """Mean tokens per example, prompt and response together."""
        return float((self.tokens.sum(axis=1) * self.counts).sum() / self.counts.sum())

    @property
    def deviation(self):
        """Standard deviation of the tokens per example."""
        squares = (self.tokens.sum(axis=1) - self.mean) ** 2 * self.counts
        return float(np.sqrt(squares.sum() / self.counts.sum()))


def histogram(lengths):
    """The histogram of `lengths` (examples, 2), in tokens of prompt and response."""
    parts = []
    for first in range(0, len(lengths), CHUNK_EXAMPLES):  # never copies the lengths of the whole corpus
        prompt, response = np.asarray(lengths[first : first + CHUNK_EXAMPLES], dtype=np.int64).T
        parts.append(np.unique(prompt << 32 | response, return_counts=True))
    keys, indices = np.unique(np.concatenate([part for part, _ in parts]), return_inverse=True)
    counts = np.bincount(indices, np.concatenate([count for _, count in parts])).astype(np.int64)
    return Lengths(np.stack([keys >> 32, keys & 0xFFFFFFFF], axis=1), counts)
