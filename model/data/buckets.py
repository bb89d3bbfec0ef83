"""Buckets: the padded sizes for which a step is recorded as a CUDA graph."""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

# Standard deviations from a side's mean tokens: few sizes, little padding. A batch that fits none runs unrecorded.
BUCKET_LEVELS = ((0.3, 2.5), (-0.6, 0.2, 1.0, 2.5))  # of prompts, of responses
BUCKET_FILL = 2 / 3  # least share of real tokens; the small last step of an epoch is not worth the padding
BUCKET_MULTIPLE = 64  # tokens


@dataclass(frozen=True)
class Bucket:
    """The size to which a micro-batch is padded for a recorded step."""

    prompt_tokens: int
    response_tokens: int
    pairs: int

    @property
    def tokens(self):
        """Prompt and response tokens together."""
        return self.prompt_tokens + self.response_tokens

    def holds(self, lengths):
        """True if pairs of these `lengths` (pairs, 2), in tokens, fit and fill at least BUCKET_FILL of it."""
        prompts, responses = lengths.sum(axis=0, dtype=np.int64)
        fits = prompts <= self.prompt_tokens and responses <= self.response_tokens and len(lengths) <= self.pairs
        return fits and prompts + responses >= BUCKET_FILL * self.tokens


def buckets_for(lengths, pairs, counts=None):
    """Buckets, smallest first, for micro-batches of `pairs` pairs drawn from `lengths`; nearly every one fits in one.

    `lengths` (examples, 2) in tokens; or the distinct lengths (kinds, 2), with the number of examples of each in
    `counts`.
    """
    mean = np.average(lengths, axis=0, weights=counts)
    means, spreads = pairs * mean, np.sqrt(pairs * np.average((lengths - mean) ** 2, axis=0, weights=counts))
    prompts, responses = (
        {_round_up(mean + level * spread) for level in levels if mean > -level * spread}
        for mean, spread, levels in zip(means, spreads, BUCKET_LEVELS, strict=True)
    )
    buckets = (Bucket(*tokens, pairs) for tokens in product(prompts, responses))
    return sorted(buckets, key=lambda bucket: bucket.tokens)


def _round_up(tokens):
    return math.ceil(tokens / BUCKET_MULTIPLE) * BUCKET_MULTIPLE
