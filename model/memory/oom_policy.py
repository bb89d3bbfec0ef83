"""What follows an out of memory: a smaller plan, and a larger one after a long calm; what the device holds.

Also the functions that people call by hand: monitor_gpu_memory, cleanup_gpu_memory, check_memory_safety.
"""

import logging
from dataclasses import dataclass, replace

from model.memory.plan import CHUNKS, MemoryPlan, NothingFits
from model.runtime.device_memory import release_memory

LOGGER = logging.getLogger("chat_trainer")
GROW_AFTER_STEPS = 100  # without an out of memory; each one that shrinks the plan doubles it


def shrink_plan(plan, longest_tokens):
    """The next smaller plan after an out of memory, or None when there is none.

    First recordings are given up, then the micro-batch shrinks, then the loss's chunk, then comes checkpointing.
    """
    if plan.graphs:
        return replace(plan, graphs=False)
    if plan.micro_batch_tokens > longest_tokens:
        return replace(plan, micro_batch_tokens=max(plan.micro_batch_tokens // 2, longest_tokens))
    if plan.chunk_tokens > CHUNKS[-1]:
        return replace(plan, chunk_tokens=plan.chunk_tokens // 2)
    return None if plan.gradient_checkpointing else replace(plan, gradient_checkpointing=True)


@dataclass(frozen=True)
class PlanRecovery:
    """When a plan that was shrunk may grow again, one rung at a time, up to the plan that was chosen."""

    full: MemoryPlan
    calm_steps: int = 0  # since the last out of memory or growth
    wait_steps: int = GROW_AFTER_STEPS

    def after_step(self, plan, shrunk):
        """(The next step's plan, PlanRecovery) after a step that fitted in `plan`.

        `shrunk`: whether it had failed in a larger plan before.
        """
        if shrunk:
            return plan, replace(self, calm_steps=0, wait_steps=2 * self.wait_steps)
        if plan == self.full:
            return plan, self
        if self.calm_steps + 1 < self.wait_steps:
            return plan, replace(self, calm_steps=self.calm_steps + 1)
        return _larger(plan, self.full), replace(self, calm_steps=0)


def recovery_of(values, plan):
    """The PlanRecovery that a checkpoint remembers as `values`, or a fresh one of `plan`."""
    return PlanRecovery(**values | dict(full=MemoryPlan(**values["full"]))) if values else PlanRecovery(plan)


def _larger(plan, full):
    """The rung above `plan` on the way that `shrink_plan` came down from `full`."""
    if plan.gradient_checkpointing and not full.gradient_checkpointing:
        return replace(plan, gradient_checkpointing=False)
    if plan.chunk_tokens < full.chunk_tokens:
        return replace(plan, chunk_tokens=min(2 * plan.chunk_tokens, full.chunk_tokens))
    if plan.micro_batch_tokens < full.micro_batch_tokens:
        return replace(plan, micro_batch_tokens=min(2 * plan.micro_batch_tokens, full.micro_batch_tokens))
    return replace(plan, graphs=full.graphs)


def plan_after_out_of_memory(device, plan, failures, shrink):
    """What to try next, when no tensor of the failed attempt is held: `plan` once more, the cache being free now,
    then what `shrink(plan)` gives. Raises NothingFits when that is None.
    """
    release_memory(device)
    smaller = plan if failures == 1 else shrink(plan)
    if smaller is None:
        raise NothingFits(
            f"out of memory with the smallest plan ({plan}): lower --max_seq_len (for answers --max_new_tokens, or "
            "--bleu_pairs=0), or free memory and go on with --is_keep_training=True", plan,
        )  # fmt: skip
    return smaller
