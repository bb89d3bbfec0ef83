"""Which examples form a step, and how the ranks divide them."""

import tracemalloc

import numpy as np
import pytest

from model.data.sampler import mixture_of, permute, shares_of, step_at
from tests.parts import random_lengths


@pytest.mark.parametrize("num_items", [1, 2, 3, 4, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 4097, 65_537])
def test_permute_gives_each_item_exactly_once(num_items):
    items = permute(np.arange(num_items), num_items, "key")
    assert np.array_equal(np.sort(items), np.arange(num_items))


def test_permute_depends_on_the_key_and_on_nothing_else():
    positions = np.arange(1000)
    one = permute(positions, 1000, "1/0")
    assert np.array_equal(one, permute(positions, 1000, "1/0"))
    assert np.array_equal(one[300:320], permute(positions[300:320], 1000, "1/0"))
    for other in ("1/1", "2/0", "10"):
        assert (permute(positions, 1000, other) == one).mean() < 0.02


def test_a_permutation_is_uncorrelated_with_positions_neighbours_and_other_epochs():
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


def test_every_order_of_a_few_items_is_equally_likely():
    counts = {}
    for epoch in range(2400):
        order = tuple(permute(np.arange(4), 4, f"7/{epoch}"))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert 50 < min(counts.values()) and max(counts.values()) < 160


def test_permute_needs_little_memory_at_any_position_of_a_huge_epoch():
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


def test_the_last_step_of_an_epoch_may_be_smaller_and_the_next_epoch_starts_with_a_full_step():
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
    shares = shares_of(ids, lengths, world_size)
    assert np.array_equal(np.sort(np.concatenate(shares)), np.sort(ids))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    if num_examples >= 192:
        lengths_of = dict(zip(ids.tolist(), lengths.astype(int), strict=True))
        tokens = np.array([sum(lengths_of[i] for i in share.tolist()) for share in shares])
        assert (tokens.max(axis=0) / tokens.min(axis=0) < 1.05).all(), "ranks with unequal columns wait for each other"


def test_shares_do_not_depend_on_the_order_of_the_ids():
    lengths, ids = random_lengths(50), np.arange(50)
    assert list(map(set, shares_of(ids[::-1], lengths[::-1], 3))) == list(map(set, shares_of(ids, lengths, 3)))


def test_an_epoch_takes_each_file_by_its_weight_and_no_row_twice_before_all_once():
    """Weights 1, 2 and 0.5: two epochs take each row twice, four times and once."""
    rows, mixture = (10, 7, 6), mixture_of([10, 7, 6], [1, 2, 0.5])
    assert (mixture.taken, mixture.epoch_pairs) == ((10, 14, 3), 27)
    assert mixture_of([257, 7], [0.5, 1.25]).weight_of(0) == 0.5, "said as it was typed, though 128 rows are 0.498"
    epochs = []
    for epoch in range(2):
        steps = [step_at(27 * epoch + seen, 27, 4, 5, mixture) for seen in range(0, 27, 4)]
        assert {step.epoch for step in steps} == {epoch + 1}
        epochs.append(np.bincount(np.concatenate([step.ids for step in steps]), minlength=sum(rows)))
    assert epochs[0][:17].tolist() == epochs[1][:17].tolist() == [1] * 10 + [2] * 7
    assert (epochs[0][17:] + epochs[1][17:]).tolist() == [1] * 6 and epochs[0][17:].sum() == 3


def test_a_step_of_a_mixture_depends_on_seed_and_position_alone():
    mixture = mixture_of([100, 30], [1.5, 0.1])
    whole = step_at(0, mixture.epoch_pairs, mixture.epoch_pairs, 3, mixture).ids
    parts = [step_at(seen, mixture.epoch_pairs, 9, 3, mixture).ids for seen in range(0, mixture.epoch_pairs, 9)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(step_at(0, mixture.epoch_pairs, mixture.epoch_pairs, 4, mixture).ids, whole)


def test_without_weights_an_epoch_of_several_files_is_one_permutation_of_all_rows():
    assert mixture_of([10, 7], [1, 1]) is None
    assert mixture_of([10, 7], [1, 2]).identity != mixture_of([7, 10], [2, 1]).identity
