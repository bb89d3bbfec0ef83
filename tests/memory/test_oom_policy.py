from dataclasses import asdict, replace

import pytest

from model.memory.oom_policy import PlanRecovery, plans_to_try, recovery_of, shrink_plan
from model.memory.plan import (
    MemoryPlan,
    NothingFits,
)


@pytest.mark.parametrize("start", [MemoryPlan(131_072, 2048, 0, 0, graphs=True), MemoryPlan(513, 1024, 12, 0)])
def test_shrinking_makes_each_plan_smaller_and_ends(start):
    plans = [start]
    while (smaller := shrink_plan(plans[-1], longest_tokens=512, num_blocks=12)) is not None:
        assert smaller != plans[-1]
        assert smaller.micro_batch_tokens <= plans[-1].micro_batch_tokens
        assert smaller.chunk_tokens <= plans[-1].chunk_tokens
        assert smaller.gradient_checkpointing >= plans[-1].gradient_checkpointing
        assert not smaller.graphs, "graphs are given up first"
        plans.append(smaller)
        assert len(plans) < 20
    assert plans[-1] == MemoryPlan(512, 128, 12, 0)


def test_shrinking_keeps_a_micro_batch_below_the_longest_example():
    assert shrink_plan(MemoryPlan(100, 128, 0, 0), 512, 12) == MemoryPlan(100, 128, 12, 0)
    assert shrink_plan(MemoryPlan(100, 128, 12, 0), 512, 12) is None


def test_after_an_out_of_memory_the_same_plan_is_tried_again_and_then_smaller_ones():
    plan = MemoryPlan(1024, 128, 12, 0)
    plans = plans_to_try(plan, lambda plan: shrink_plan(plan, 512, 12))
    assert [next(plans) for _ in range(3)] == [plan, plan, replace(plan, micro_batch_tokens=512)]
    with pytest.raises(NothingFits, match="smallest plan"):
        next(plans)


def test_a_shrunk_plan_grows_back_one_step_at_a_time_and_each_shrinking_doubles_the_wait():
    full = MemoryPlan(4000, 512, 0, 0, graphs=True)
    plan, recovery = full, PlanRecovery(full, wait_steps=2)
    for _ in range(6):
        plan, recovery = recovery.after_step(shrink_plan(plan, 1000, 12), shrunk=True)
    assert plan == MemoryPlan(1000, 128, 12, 0) and recovery.wait_steps == 128
    seen = []
    for _ in range(128 * 6 + 3):
        plan, recovery = recovery.after_step(plan, shrunk=False)
        seen.append(plan)
    assert seen[126] == MemoryPlan(1000, 128, 12, 0) and seen[127] == MemoryPlan(1000, 128, 0, 0)
    assert len(set(seen)) == 7 and seen[128 * 6 - 2] == replace(full, graphs=False) and seen[-1] == full


def test_plan_recovery_is_the_same_after_a_checkpoint():
    recovery = PlanRecovery(MemoryPlan(4000, 512, 0, 0), 7, 400)
    assert recovery_of(asdict(recovery), MemoryPlan(1, 1, 12, 0)) == recovery
    assert recovery_of(None, recovery.full) == PlanRecovery(recovery.full)
