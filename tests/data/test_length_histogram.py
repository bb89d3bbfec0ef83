import numpy as np

from model.data.length_histogram import histogram


def test_a_histogram_counted_in_parts_is_the_one_counted_at_once(monkeypatch):
    draw = np.random.default_rng(0).integers(1, 9, (1000, 2)).astype("uint16")
    whole = histogram(draw)
    monkeypatch.setattr("model.data.length_histogram.CHUNK_EXAMPLES", 7)
    parts = histogram(draw)
    assert np.array_equal(parts.tokens, whole.tokens) and np.array_equal(parts.counts, whole.counts)
    assert whole.counts.sum() == 1000 and whole.longest == draw.sum(axis=1).max()
