import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch

from model.data.packing import cut
from model.data.sampler import permute, share_of, step_at
from model.nn.t5.batch import collate
from tests.parts import examples_of


def random_lengths(num_examples, seed=0, longest=256):
    """Lengths like those of text: many short sides, few long ones."""
    draws = np.random.default_rng(seed).lognormal(3.5, 0.8, (num_examples, 2))
    return np.clip(draws, 2, longest).astype(np.int64)


@pytest.mark.parametrize("num_items", [1, 2, 3, 4, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 4097, 65_537])
def test_permute_sends_every_position_to_another_item(num_items):
    items = permute(np.arange(num_items), num_items, "key")
    assert np.array_equal(np.sort(items), np.arange(num_items))


def test_permute_depends_on_the_key_and_on_nothing_else():
    positions = np.arange(1000)
    one = permute(positions, 1000, "1/0")
    assert np.array_equal(one, permute(positions, 1000, "1/0"))
    assert np.array_equal(one[300:320], permute(positions[300:320], 1000, "1/0"))
    for other in ("1/1", "2/0", "10"):
        assert (permute(positions, 1000, other) == one).mean() < 0.02


def test_permute_leaves_no_trace_of_the_order_before():
    num_items = 20_000
    positions = np.arange(num_items)
    one, other = permute(positions, num_items, "a/0"), permute(positions, num_items, "a/1")
    bound = 4 / num_items**0.5
    assert abs(np.corrcoef(positions, one)[0, 1]) < bound
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < bound
    assert abs(np.corrcoef(one, other)[0, 1]) < bound
    gaps = np.abs(np.diff(one))
    assert abs(gaps.mean() / (num_items / 3) - 1) < 0.03
    assert (gaps == 1).mean() < 1e-3


def test_every_order_of_a_few_items_is_as_likely():
    counts = {}
    for epoch in range(2400):
        order = tuple(permute(np.arange(4), 4, f"7/{epoch}"))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert 50 < min(counts.values()) and max(counts.values()) < 160


def test_any_position_of_a_huge_epoch_costs_the_same():
    num_items = 10**12
    tracemalloc.start()
    far = permute(np.arange(num_items - 64, num_items), num_items, "key")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(far.tolist())) == 64
    assert 0 <= far.min() and far.max() < num_items
    assert peak < 1e6


@pytest.mark.parametrize("global_batch", [1, 7, 10, 50, 99, 100, 1000])
def test_an_epoch_is_covered_exactly_once_whatever_the_batch(global_batch):
    num_pairs, epochs, seen, steps = 100, 2, 0, []
    while seen < epochs * num_pairs:
        steps.append(step_at(seen, num_pairs, global_batch, seed=3))
        seen += len(steps[-1].ids)
    assert seen == epochs * num_pairs
    orders = [np.concatenate([step.ids for step in steps if step.epoch == epoch]) for epoch in (1, 2)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(num_pairs))
    assert not np.array_equal(*orders)


def test_the_last_step_of_an_epoch_may_be_smaller_and_the_next_epoch_begins_whole():
    sizes = [len(step_at(seen, 100, 32, seed=0).ids) for seen in (0, 32, 64, 96, 100)]
    assert sizes == [32, 32, 32, 4, 32]


def test_the_order_of_an_epoch_does_not_depend_on_the_batch():
    whole = step_at(0, 100, 100, seed=0).ids
    assert np.array_equal(np.concatenate([step_at(seen, 100, 20, seed=0).ids for seen in range(0, 100, 20)]), whole)
    assert not np.array_equal(step_at(0, 100, 100, seed=1).ids, whole)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_examples", [1, 3, 64, 192, 1001])
def test_shares_are_disjoint_complete_and_balanced(num_examples, world_size):
    lengths = random_lengths(num_examples)
    ids = permute(np.arange(num_examples), num_examples, "ids") + 5000
    shares = [share_of(ids, lengths, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.sort(np.concatenate(shares)), np.sort(ids))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    if num_examples >= 192:
        length_of = dict(zip(ids.tolist(), lengths.sum(axis=1).tolist(), strict=True))
        tokens = [sum(length_of[i] for i in share.tolist()) for share in shares]
        assert max(tokens) / min(tokens) < 1.04


def test_shares_do_not_depend_on_the_order_in_which_ids_come():
    lengths, ids = random_lengths(50), np.arange(50)
    turned = share_of(ids[::-1], lengths[::-1], 1, 3)
    assert np.array_equal(np.sort(turned), np.sort(share_of(ids, lengths, 1, 3)))


def fewest_parts(lengths, limit):
    """The fewest contiguous parts of examples in the order of cut: each filled as far as it goes."""
    parts, filled = 1, 0
    for tokens in lengths[np.lexsort((lengths[:, 0], lengths[:, 1]))].sum(axis=1):
        if filled and filled + tokens > limit:
            parts, filled = parts + 1, 0
        filled += tokens
    return parts


@pytest.mark.parametrize("limit", [512, 600, 1000, 2048, 8192, 10**6])
@pytest.mark.parametrize("num_examples", [1, 2, 5, 33, 200])
def test_cut_keeps_every_example_within_the_limit_in_no_more_parts_than_in_order(num_examples, limit):
    for seed in range(5):
        lengths = random_lengths(num_examples, seed)
        parts = cut(np.arange(num_examples) + 7, lengths, limit)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples) + 7)
        assert all(lengths[part - 7].sum() <= limit for part in parts)
        assert math.ceil(lengths.sum() / limit) <= len(parts) <= fewest_parts(lengths, limit)


def test_examples_that_fill_forwards_only_out_of_order_are_put_together():
    lengths = np.array([[50, 200], [50, 200], [50, 450], [50, 450]])
    parts = cut(np.arange(4), lengths, 750)
    assert [lengths[part].sum() for part in parts] == [750, 750]


@pytest.mark.parametrize("limit", [300, 500, 900])
def test_a_step_takes_hardly_ever_more_forwards_than_the_fewest_there_are(limit):
    more = 0
    for seed in range(60):
        lengths = random_lengths(9, seed).astype(np.int64) % 120 + 1
        parts, fewest = cut(np.arange(9), lengths, limit), optimum(tuple(lengths.sum(axis=1)), limit)
        assert fewest <= len(parts) <= fewest + 1
        more += len(parts) - fewest
    assert more <= 4  # of 60


def optimum(sizes, limit):
    """The fewest parts of at most `limit`, by trying all: fewest[set] over every set of examples."""
    fewest = {0: (0, limit)}  # (parts, filled in the last)
    for chosen in range(1, 2 ** len(sizes)):
        ways = []
        for i, size in enumerate(sizes):
            if chosen >> i & 1:
                parts, filled = fewest[chosen ^ 1 << i]
                ways.append((parts, filled + size) if filled + size <= limit else (parts + 1, size))
        fewest[chosen] = min(ways)
    return fewest[2 ** len(sizes) - 1][0]


def test_an_example_above_the_limit_stands_alone_and_the_others_stay_together():
    lengths = np.array([[5, 5]] * 20 + [[200, 200]])
    parts = cut(np.arange(21), lengths, 100)
    assert sorted(map(len, parts)) == [1, 10, 10]
    assert [20] in [part.tolist() for part in parts]
    assert [len(part) for part in cut(np.arange(3), np.full((3, 2), 50), 10)] == [1, 1, 1]


def test_cut_of_nothing_is_nothing():
    assert cut(np.array([], dtype=np.int64), np.empty((0, 2), dtype=np.uint16), 100) == []


def test_cut_does_not_overflow_the_small_integers_that_lengths_are_stored_in():
    lengths = np.full((10, 2), 40_000, dtype=np.uint16)
    assert len(cut(np.arange(10), lengths, 800_000)) == 1
    assert len(cut(np.arange(10), lengths, 80_000)) == 10


def test_parts_hold_examples_of_like_lengths():
    lengths = random_lengths(400)
    parts = cut(np.arange(400), lengths, 4000)
    assert len(parts) == fewest_parts(lengths, 4000)
    for shorter, longer in pairwise(parts):
        assert lengths[shorter, 1].max() <= lengths[longer, 1].min()


def test_collate_shifts_labels_right_within_each_example(store, tokenizer):
    ids = [9, 2, 33, 9]
    micro_batch = collate(store, ids, tokenizer.pad_id, "cpu")
    examples = examples_of(store, ids)
    assert micro_batch.prompt_ids.tolist() == [token for prompt, _ in examples for token in prompt]
    assert micro_batch.labels.tolist() == [token for _, response in examples for token in response]
    shifted = [[tokenizer.pad_id, *response[:-1]] for _, response in examples]
    assert micro_batch.decoder_ids.tolist() == [token for response in shifted for token in response]


def test_no_pad_token_is_computed(store, tokenizer):
    ids = np.arange(len(store))
    for part in cut(ids, store.lengths, 500):
        micro_batch = collate(store, part, tokenizer.pad_id, "cpu")
        sides = (micro_batch.prompt_ids, micro_batch.labels)
        assert sum(map(len, sides)) == store.lengths[part].sum()
        assert all((side != tokenizer.pad_id).all() for side in sides)
        assert (micro_batch.decoder_ids == tokenizer.pad_id).sum() == len(part)
        assert all(side.dtype == torch.int64 for side in sides)
