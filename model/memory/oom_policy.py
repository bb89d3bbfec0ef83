"""What follows an out of memory: a smaller plan, and larger ones again after a while without one."""

import logging
from dataclasses import dataclass, replace

from model.memory.plan import CHUNKS, MemoryPlan, NothingFits
from model.runtime.device_memory import release_memory

LOGGER = logging.getLogger("chat_trainer")
GROW_AFTER_STEPS = 100  # without an out of memory; doubles each time the plan shrinks


def shrink_plan(plan, longest_tokens, num_blocks=0):
    """The next smaller plan, or None if `plan` is the smallest.

    In this order: drop the CUDA graphs, halve the micro-batch (not below `longest_tokens`, the tokens of the longest
    example), halve the loss's chunk, checkpoint all of the network's `num_blocks`; 0 stands for work without backward.
    """
    if plan.graphs:
        return replace(plan, graphs=False)
    if plan.micro_batch_tokens > longest_tokens:
        return replace(plan, micro_batch_tokens=max(plan.micro_batch_tokens // 2, longest_tokens))
    if plan.chunk_tokens > CHUNKS[-1]:
        return replace(plan, chunk_tokens=plan.chunk_tokens // 2)
    is_smallest = plan.gradient_checkpointing >= num_blocks
    return None if is_smallest else replace(plan, gradient_checkpointing=num_blocks)


@dataclass(frozen=True)
class PlanRecovery:
    """When a shrunk plan grows again: one step of `shrink_plan` at a time, up to `full`, the plan chosen first."""

    full: MemoryPlan
    calm_steps: int = 0  # steps since the plan last shrank or grew
    wait_steps: int = GROW_AFTER_STEPS

    def after_step(self, plan, shrunk):
        """(plan of the next step, PlanRecovery) after a step that succeeded with `plan`.

        `shrunk` is True if the same step first ran out of memory with a larger plan.
        """
        if shrunk:
            return plan, replace(self, calm_steps=0, wait_steps=2 * self.wait_steps)
        if plan == self.full:
            return plan, self
        if self.calm_steps + 1 < self.wait_steps:
            return plan, replace(self, calm_steps=self.calm_steps + 1)
        return _larger_plan(plan, self.full), replace(self, calm_steps=0)


def recovery_of(values, plan):
    """The PlanRecovery saved in a checkpoint as `values`, or a fresh one of `plan` if there are none."""
    return PlanRecovery(**values | dict(full=MemoryPlan(**values["full"]))) if values else PlanRecovery(plan)


def _larger_plan(plan, full):
    """The next larger plan: undoes the last step of `shrink_plan` on the way down from `full`."""
    if plan.gradient_checkpointing > full.gradient_checkpointing:
        return replace(plan, gradient_checkpointing=full.gradient_checkpointing)
    if plan.chunk_tokens < full.chunk_tokens:
        return replace(plan, chunk_tokens=min(2 * plan.chunk_tokens, full.chunk_tokens))
    if plan.micro_batch_tokens < full.micro_batch_tokens:
        return replace(plan, micro_batch_tokens=min(2 * plan.micro_batch_tokens, full.micro_batch_tokens))
    return replace(plan, graphs=full.graphs)


def plans_to_try(plan, shrink):
    """Yield `plan`; after each failure `plan` once more, since memory is freed between, then ever smaller ones.

    Ask for the next plan when no tensor of the failed attempt is held. `shrink(plan)` gives the next smaller plan, or
    None after the smallest; then NothingFits is raised.
    """
    yield plan
    release_memory()
    while True:
        yield plan
        plan = smaller_plan(plan, shrink)


def smaller_plan(plan, shrink):
    """`shrink(plan)`, after memory was freed; raises NothingFits if it is None."""
    release_memory()
    smaller = shrink(plan)
    if smaller is None:
        raise NothingFits(
            f"out of memory with the smallest plan ({plan}): lower --max_seq_len (for answers --max_new_tokens, or "
            "--bleu_pairs=0), or free GPU memory and resume with --is_keep_training=True", plan,
        )  # fmt: skip
    return smaller
