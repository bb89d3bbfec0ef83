import math

import pytest

from model.commands.run_length import check_warmup, warmup_pairs
from model.train.lr_schedule import LearnRate
from tests.parts import make_config


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_rate_warms_up_to_the_peak_and_ends_at_zero(schedule):
    rate = LearnRate(0.01, schedule, 100, 1000).at
    assert [rate(pairs) for pairs in (0, 25, 50, 100)] == pytest.approx([0, 0.0025, 0.005, 0.01])
    assert max(rate(pairs) for pairs in range(1001)) == pytest.approx(0.01)
    assert rate(1000) == pytest.approx(0, abs=1e-12)
    assert rate(1500) == pytest.approx(0, abs=1e-12)
    after_peak = [rate(pairs) for pairs in range(100, 1001)]
    assert after_peak == sorted(after_peak, reverse=True)


def test_cosine_and_wsd_fall_as_their_formulas_say():
    cosine, wsd = (LearnRate(0.01, name, 100, 1000) for name in ("cosine", "wsd"))
    assert cosine.at(550) == pytest.approx(0.005)
    assert cosine.at(325) == pytest.approx(0.01 * (1 + math.cos(math.pi / 4)) / 2)
    assert [wsd.at(pairs) for pairs in (500, 799, 900, 950)] == pytest.approx([0.01, 0.01, 0.005, 0.0025])
    assert LearnRate(0.01, "cosine", 0, 1000).at(0) == 0.01


def test_the_default_warm_up_is_a_tenth_of_the_run_and_at_most_1000_steps():
    default, given, none = (make_config(warmup_steps=steps) for steps in (-1, 5, 0))
    assert [warmup_pairs(default, pairs, 64) for pairs in (12_000, 640_000, 10**9)] == [1200, 64_000, 64_000]
    assert (warmup_pairs(given, 12_000, 64), warmup_pairs(none, 12_000, 64)) == (320, 0)


def test_a_warm_up_longer_than_the_run_is_refused_if_it_was_typed():
    config = make_config(learn_rate=0.02)
    check_warmup(config, {"warmup_steps"}, 1000, 5000)
    check_warmup(config, {"epochs"}, 1000, 250)
    with pytest.raises(ValueError, match="warm-up of 1000 steps .* the run of 250: .* only 0.005 of 0.02; .*=25$"):
        check_warmup(config, {"warmup_steps"}, 1000, 250)
    with pytest.raises(ValueError, match="the warm-up of 1 steps .* the run of 1: .*--warmup_steps=0$"):
        check_warmup(config, {"warmup_steps"}, 1, 3 / 64)  # a run of fewer pairs than a step takes one
