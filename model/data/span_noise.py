"""Span corruption: which tokens of a chunk of text are taken out, and what a T5 reads and writes then.

As in t5 (`random_spans_helper`, `random_spans_noise_mask`; Raffel et al. 2020, arXiv 1910.10683, 3.1.4): so many tokens
are taken out that they are the share `density` of the chunk, in spans of `mean_span` tokens on average, each stands for
a sentinel in what is read, and follows it in what is written. How many, and so both lengths, follows from the chunk's
length alone; where they lie is drawn, each arrangement as likely as another.
"""

from dataclasses import dataclass

import numpy as np

from model.data.row_draws import place_bits, places

MAX_CHUNK_TOKENS = 65_535  # a place has 16 bits
PLACE_BITS, ROW_SHIFT, DRAWN_BITS = 16, 44, 28  # of a key to sort by: row, drawn bits, place


@dataclass(frozen=True)
class Noise:
    """How much of a chunk is taken out."""

    density: float  # share of its tokens
    mean_span: float  # tokens of a span

    def __post_init__(self):
        if not 0 < self.density < 1:
            raise ValueError(f"--span_density={self.density}: must be above 0 and below 1, for example 0.15")
        if not 1 <= self.mean_span <= MAX_CHUNK_TOKENS:
            raise ValueError(f"--span_mean={self.mean_span}: must be from 1 to {MAX_CHUNK_TOKENS}, for example 3")

    def amounts(self, lengths):
        """(tokens taken out, their spans) of chunks of these lengths, each at least 2."""
        lengths = np.asarray(lengths, np.int64)
        taken = np.clip(np.rint(lengths * self.density), 1, lengths - 1).astype(np.int64)
        spans = np.clip(np.rint(taken / self.mean_span), 1, np.minimum(taken, lengths - taken)).astype(np.int64)
        return taken, spans

    def column_tokens(self, lengths):
        """int64 (chunks, 2): tokens that are read and written for chunks of these lengths, EOS included."""
        taken, spans = self.amounts(lengths)
        return np.stack([lengths - taken + spans + 1, taken + spans + 1], axis=1)

    def chunk_tokens(self, max_tokens):
        """The longest chunk of which neither source nor target has more than `max_tokens`."""
        lengths = np.arange(2, MAX_CHUNK_TOKENS + 1)
        return int(lengths[(self.column_tokens(lengths) <= max_tokens).all(axis=1)].max())

    def draw(self, lengths, bits):
        """(first place, length) of each span; places are those in the chunks of these lengths, end to end.

        `bits` (chunks,) are what the spans of each chunk are drawn by.
        """
        taken, spans = self.amounts(lengths)
        parts = np.empty(2 * spans.sum(), np.int64)  # what stays and what is taken out take turns, in each chunk
        parts[0::2] = _segments(lengths - taken, spans, bits)
        parts[1::2] = _segments(taken, spans, ~bits)
        return np.cumsum(parts)[0::2], parts[1::2]


def _segments(items, counts, bits):
    """Lengths of the `counts` segments, none empty, that each number of `items` is cut into at random."""
    inner = items - 1  # places at which it may be cut, of which the first ones in a random order are taken
    place, row = places(inner), np.repeat(np.arange(len(items), dtype=np.uint64), inner)
    assert len(items) <= 1 << 64 - ROW_SHIFT, "too many chunks at a time"
    drawn = place_bits(bits, inner) >> np.uint64(64 - DRAWN_BITS)
    order = np.sort(row << np.uint64(ROW_SHIFT) | drawn << np.uint64(PLACE_BITS) | place.astype(np.uint64))
    taken = order[place < np.repeat(counts - 1, inner)]
    cuts = np.sort(taken >> np.uint64(ROW_SHIFT) << np.uint64(PLACE_BITS) | taken & np.uint64(MAX_CHUNK_TOKENS))
    bounds = np.empty(counts.sum(), np.int64)  # where each segment ends
    is_last = _at_ends(counts)
    bounds[is_last] = items
    bounds[~is_last] = (cuts & np.uint64(MAX_CHUNK_TOKENS)).astype(np.int64) + 1
    begins = np.roll(bounds, 1)
    begins[np.cumsum(counts) - counts] = 0
    return bounds - begins


def corrupt(tokens, lengths, noise, bits, sentinels, eos_id):
    """(ids that are read, ids that are written) of chunks of these `lengths`, whose `tokens` lie end to end.

    `sentinels` are the ids that stand for the first, the second, … span of a chunk.
    """
    starts, parts = noise.draw(lengths, bits)
    marks = np.asarray(sentinels, np.int64)[places(noise.amounts(lengths)[1])]
    closed_tokens = noise.column_tokens(lengths)
    is_taken = taken_out(starts, parts, len(tokens))
    read, stays = tokens.copy(), ~is_taken
    read[starts], stays[starts] = marks, True
    written = np.empty(len(marks) + parts.sum(), np.int64)
    is_mark = np.zeros(len(written), bool)
    is_mark[np.cumsum(parts) - parts + np.arange(len(marks))] = True
    written[is_mark], written[~is_mark] = marks, tokens[is_taken]
    return _closed(read[stays], closed_tokens[:, 0], eos_id), _closed(written, closed_tokens[:, 1], eos_id)


def taken_out(starts, parts, num_tokens):
    """bool (num_tokens,): whether each token is in one of the spans."""
    edges = np.zeros(num_tokens + 1, np.int8)
    edges[starts] = 1
    edges[starts + parts] = -1  # no span begins there: a token that stays lies between two
    return np.cumsum(edges[:-1], dtype=np.int8).astype(bool)


def _closed(ids, lengths, eos_id):
    """The ids with EOS behind those of each row; `lengths` count it."""
    closed, is_last = np.full(lengths.sum(), eos_id, np.int64), _at_ends(lengths)
    closed[~is_last] = ids
    return closed


def _at_ends(lengths):
    """bool: whether each item of rows of these lengths is the last of its row."""
    is_last = np.zeros(lengths.sum(), bool)
    is_last[np.cumsum(lengths) - 1] = True
    return is_last
