"""How a step's examples are cut into micro-batches of at most so many tokens."""

import math

import numpy as np

MOST_TRIED = 2**20  # examples times micro-batches, between which a better cut is looked for: milliseconds


def cut(ids, lengths, micro_batch_tokens):
    """`ids` cut into as few micro-batches as fit `micro_batch_tokens` tokens of both sides, as far as first fit finds.

    Each of like lengths, unless that takes more. One example alone may exceed the limit: planning has seen to it that
    it fits.
    """
    order = np.lexsort((ids, lengths[:, 0], lengths[:, 1]))
    tokens = lengths[order].sum(axis=1, dtype=np.int64)
    parts = _cut_in_order(tokens, micro_batch_tokens)
    if len(parts) > math.ceil(tokens.sum() / micro_batch_tokens) and len(parts) * len(tokens) <= MOST_TRIED:
        parts = _first_fit(tokens, micro_batch_tokens, len(parts) - 1) or parts
    return [ids[order[part]] for part in parts]


def _cut_in_order(tokens, limit):
    """Places of `tokens` in parts of neighbours, each filled up to `limit`."""
    ends, parts, start = np.cumsum(tokens), [], 0
    while start < len(tokens):
        tokens_before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, tokens_before + limit, side="right")), start + 1)
        parts.append(np.arange(start, end))
        start = end
    return parts


def _first_fit(tokens, limit, most_parts):
    """As `_cut_in_order`: the largest first, each into the first part that has room (Johnson 1974, "Fast algorithms
    for bin packing"). None where more than `most_parts` would be needed.
    """
    free, part_of, taken = np.full(most_parts, limit), np.empty(len(tokens), np.int64), np.minimum(tokens, limit)
    for place in np.argsort(-taken, kind="stable"):
        with_space = np.flatnonzero(free >= taken[place])
        if not len(with_space):
            return None
        part_of[place] = with_space[0]
        free[with_space[0]] -= taken[place]
    return [np.flatnonzero(part_of == part) for part in range(part_of.max() + 1)]
