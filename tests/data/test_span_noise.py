"""Span corruption agrees with the published collators, and its masks are drawn as theirs are."""

from collections import Counter

import numpy as np
import pytest

from model.data.row_draws import row_bits
from model.data.span_noise import Noise, corrupt, taken_out

USUAL, VOCABULARY, EOS = Noise(0.15, 3.0), 32_100, 1


def peers_lengths(inputs_length, density, mean):
    """transformers' (and nanoT5's) compute_input_and_target_lengths: (tokens of a chunk, of a target)."""

    def of(tokens):
        noise = int(round(tokens * density))
        spans = int(round(noise / mean))
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length
    while of(tokens + 1)[0] <= inputs_length:
        tokens += 1
    return tokens, of(tokens)[1]


def peers_side(ids, mask):
    """FlaxDataCollatorForT5MLM's create_sentinel_ids and filter_input_ids of a batch, as one row each."""
    starts = mask - np.roll(mask, 1, axis=-1) * mask
    starts[:, 0] = mask[:, 0]
    sentinels = np.where(starts != 0, np.cumsum(starts, axis=-1), starts)
    sentinels = np.where(sentinels != 0, VOCABULARY - sentinels, 0)
    sentinels -= mask - starts
    full = np.where(sentinels != 0, sentinels, ids)
    kept = full[full >= 0].reshape((ids.shape[0], -1))
    return np.concatenate([kept, np.full((ids.shape[0], 1), EOS, np.int32)], axis=-1)


@pytest.mark.parametrize(
    "length, noise", [(568, USUAL), (40, USUAL), (2, USUAL), (64, Noise(0.5, 3)), (30, Noise(0.3, 1))]
)
def test_ids_are_those_of_the_published_collator_on_the_same_masks(length, noise):
    count = 20
    ids = np.random.default_rng(0).integers(100, 30_000, (count, length))
    lengths, bits = np.full(count, length), row_bits("spans", np.arange(count))
    mask = taken_out(*noise.draw(lengths, bits), ids.size).reshape(ids.shape).astype(np.int8)
    sentinels = range(VOCABULARY - 1, VOCABULARY - 401, -1)  # T5's count down from the end
    read, written = corrupt(ids.ravel(), lengths, noise, bits, sentinels, EOS)
    np.testing.assert_array_equal(read.reshape(count, -1), peers_side(ids, mask))
    np.testing.assert_array_equal(written.reshape(count, -1), peers_side(ids, 1 - mask))
    sides = noise.column_tokens(lengths)
    assert (sides == [len(read) / count, len(written) / count]).all()


@pytest.mark.parametrize("max_tokens", [32, 114, 256, 512, 1024])
def test_a_chunk_is_as_long_as_the_published_function_says(max_tokens):
    tokens, target = peers_lengths(max_tokens, 0.15, 3.0)
    assert USUAL.chunk_tokens(max_tokens) == tokens
    assert USUAL.column_tokens([tokens]).tolist() == [[max_tokens, target]]


def test_neither_side_is_longer_than_asked_whatever_the_noise():
    for noise in (Noise(0.5, 3), Noise(0.8, 2), Noise(0.05, 10), Noise(0.95, 1)):
        assert 0 <= 100 - noise.column_tokens([noise.chunk_tokens(100)]).max() <= 2
    for wrong in ((0, 3), (1, 3), (0.15, 0.5)):
        with pytest.raises(ValueError, match="--span_"):
            Noise(*wrong)


def test_each_arrangement_of_the_spans_is_as_likely_as_another():
    rows, noise = 40_000, Noise(0.4, 2)
    starts, parts = noise.draw(np.full(rows, 10), row_bits("draws", np.arange(rows)))  # 2 spans of 4 among 10 tokens
    assert (parts > 0).all() and (np.add.reduceat(parts, np.arange(0, 2 * rows, 2)) == 4).all()
    seen = Counter(taken_out(starts, parts, 10 * rows).reshape(rows, 10).dot(1 << np.arange(10)).tolist())
    assert len(seen) == 3 * 5, "3 ways to cut what is taken, 5 to cut what stays"
    assert max(abs(count - rows / 15) for count in seen.values()) < 5 * np.sqrt(rows / 15)


def test_the_mask_of_a_chunk_depends_on_nothing_beside_it():
    lengths, numbers = np.array([50, 7, 200, 33]), np.array([11, 5, 900, 2])
    every = taken_out(*USUAL.draw(lengths, row_bits("1/1", numbers)), lengths.sum())
    for place, whole in enumerate(np.split(every, np.cumsum(lengths)[:-1])):
        alone = USUAL.draw(lengths[[place]], row_bits("1/1", numbers[[place]]))
        assert (taken_out(*alone, lengths[place]) == whole).all()
    other = taken_out(*USUAL.draw(lengths, row_bits("1/2", numbers)), lengths.sum())
    assert (other != every).any()
