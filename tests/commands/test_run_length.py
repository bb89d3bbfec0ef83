"""How many pairs and steps a run has."""

from dataclasses import replace

import pytest

from model.commands.option_values import load_config
from model.commands.run_length import run_pairs, steps_between, warmup_pairs
from model.data.sampler import step_at


@pytest.mark.parametrize("batch", [1, 8, 44, 50])
@pytest.mark.parametrize("max_steps", [1, 5, 6, 7, 13])
def test_max_steps_counts_the_steps_that_are_taken(batch, max_steps):
    total = run_pairs(replace(load_config("pretrain", {}), max_steps=max_steps), 44, batch)
    seen = steps = 0
    while seen < total:
        assert steps_between(seen, total, 44, batch) == max_steps - steps
        seen += len(step_at(seen, 44, min(batch, total - seen), 1).ids)
        steps += 1
    assert (steps, seen) == (max_steps, total)


def test_another_batch_sees_the_same_pairs_in_other_steps():
    total = run_pairs(load_config("pretrain", dict(max_steps=7)), 44, 8)
    assert total == 44 + 8
    assert steps_between(16, total, 44, 16) == 2 + 1


def test_without_max_steps_a_run_is_its_epochs_long():
    assert run_pairs(load_config("pretrain", dict(epochs=3)), 44, 8) == 132
    assert steps_between(0, 132, 44, 8) == 18


def test_the_warm_up_can_be_a_share_of_the_run():
    assert [warmup_pairs(load_config("pretrain", dict(warmup_ratio=share)), 1000, 8) for share in (0, 0.06)] == [0, 60]
