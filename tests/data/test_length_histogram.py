import numpy as np
import pytest

from model.data.length_histogram import histogram


@pytest.mark.parametrize("num_columns", [1, 2, 3])
def test_a_histogram_counted_in_parts_is_the_one_counted_at_once(monkeypatch, num_columns):
    draw = np.random.default_rng(0).integers(1, 9, (1000, num_columns)).astype("uint16")
    draw[0] = 65_535
    whole = histogram(draw)
    monkeypatch.setattr("model.data.length_histogram.CHUNK_EXAMPLES", 7)
    parts = histogram(draw)
    assert np.array_equal(parts.tokens, whole.tokens) and np.array_equal(parts.counts, whole.counts)
    kinds, counts = np.unique(draw, axis=0, return_counts=True)
    assert np.array_equal(whole.tokens, kinds) and np.array_equal(whole.counts, counts)
    assert whole.longest == num_columns * 65_535
