"""Buckets: the padded sizes for which a step is recorded as a CUDA graph."""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

# Standard deviations from a side's mean tokens: few sizes, little padding. A batch that fits none runs unrecorded.
FIRST_LEVELS, LAST_LEVELS = (0.3, 2.5), (-0.6, 0.2, 1.0, 2.5)  # of every side but the last, of the last
BUCKET_FILL = 2 / 3  # least share of real tokens; the small last step of an epoch is not worth the padding
BUCKET_MULTIPLE = 64  # tokens


@dataclass(frozen=True)
class Bucket:
    """The size to which a micro-batch is padded for a recorded step."""

    sides: tuple[int, ...]  # tokens of each side
    examples: int

    @property
    def tokens(self):
        """Tokens of all sides together."""
        return sum(self.sides)

    def holds(self, lengths):
        """True if examples of these `lengths` (examples, sides), in tokens, fit and fill at least BUCKET_FILL of it."""
        sides = lengths.sum(axis=0, dtype=np.int64)
        fits = bool((sides <= self.sides).all()) and len(lengths) <= self.examples
        return fits and sides.sum() >= BUCKET_FILL * self.tokens


def buckets_for(lengths, examples, counts=None):
    """Buckets, smallest first, for micro-batches of `examples` examples drawn from `lengths`; nearly all fit in one.

    `lengths` (examples, sides) in tokens; or the distinct lengths (kinds, sides), with the number of examples of each
    in `counts`.
    """
    mean = np.average(lengths, axis=0, weights=counts)
    means, spreads = examples * mean, np.sqrt(examples * np.average((lengths - mean) ** 2, axis=0, weights=counts))
    levels_by_side = [FIRST_LEVELS] * (len(means) - 1) + [LAST_LEVELS]
    sizes = (
        {_round_up(mean + level * spread) for level in levels if mean > -level * spread}
        for mean, spread, levels in zip(means, spreads, levels_by_side, strict=True)
    )
    buckets = (Bucket(sides, examples) for sides in product(*sizes))
    return sorted(buckets, key=lambda bucket: bucket.tokens)


def _round_up(tokens):
    return math.ceil(tokens / BUCKET_MULTIPLE) * BUCKET_MULTIPLE
