"""Buckets: the padded sizes for which a step is captured as a CUDA graph."""

import math
from dataclasses import dataclass

import numpy as np

from model.data.sampler import shares_of

# Standard deviations from the mean tokens, of every column but the last and of the last. A batch that fits none runs
# uncaptured. Found by random search over four kinds of lengths and 8 to 1,024 examples a step: least padding and fewest
# steps uncaptured, where the largest size takes at most 1 % more memory than (2.5, 2.5) does.
LEVELS = ((0.0, -0.7), (0.2, 0.2), (0.5, 0.8), (1.5, -0.5), (2.3, 0.4), (1.3, 1.5), (2.7, 2.5), (4.2, 1.5), (1.0, 3.0))
STREAM_LEVELS = (-1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.4, 2.5)  # of all columns together, where they lie in one stream
BUCKET_FILL = 2 / 3  # least share of real tokens; the small last step of an epoch is not worth the padding
CHEAP_PADDING = 2048  # tokens that are computed sooner than every kernel is launched, however small their share is
BUCKET_MULTIPLE = 64  # tokens
DRAWN_EXAMPLES = 2**16  # of steps whose shares are compared


@dataclass(frozen=True)
class Bucket:
    """The size to which a micro-batch is padded for a captured step."""

    columns: tuple[int, ...]  # tokens of each; of a stream: the room beside its last column, and that of its last
    examples: int
    is_stream: bool = False  # the columns lie in one stream: only all tokens together and the last column have limits

    @property
    def tokens(self):
        """Tokens of all columns together."""
        return sum(self.columns)

    def has_room_for(self, lengths):
        """True if examples of these `lengths` (examples, columns), in tokens, fit."""
        own, limits = lengths.sum(axis=0, dtype=np.int64), self.columns
        if self.is_stream:
            own, limits = np.array([own.sum(), own[-1]]), (self.tokens, self.columns[-1])
        return bool((own <= limits).all()) and 0 < len(lengths) <= self.examples

    def holds(self, lengths):
        """True if examples of these `lengths` fit and need little padding.

        Little is a share of 1 - BUCKET_FILL, or CHEAP_PADDING tokens, whichever is more.
        """
        least = min(BUCKET_FILL * self.tokens, self.tokens - CHEAP_PADDING)
        return self.has_room_for(lengths) and lengths.sum(dtype=np.int64) >= least


def buckets_for(lengths, examples, counts=None, is_stream=False, num_ranks=1):
    """Buckets, smallest first, for micro-batches of `examples` examples drawn from `lengths`; nearly all fit in one.

    `lengths` (examples, columns) in tokens; or the distinct lengths (kinds, columns), with the number of examples of
    each in `counts`. `is_stream`: the network reads all columns of an example in one stream. Of several ranks each gets
    such a micro-batch, as `shares_of` deals them.
    """
    with_totals = np.column_stack([lengths, lengths.sum(axis=1, dtype=np.int64)]).astype(np.int64)
    means, most = np.average(with_totals, axis=0, weights=counts), examples * with_totals.max(axis=0)
    deviations = _deviations(with_totals, examples, counts, num_ranks)

    def sizes(column, levels):
        tokens = examples * means[column] + np.array(levels) * deviations[column]
        return [_round_up(count) for count in tokens.clip(0, most[column])]

    if is_stream:
        columns = _stream_sizes(sizes, lengths.shape[1])
    else:
        firsts, lasts = zip(*LEVELS, strict=True)
        levels = [firsts] * (lengths.shape[1] - 1) + [lasts]
        by_column = [sizes(column, own) for column, own in enumerate(levels)]
        columns = (single for single in zip(*by_column, strict=True) if all(single))
    return sorted((Bucket(single, examples, is_stream) for single in {*columns}), key=lambda bucket: bucket.tokens)


def _stream_sizes(sizes, num_columns):
    """Columns of a stream's buckets: the last has room for nearly every micro-batch, the one before for the rest."""
    (most_last,) = sizes(num_columns - 1, STREAM_LEVELS[-1:])
    for tokens in {*sizes(num_columns, STREAM_LEVELS)} - {0}:
        last = min(tokens, most_last)
        yield (tokens - last, last) if num_columns > 1 else (tokens,)


def _deviations(with_totals, examples, counts, num_ranks):
    """Standard deviation of a rank's tokens in each of `with_totals` (kinds, columns and their sum).

    Shares of several ranks are alike, and differ less from step to step than examples drawn for one rank.
    """
    if num_ranks == 1:
        means = np.average(with_totals, axis=0, weights=counts)
        return np.sqrt(examples * np.average((with_totals - means) ** 2, axis=0, weights=counts))
    draw, shares, pairs = np.random.default_rng(0), [], num_ranks * examples
    weights = None if counts is None else counts / counts.sum()
    for _ in range(min(max(DRAWN_EXAMPLES // pairs, 16), 256)):
        step = with_totals[draw.choice(len(with_totals), pairs, p=weights)]
        shares += [step[share].sum(axis=0) for share in shares_of(np.arange(pairs), step[:, :-1], num_ranks)]
    return np.std(shares, axis=0)


def _round_up(tokens):
    return math.ceil(tokens / BUCKET_MULTIPLE) * BUCKET_MULTIPLE
