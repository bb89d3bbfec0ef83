"""The dropout masks: what they depend on, how random they are, and what dropout does with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.nn.dropout import (
    LEVELS,
    Masks,
    add_dropout,
    dropout,
    is_kept,
    random_bits,
    relu_dropout,
    step_key,
    token_keys,
)

WIDTH = 256


def masks_of(ids, lengths, probability=0.1, column=0, site=0, seed=1, step=1):
    key = torch.tensor(step_key(seed, step), dtype=torch.int32)
    return Masks(probability, key, torch.from_numpy(token_keys(ids, lengths, column)), site)


def correlation(one, other):
    """Correlation of two masks, in standard deviations of that of independent ones."""
    both = torch.stack([one.flatten(), other.flatten()]).double()
    return abs(float(torch.corrcoef(both)[0, 1])) * one.numel() ** 0.5


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_share_is_that_of_the_probability(probability):
    kept = is_kept(masks_of(range(100), [40] * 100, probability), WIDTH).double()
    noise = (probability * (1 - probability)) ** 0.5
    assert abs(kept.mean() - (1 - probability)) < 5 * noise / kept.numel() ** 0.5
    for dim in (0, 1):  # of each column, of each token
        assert (kept.mean(dim) - (1 - probability)).abs().max() < 6 * noise / kept.shape[dim] ** 0.5


def test_the_random_bits_are_uniform():
    masks = masks_of(range(100), [40] * 100)
    bits = random_bits(masks.step_key, masks.token_keys, 3, WIDTH)
    assert 0 <= bits.min() and bits.max() < LEVELS
    counts = torch.bincount(bits.flatten() >> 8, minlength=256).double()
    chi_squared = ((counts - counts.mean()).square() / counts.mean()).sum()
    assert abs(chi_squared - 255) < 6 * (2 * 255) ** 0.5


def test_masks_of_another_step_seed_side_site_example_or_position_are_independent():
    lengths, given = [40] * 100, dict(probability=0.5)
    one = is_kept(masks_of(range(100), lengths, **given), WIDTH)
    for change in (dict(step=2), dict(seed=2), dict(column=1), dict(site=1), dict(site=2**16 - 1)):
        assert correlation(one, is_kept(masks_of(range(100), lengths, **given, **change), WIDTH)) < 5, change
    for first in (100, 2**31, 2**32, 2**40):
        assert correlation(one, is_kept(masks_of(range(first, first + 100), lengths, **given), WIDTH)) < 5, first
    by_example = one.view(100, 40, WIDTH)
    assert correlation(by_example[1:], by_example[:-1]) < 5
    assert correlation(by_example[:, 1:], by_example[:, :-1]) < 5


def test_the_columns_of_a_mask_are_independent():
    kept = is_kept(masks_of(range(100), [40] * 100, 0.5), WIDTH).double()
    between = torch.corrcoef(kept.T) - torch.eye(WIDTH)
    assert between.abs().max() < 6 * len(kept) ** -0.5
    for distance in (1, 2, 3, 4, 7, 8, 9, 16):
        assert correlation(kept[:, distance:], kept[:, :-distance]) < 5, distance


def test_a_token_has_the_same_mask_wherever_it_is_packed():
    ids, lengths = np.array([7, 3, 2**33 + 5, 9]), np.array([5, 300, 1, 17])
    whole = is_kept(masks_of(ids, lengths), WIDTH).split(lengths.tolist())
    for order in ([2, 0, 3, 1], [1], [3, 2]):
        parts = is_kept(masks_of(ids[order], lengths[order]), WIDTH).split(lengths[order].tolist())
        assert all(torch.equal(part, whole[number]) for part, number in zip(parts, order, strict=True))


def test_narrower_tensors_get_the_first_columns_of_the_mask():
    masks = masks_of([4, 5], [3, 60])
    assert torch.equal(is_kept(masks, 13), is_kept(masks, WIDTH)[:, :13])


def test_keys_tell_examples_positions_and_sides_apart():
    keys = [token_keys([2**32 + 3, 4], [2, 3], column) for column in (0, 1)]
    assert keys[0].dtype == np.int32
    assert keys[0].tolist() == [[0, 3, 1], [2, 3, 1], [0, 4, 0], [2, 4, 0], [4, 4, 0]]
    assert (keys[1] - keys[0]).tolist() == [[1, 0, 0]] * 5
    assert token_keys([2**31], [1], 0).view(np.uint32).tolist() == [[0, 2**31, 0]]


def test_step_keys_are_two_words_that_no_two_steps_or_seeds_share():
    keys = [tuple(step_key(seed, step)) for seed in (0, 1, 2**40) for step in range(1000)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= word < 2**31 for key in keys for word in key)


def test_what_is_kept_is_scaled_and_the_gradient_goes_the_same_way():
    masks = masks_of([1, 2], [30, 40], 0.25)
    x, grad = torch.randn(2, 70, WIDTH)
    x.requires_grad_()
    out = dropout(x, masks)
    expected = is_kept(masks, WIDTH) / 0.75
    torch.testing.assert_close(out, x * expected)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad * expected)


def test_a_residual_sum_drops_what_is_added_alone():
    masks = masks_of([1, 2], [30, 40])
    x, added, grad = torch.randn(3, 70, WIDTH)
    x.requires_grad_(), added.requires_grad_()
    out = add_dropout(x, added, masks)
    assert torch.equal(out, x + dropout(added, masks))
    out.backward(grad)
    assert torch.equal(x.grad, grad)
    assert torch.equal(added.grad, dropout(grad, masks))


def test_dropout_after_relu_has_the_gradient_of_the_two_one_after_the_other():
    masks, grad = masks_of([1, 2], [30, 40]), torch.randn(70, WIDTH)
    x = torch.randn(70, WIDTH)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    fused, composed = relu_dropout(one + 0, masks), dropout(F.relu(other), masks)
    assert torch.equal(fused, composed)
    fused.backward(grad)
    composed.backward(grad)
    assert torch.equal(one.grad, other.grad)


def test_not_a_number_is_not_dropped_silently():
    masks = masks_of([1], [8])
    x = torch.full((8, WIDTH), torch.nan)
    for function in (dropout, relu_dropout):
        assert function(x.clone(), masks).isnan().sum() == is_kept(masks, WIDTH).sum()


def test_probability_0_changes_no_bit_and_needs_no_keys():
    nothing, x, added = Masks(0.0), *torch.randn(2, 5, WIDTH)
    assert dropout(x, nothing) is x
    assert torch.equal(add_dropout(x, added, nothing), x + added)
    assert torch.equal(relu_dropout(x.clone(), nothing), F.relu(x))
    assert nothing.at(3) is nothing


def test_the_probability_is_rounded_to_the_nearest_level_but_never_to_all_or_nothing():
    levels = [Masks(probability).threshold for probability in (0.0, 1e-9, 0.1, 0.5, 1 - 1e-9)]
    assert levels == [0, 1, 6554, LEVELS // 2, LEVELS - 1]
    assert Masks(0.5).scale == 2.0


def test_backward_keeps_no_mask():
    masks, kept = replace(masks_of([1, 2], [30, 40]), site=2), []
    x, added = torch.randn(2, 70, WIDTH, requires_grad=True).unbind()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        dropout(x, masks)
        add_dropout(x, added, masks)
    assert not kept
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = relu_dropout(x + 0, masks)
    assert [t.data_ptr() for t in kept] == [out.data_ptr()]
