"""Padded sizes (buckets) for which a step is recorded as a CUDA graph."""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

# Standard deviations around the mean number of tokens of a side: few sizes, little padding. What fits none has no room.
ROOM_LEVELS = ((0.3, 2.5), (-0.6, 0.2, 1.0, 2.5))  # of prompts, of responses
ROOM_FILL = 2 / 3  # at least: an epoch's small last step is not worth the padding
ROOM_MULTIPLE = 64  # tokens


@dataclass(frozen=True)
class Room:
    """What a micro-batch is padded to, so that a recorded step can take it."""

    prompt_tokens: int
    response_tokens: int
    pairs: int

    @property
    def tokens(self):
        """Of both sides."""
        return self.prompt_tokens + self.response_tokens

    def holds(self, lengths):
        """True if pairs of these `lengths` (pairs, 2) fit, and fill most of it."""
        prompts, responses = lengths.sum(axis=0, dtype=np.int64)
        fits = prompts <= self.prompt_tokens and responses <= self.response_tokens and len(lengths) <= self.pairs
        return fits and prompts + responses >= ROOM_FILL * self.tokens


def rooms_for(lengths, pairs, counts=None):
    """Rooms, the smallest first, of which one holds nearly every micro-batch of `pairs` pairs drawn from `lengths`.

    `lengths` (examples, 2), or (kinds, 2) and how many examples have each in `counts`.
    """
    mean = np.average(lengths, axis=0, weights=counts)
    means, spreads = pairs * mean, np.sqrt(pairs * np.average((lengths - mean) ** 2, axis=0, weights=counts))
    prompts, responses = (
        {_round_up(mean + level * spread) for level in levels if mean > -level * spread}
        for mean, spread, levels in zip(means, spreads, ROOM_LEVELS, strict=True)
    )
    rooms = (Room(*tokens, pairs) for tokens in product(prompts, responses))
    return sorted(rooms, key=lambda room: room.tokens)


def _round_up(tokens):
    return math.ceil(tokens / ROOM_MULTIPLE) * ROOM_MULTIPLE
