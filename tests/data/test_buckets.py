import numpy as np
import pytest

from model.data.buckets import Bucket, buckets_for


def test_few_buckets_hold_nearly_every_micro_batch_with_little_padding():
    draw = np.random.default_rng(0)
    lengths = np.stack([draw.gamma(1.2, 20, 50_000), draw.gamma(1.6, 68, 50_000)], axis=1).clip(1, 256).astype("uint16")
    for pairs, least_fill in ((64, 0.90), (256, 0.95), (512, 0.965)):
        buckets = buckets_for(lengths, pairs)
        assert 1 <= len(buckets) <= 9
        real = computed = missed = 0
        for _ in range(400):
            drawn = lengths[draw.integers(len(lengths), size=pairs)].astype(int)
            bucket = next((bucket for bucket in buckets if bucket.holds(drawn)), None)
            missed += bucket is None
            real += drawn.sum()
            computed += bucket.tokens if bucket else drawn.sum()
        assert missed < 3
        assert real / computed > least_fill


def test_pairs_of_one_length_need_one_bucket():
    assert buckets_for(np.full((100, 2), 32, dtype="uint16"), 10) == [Bucket((320, 320), 10)]
    assert buckets_for(np.full((100, 1), 32, dtype="uint16"), 10) == [Bucket((320,), 10)]


@pytest.mark.parametrize("num_columns", [1, 2])
def test_a_bucket_holds_what_fits_every_column_and_leaves_little_padding(num_columns):
    bucket = Bucket((32_000,) * num_columns, 1000)
    assert bucket.tokens == 32_000 * num_columns
    held = {n: bucket.holds(np.full((n, num_columns), 32, dtype="uint16")) for n in (666, 667, 1000)}
    assert held == {666: False, 667: True, 1000: True}
    assert not bucket.holds(np.full((1001, num_columns), 31, dtype="uint16")), "more examples, within the tokens"
    too_long = np.full((1000, num_columns), 32, dtype="uint16")
    too_long[0, -1] = 33
    assert not bucket.holds(too_long)
    small = Bucket((2000,), 10)
    assert small.holds(np.ones((1, 1))) and not small.holds(np.ones((0, 1))), "2,048 tokens of padding cost little"


def test_nearly_every_step_of_a_few_pairs_is_held():
    draw = np.random.default_rng(0)
    lengths = draw.exponential(40, (20_000, 2)).clip(2, 256).astype(int)
    for pairs, least in ((1, 0.9), (2, 0.95), (4, 0.98), (16, 0.99)):
        buckets = buckets_for(lengths, pairs)
        steps = [lengths[draw.integers(len(lengths), size=pairs)] for _ in range(400)]
        assert np.mean([any(bucket.holds(step) for bucket in buckets) for step in steps]) > least


def test_the_sides_of_a_stream_share_the_room_of_its_buckets():
    draw = np.random.default_rng(0)
    lengths = draw.exponential(150, (20_000, 2)).clip(16, 512).astype("uint16")
    buckets, fills = buckets_for(lengths, 8, is_stream=True), []
    for _ in range(400):
        drawn = lengths[draw.integers(len(lengths), size=8)].astype(int)
        held = next((bucket for bucket in buckets if bucket.holds(drawn)), None)
        fills.append(drawn.sum() / held.tokens if held else 0)
    assert len(buckets) <= 8 and np.count_nonzero(fills) > 380 and np.mean([fill for fill in fills if fill]) > 0.92
    bucket = Bucket((100, 200), 2, is_stream=True)
    assert bucket.holds(np.array([[150, 50], [0, 100]])), "the first column takes what the last leaves"
    assert not bucket.holds(np.array([[0, 150], [0, 60]])), "the last column has places of its own"
    assert not bucket.holds(np.array([[151, 50], [0, 100]]))
