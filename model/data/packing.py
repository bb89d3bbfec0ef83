"""Cuts the examples of a step into micro-batches with a limited number of tokens."""

import math

import numpy as np

MAX_FIRST_FIT_WORK = 2**20  # examples times micro-batches; up to this first fit takes milliseconds


def cut(ids, lengths, micro_batch_tokens):
    """Cut `ids` into micro-batches of at most `micro_batch_tokens` tokens, all columns together.

    `lengths` (len(ids), columns) in tokens. Examples of similar lengths stay together, unless first fit needs fewer
    micro-batches. An example longer than the limit is a micro-batch of its own: the plan has reserved memory for it.
    """
    order = np.lexsort((ids, *lengths.T))
    tokens = lengths[order].sum(axis=1, dtype=np.int64)
    parts = _cut_in_order(tokens, micro_batch_tokens)
    if len(parts) > math.ceil(tokens.sum() / micro_batch_tokens) and len(parts) * len(tokens) <= MAX_FIRST_FIT_WORK:
        parts = _first_fit(tokens, micro_batch_tokens, len(parts) - 1) or parts
    return [ids[order[part]] for part in parts]


def _cut_in_order(tokens, limit):
    """Indices of `tokens` in consecutive parts, each filled up to `limit`."""
    ends, parts, start = np.cumsum(tokens), [], 0
    while start < len(tokens):
        tokens_before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, tokens_before + limit, side="right")), start + 1)
        parts.append(np.arange(start, end))
        start = end
    return parts


def _first_fit(tokens, limit, max_parts):
    """Indices of `tokens` in parts of at most `limit`, or None if that takes more than `max_parts`.

    First fit decreasing: the largest first, each into the first part with enough space (Johnson 1974, "Fast algorithms
    for bin packing").
    """
    free, part_of, taken = np.full(max_parts, limit), np.empty(len(tokens), np.int64), np.minimum(tokens, limit)
    for index in np.argsort(-taken, kind="stable"):
        with_space = np.flatnonzero(free >= taken[index])
        if not len(with_space):
            return None
        part_of[index] = with_space[0]
        free[with_space[0]] -= taken[index]
    return [np.flatnonzero(part_of == part) for part in range(part_of.max() + 1)]
