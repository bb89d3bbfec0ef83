"""Buckets: the padded sizes for which a step is recorded as a CUDA graph."""

import math
from dataclasses import dataclass

import numpy as np

# Standard deviations from a side's mean tokens, of every side but the last and of the last. A batch that fits none runs
# unrecorded. Found by random search over four kinds of lengths and 8 to 1,024 examples a step: least padding and fewest
# steps unrecorded, where the largest size takes at most 1 % more memory than (2.5, 2.5) does.
LEVELS = ((0.0, -0.7), (0.2, 0.2), (0.5, 0.8), (1.5, -0.5), (2.3, 0.4), (1.3, 1.5), (2.7, 2.5), (4.2, 1.5), (1.0, 3.0))
STREAM_LEVELS = (-1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.4, 2.5)  # of all sides together, where they lie in one stream
BUCKET_FILL = 2 / 3  # least share of real tokens; the small last step of an epoch is not worth the padding
CHEAP_PADDING = 2048  # tokens that are computed sooner than every kernel is launched, however small their share is
BUCKET_MULTIPLE = 64  # tokens


@dataclass(frozen=True)
class Bucket:
    """The size to which a micro-batch is padded for a recorded step."""

    sides: tuple[int, ...]  # tokens of each side; of a stream: the room beside its last side, and that of its last
    examples: int
    is_stream: bool = False  # the sides lie in one stream: only all tokens together and the last side have limits

    @property
    def tokens(self):
        """Tokens of all sides together."""
        return sum(self.sides)

    def holds(self, lengths):
        """True if examples of these `lengths` (examples, sides), in tokens, fit and need little padding.

        Little is a share of 1 - BUCKET_FILL, or CHEAP_PADDING tokens, whichever is more.
        """
        sides = lengths.sum(axis=0, dtype=np.int64)
        own, limits = sides, self.sides
        if self.is_stream:
            own, limits = np.array([sides.sum(), sides[-1]]), (self.tokens, self.sides[-1])
        fits = bool((own <= limits).all()) and 0 < len(lengths) <= self.examples
        return fits and sides.sum() >= min(BUCKET_FILL * self.tokens, self.tokens - CHEAP_PADDING)


def buckets_for(lengths, examples, counts=None, is_stream=False):
    """Buckets, smallest first, for micro-batches of `examples` examples drawn from `lengths`; nearly all fit in one.

    `lengths` (examples, sides) in tokens; or the distinct lengths (kinds, sides), with the number of examples of each
    in `counts`. `is_stream`: the network reads all sides of an example in one stream.
    """
    if is_stream:
        sizes = _stream_sizes(lengths, examples, counts)
    else:
        firsts, lasts = zip(*LEVELS, strict=True)
        levels = [firsts] * (lengths.shape[1] - 1) + [lasts]
        by_side = [_sizes(side, own, examples, counts) for side, own in zip(lengths.T, levels, strict=True)]
        sizes = {sides for sides in zip(*by_side, strict=True) if all(sides)}
    return sorted((Bucket(sides, examples, is_stream) for sides in sizes), key=lambda bucket: bucket.tokens)


def _stream_sizes(lengths, examples, counts):
    """Sides of the buckets of a stream: the last has room for nearly every micro-batch, the one before for the rest."""
    (most_last,) = _sizes(lengths[:, -1], STREAM_LEVELS[-1:], examples, counts)
    for tokens in {*_sizes(lengths.sum(axis=1, dtype=np.int64), STREAM_LEVELS, examples, counts)} - {0}:
        last = min(tokens, most_last)
        yield (tokens - last, last) if lengths.shape[1] > 1 else (tokens,)


def _sizes(tokens, levels, examples, counts):
    """Tokens of `examples` examples at each level, in whole BUCKET_MULTIPLEs; 0 where so many deviations leave none."""
    mean, most = np.average(tokens, weights=counts), examples * int(tokens.max())
    spread = np.sqrt(examples * np.average((tokens - mean) ** 2, weights=counts))
    return [_round_up(max(min(examples * mean + level * spread, most), 0)) for level in levels]


def _round_up(tokens):
    return math.ceil(tokens / BUCKET_MULTIPLE) * BUCKET_MULTIPLE
