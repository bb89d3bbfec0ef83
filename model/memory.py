"""How a step is cut so that it fits: choose a plan, shrink it, let it grow again; what the device holds.

Also the functions that people call by hand: monitor_gpu_memory, cleanup_gpu_memory, check_memory_safety.
"""

import gc
import logging
import math
from dataclasses import dataclass, replace

import torch

from model.attention import has_kernels
from model.device_memory import release_memory
from model.estimate import ANSWERS_A_BATCH, Estimate, Setting

LOGGER = logging.getLogger("chat_trainer")
USABLE = (
    0.95  # of the memory there is, by prediction alone, which errs by 2 percent: forwards of many sizes fragment it
)
PROBED_USABLE = 0.98  # after a probe
CHUNKS = (2048, 1024, 512, 256, 128)  # target tokens whose logits exist at a time
CHUNKS_A_STEP = 8  # at least, down to 512 target tokens
CPU_MICRO_BATCH_TOKENS = 8192  # larger ones are not faster on a CPU
LARGEST_MICRO_BATCH_TOKENS = 262_144  # beyond this a GPU gains nothing
GROW_AFTER_STEPS = 100  # without an out of memory; each one that shrinks the plan doubles it
GATES_GB = dict(start=3.0, model=2.5, optimizer=2.0, ready=1.5)  # GiB that the guides want free at each stage
CHUNK_LAUNCHES = 0.006  # of a chunk, over those of a forward and backward
CHECKPOINTING_WORK, CHECKPOINTING_LAUNCHES = 1.3, 2.5  # what computing again takes, over a step without
LAUNCH_TOKENS_OF_SM, OLDER_LAUNCH_TOKENS_OF_SM = 250, 75  # Setting.launch_tokens for each, from sm_90 on, before


@dataclass(frozen=True)
class MemoryPlan:
    """How each step is cut. It never changes which examples form the step, nor its gradient."""

    micro_batch_tokens: int  # tokens of both sides in one forward
    chunk_tokens: int  # target tokens whose logits exist at a time
    gradient_checkpointing: bool
    predicted_peak_bytes: int
    graphs: bool = False  # forward and backward of a step in one micro-batch are recorded and replayed
    answers: int = ANSWERS_A_BATCH  # prompts answered together

    @property
    def cutting(self):
        return self.micro_batch_tokens, self.chunk_tokens, self.gradient_checkpointing

    def cut_as(self, cutting):
        """This plan with another's `cutting`."""
        names = ("micro_batch_tokens", "chunk_tokens", "gradient_checkpointing")
        return replace(self, **dict(zip(names, cutting, strict=True)))


class NothingFits(RuntimeError):
    """Not even the smallest plan fits the memory."""


def make_estimate(config, shape, dtype, lengths, share_pairs, device="cuda"):
    """Estimate of a run with `config` on `device`, for examples of these Lengths, `share_pairs` a rank and step."""
    setting = Setting(
        shape, dtype.itemsize, has_kernels(torch.device(device), dtype, shape), config.optimizer,
        config.dropout > 0, config.trainable == "decoder",
    )  # fmt: skip
    if torch.cuda.is_available():
        setting = replace(setting, launch_tokens=_launch_tokens(torch.cuda.get_device_properties()))
    return Estimate(setting, lengths, share_pairs, config.max_new_tokens)


def _launch_tokens(gpu):
    return gpu.multi_processor_count * (LAUNCH_TOKENS_OF_SM if gpu.major >= 9 else OLDER_LAUNCH_TOKENS_OF_SM)


def choose_plan(config, estimate, usable_bytes, calibration=None):
    """The plan that `config` asks for, or the fastest that fits `usable_bytes` (None on a CPU).

    `calibration` is what a probe measured over what was predicted. Raises ValueError when one example does not fit the
    micro-batch that `config` names, NothingFits when it does not fit the memory.
    """
    share_pairs, longest = estimate.share_pairs, estimate.lengths.longest
    if 0 < config.micro_batch_tokens < longest:
        raise ValueError(
            f"micro_batch_tokens={config.micro_batch_tokens}: the longest example has {longest} tokens on both "
            "sides: give at least that, or lower --max_seq_len"
        )
    largest = LARGEST_MICRO_BATCH_TOKENS if usable_bytes else CPU_MICRO_BATCH_TOKENS
    wanted = config.micro_batch_tokens or max(min(share_pairs * longest, largest), longest)
    usable_share = PROBED_USABLE / calibration if calibration else USABLE  # of predicted bytes
    limit = math.inf if usable_bytes is None else usable_bytes * usable_share
    checkpointing = {"auto": (False, True), "True": (True,), "False": (False,)}[config.gradient_checkpointing]
    if usable_bytes is None:
        return _plan(estimate, limit, wanted, 1024, checkpointing[0])
    # in a step of few tokens a large chunk's logits would outweigh the activations
    chunks = [chunk for chunk in CHUNKS if chunk <= max(share_pairs * estimate.lengths.mean / CHUNKS_A_STEP, 512)]
    plans = [fitting_plan(estimate, wanted, limit, chunk, again) for again in checkpointing for chunk in chunks]
    plans = [plan for plan in plans if plan and not 0 < plan.micro_batch_tokens < config.micro_batch_tokens]
    if not plans:
        raise NothingFits(_refusal(config, estimate, usable_bytes, usable_share))
    return min(plans, key=lambda plan: (round(time_factor(plan, estimate), 3), -plan.micro_batch_tokens))


def _plan(estimate, limit_bytes, *cutting):
    answers = ANSWERS_A_BATCH
    while answers > 1 and estimate.peaks(*cutting, answers)["generation"] > limit_bytes:
        answers //= 2
    return MemoryPlan(*cutting, predicted_peak_bytes=estimate.step_peak(*cutting), answers=answers)


def fitting_plan(estimate, wanted_tokens, limit_bytes, chunk_tokens, checkpointing):
    """The plan with the largest micro-batch up to `wanted_tokens` that fits, or None where one example does not."""
    if estimate.step_peak(wanted_tokens, chunk_tokens, checkpointing) <= limit_bytes:
        return _plan(estimate, limit_bytes, wanted_tokens, chunk_tokens, checkpointing)
    fits, too_many = estimate.lengths.longest, wanted_tokens
    if estimate.step_peak(fits, chunk_tokens, checkpointing) > limit_bytes:
        return None
    while too_many - fits > max(64, fits // 64):
        middle = (fits + too_many) // 2
        if estimate.step_peak(middle, chunk_tokens, checkpointing) <= limit_bytes:
            fits = middle
        else:
            too_many = middle
    return _plan(estimate, limit_bytes, fits, chunk_tokens, checkpointing)


def time_factor(plan, estimate):
    """Predicted time of a step, over the same step in one forward without limits.

    A forward lasts as long as its tokens or as its launches, whichever is longer.
    """
    tokens, forwards = estimate.share_pairs * estimate.lengths.mean, estimate.forwards(plan.micro_batch_tokens)
    once = estimate.setting.launch_tokens
    work, launches = tokens / forwards, once
    if plan.gradient_checkpointing:
        work, launches = CHECKPOINTING_WORK * work, CHECKPOINTING_LAUNCHES * launches
    chunks = tokens / forwards / plan.chunk_tokens
    return forwards * (max(work, launches) + chunks * CHUNK_LAUNCHES * once) / max(tokens, once)


def _refusal(config, estimate, usable_bytes, usable_share):
    longest = estimate.lengths.longest
    checkpointing = config.gradient_checkpointing != "False"
    tokens = max(config.micro_batch_tokens, longest)
    needed = estimate.step_peak(tokens, CHUNKS[-1], checkpointing) / usable_share
    parts = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in estimate.fixed.items())
    return (
        f"a forward of {tokens} tokens (the longest example has {longest}) needs {needed / 2**30:.2f} GiB and "
        f"{usable_bytes / 2**30:.2f} GiB are there; held all the time, in GiB: {parts}. Lower --max_seq_len (now "
        f"{config.max_seq_len}), type --optimizer=adafactor, choose a smaller --model, or free the GPU"
    )


def shrink_plan(plan, longest_tokens):
    """The next smaller plan after an out of memory, or None when there is none.

    First the micro-batch, then the loss's chunk, then gradient checkpointing.
    """
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
    return replace(plan, micro_batch_tokens=min(2 * plan.micro_batch_tokens, full.micro_batch_tokens))


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
            f"out of memory with the smallest plan ({plan}): lower --max_seq_len, or free memory and go on with "
            "--is_keep_training=True"
        )
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
