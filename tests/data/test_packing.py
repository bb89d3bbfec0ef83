"""How the examples of a step are cut into micro-batches."""

import math
from itertools import pairwise

import numpy as np
import pytest

from model.data.packing import cut
from tests.parts import random_lengths


def count_parts_in_order(lengths, limit):
    """Number of contiguous parts of the examples, sorted as in `cut`, with each part filled up to `limit`."""
    parts, filled = 1, 0
    for tokens in lengths[np.lexsort((lengths[:, 0], lengths[:, 1]))].sum(axis=1):
        if filled and filled + tokens > limit:
            parts, filled = parts + 1, 0
        filled += tokens
    return parts


@pytest.mark.parametrize("limit", [512, 600, 1000, 2048, 8192, 10**6])
@pytest.mark.parametrize("num_examples", [1, 2, 5, 33, 200])
def test_cut_keeps_each_example_once_and_needs_no_more_parts_than_filling_in_order(num_examples, limit):
    for seed in range(5):
        lengths = random_lengths(num_examples, seed)
        parts = cut(np.arange(num_examples) + 7, lengths, limit)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples) + 7)
        assert all(lengths[part - 7].sum() <= limit for part in parts)
        assert math.ceil(lengths.sum() / limit) <= len(parts) <= count_parts_in_order(lengths, limit)


def test_examples_that_fill_the_limit_only_out_of_order_are_put_together():
    lengths = np.array([[50, 200], [50, 200], [50, 450], [50, 450]])
    parts = cut(np.arange(4), lengths, 750)
    assert [lengths[part].sum() for part in parts] == [750, 750]


@pytest.mark.parametrize("limit", [300, 500, 900])
def test_cut_finds_the_smallest_number_of_parts_or_rarely_one_more(limit):
    more = 0
    for seed in range(60):
        lengths = random_lengths(9, seed).astype(np.int64) % 120 + 1
        parts, fewest = cut(np.arange(9), lengths, limit), minimum_parts(tuple(lengths.sum(axis=1)), limit)
        assert fewest <= len(parts) <= fewest + 1
        more += len(parts) - fewest
    assert more <= 4  # of 60


def minimum_parts(sizes, limit):
    """The smallest possible number of parts of at most `limit`, by dynamic programming over all sets of examples."""
    fewest = {0: (0, limit)}  # (parts, tokens in the last one)
    for chosen in range(1, 2 ** len(sizes)):
        ways = []
        for i, size in enumerate(sizes):
            if chosen >> i & 1:
                parts, filled = fewest[chosen ^ 1 << i]
                ways.append((parts, filled + size) if filled + size <= limit else (parts + 1, size))
        fewest[chosen] = min(ways)
    return fewest[2 ** len(sizes) - 1][0]


def test_an_example_above_the_limit_is_alone_and_the_others_stay_together():
    lengths = np.array([[5, 5]] * 20 + [[200, 200]])
    parts = cut(np.arange(21), lengths, 100)
    assert sorted(map(len, parts)) == [1, 10, 10]
    assert [20] in [part.tolist() for part in parts]
    assert [len(part) for part in cut(np.arange(3), np.full((3, 2), 50), 10)] == [1, 1, 1]


def test_cutting_no_examples_gives_no_parts():
    assert cut(np.array([], dtype=np.int64), np.empty((0, 2), dtype=np.uint16), 100) == []


def test_cut_does_not_overflow_lengths_of_uint16():
    lengths = np.full((10, 2), 40_000, dtype=np.uint16)
    assert len(cut(np.arange(10), lengths, 800_000)) == 1
    assert len(cut(np.arange(10), lengths, 80_000)) == 10


def test_each_part_has_examples_of_similar_lengths():
    lengths = random_lengths(400)
    parts = cut(np.arange(400), lengths, 4000)
    assert len(parts) == count_parts_in_order(lengths, 4000)
    for shorter, longer in pairwise(parts):
        assert lengths[shorter, 1].max() <= lengths[longer, 1].min()
