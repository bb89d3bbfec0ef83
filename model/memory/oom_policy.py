"""What follows an out of memory: a smaller plan, and a larger one after a long calm; what the device holds.

Also the functions that people call by hand: monitor_gpu_memory, cleanup_gpu_memory, check_memory_safety.
"""

import gc
import logging
from dataclasses import dataclass, replace

import torch

from model.memory.plan import CHUNKS, MemoryPlan, NothingFits
from model.runtime.device_memory import release_memory

LOGGER = logging.getLogger("chat_trainer")
GROW_AFTER_STEPS = 100  # without an out of memory; each one that shrinks the plan doubles it
GATES_GB = dict(start=3.0, model=2.5, optimizer=2.0, ready=1.5)  # GiB that the guides want free at each stage


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
class Growth:
    """When a plan that was shrunk may grow again, one rung at a time, up to the plan that was chosen."""

    full: MemoryPlan
    calm_steps: int = 0  # since the last out of memory or growth
    wait_steps: int = GROW_AFTER_STEPS

    def after_step(self, plan, shrunk):
        """(the next step's plan, Growth) after a step that fitted in `plan`; `shrunk` if it did not fit in a larger."""
        if shrunk:
            return plan, replace(self, calm_steps=0, wait_steps=2 * self.wait_steps)
        if plan == self.full:
            return plan, self
        if self.calm_steps + 1 < self.wait_steps:
            return plan, replace(self, calm_steps=self.calm_steps + 1)
        return _larger(plan, self.full), replace(self, calm_steps=0)


def growth_of(values, plan):
    """The Growth that a checkpoint remembers as `values`, or a fresh one of `plan`."""
    return Growth(**values | dict(full=MemoryPlan(**values["full"]))) if values else Growth(plan)


def _larger(plan, full):
    """The rung above `plan` on the way that `shrink_plan` came down from `full`."""
    if plan.gradient_checkpointing and not full.gradient_checkpointing:
        return replace(plan, gradient_checkpointing=False)
    if plan.chunk_tokens < full.chunk_tokens:
        return replace(plan, chunk_tokens=min(2 * plan.chunk_tokens, full.chunk_tokens))
    if plan.micro_batch_tokens < full.micro_batch_tokens:
        return replace(plan, micro_batch_tokens=min(2 * plan.micro_batch_tokens, full.micro_batch_tokens))
    return replace(plan, graphs=full.graphs)


def is_out_of_memory(error):
    """True for an out of memory under any of its names: PyTorch's, cuBLAS's, cuDNN's, NCCL's, the CPU allocator's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if "more than 1EB" in str(error):
        return False  # a size that makes no sense: something is broken, and trying again will not help
    signs = ("out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
    signs += ("DefaultCPUAllocator", "bad_alloc")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


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


def monitor_gpu_memory():
    """Bytes of the current GPU: what this process has allocated, reserved and reserved at most, what is free, total.

    Empty without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return dict(
        allocated_bytes=torch.cuda.memory_allocated(), reserved_bytes=torch.cuda.memory_reserved(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(), free_bytes=free, total_bytes=total,
    )  # fmt: skip


def free_bytes():
    """Bytes free on the current GPU, or None without one."""
    return monitor_gpu_memory().get("free_bytes")


def cleanup_gpu_memory():
    """Give this process's cached memory back to the GPU; returns the bytes given back (other processes' stay)."""
    before = monitor_gpu_memory().get("reserved_bytes", 0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return before - monitor_gpu_memory().get("reserved_bytes", 0)


def check_gates(free, planned_bytes):
    """Warn of each stage of GATES_GB with less free than the guides want; `free`: bytes by stage, None without GPU."""
    for stage, count in free.items():
        if count is not None:
            check_memory_safety(GATES_GB[stage], count, planned_bytes, f"stage {stage}: ")


def check_memory_safety(required_memory_gb=2.0, free_bytes=None, planned_bytes=None, where=""):
    """True when `required_memory_gb` GiB are free on the current GPU (or `free_bytes` are that much), else a warning.

    The warning begins with `where` and says what the plan needs in all, where `planned_bytes` is known. True without a
    GPU.
    """
    if free_bytes is None:
        free_bytes = monitor_gpu_memory().get("free_bytes")
    if free_bytes is None or free_bytes >= required_memory_gb * 2**30:
        return True
    planned = "" if planned_bytes is None else f"; the plan's peak is {planned_bytes / 2**30:.2f} GiB in all"
    free = f"{where}{free_bytes / 2**30:.2f} GiB of GPU memory are free"
    LOGGER.warning("%s, below %.1f%s", free, required_memory_gb, planned)
    return False
