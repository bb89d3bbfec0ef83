"""What a device holds and how much of it is ours: free memory, the limit of this process, its peak."""

import gc
import logging

import torch

LOGGER = logging.getLogger("chat_trainer")


GATES_GB = dict(start=3.0, model=2.5, optimizer=2.0, ready=1.5)  # GiB that the guides want free at each stage

CONTEXT_BYTES = 600 * 2**20  # of a CUDA context with torch's kernels; more than this was there before us
MOST_OUTSIDE_BYTES = 3 * 2**30  # that context, NCCL and graphs take; more than this is what another process took since


def release_memory(device):
    """Give cached memory back after an out of memory, when no tensor of the failed attempt is held any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def other_process_bytes(device):
    """Bytes of `device` that other processes hold, as far as can be told before this one holds much; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES, 0)


def non_torch_bytes(device, other_process):
    """Bytes of `device` that this process holds outside PyTorch's allocator: context, NCCL, graphs; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    non_torch = max(total - free - torch.cuda.memory_reserved(device) - other_process, 0)
    return non_torch if non_torch <= MOST_OUTSIDE_BYTES else CONTEXT_BYTES


def limit_memory(device, limit_gb, non_torch):
    """Let this process fill at most `limit_gb` GiB of `device`, `outside` bytes of which the allocator never sees.

    Returns the bytes that the allocator may reserve: of the limit, or where it is 0 of what is free; None on a CPU.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    there = free + torch.cuda.memory_reserved(device)
    if not limit_gb:
        return there
    allowed = int(limit_gb * 2**30) - non_torch
    if allowed <= 0:
        raise ValueError(
            f"--gpu_memory_limit_gb={limit_gb}: the CUDA context alone takes {non_torch / 2**30:.2f} GiB: give more"
        )
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), device)
    return min(allowed, there)


def memory_cap(device, limit_gb=0.0):
    """Bytes of `device` that this process may fill: its limit (GiB; 0: none), at most the card; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    return min(int(limit_gb * 2**30) or total, total)


def peak_memory(device):
    """Highest (allocated, reserved) bytes on `device` since `reset_peak`, and the process's resident host bytes.

    Not since the last call: a recorded step allocates when it is recorded and never again.
    """
    with open("/proc/self/statm") as statm:
        host = int(statm.read().split()[1]) * 4096
    if device.type != "cuda":
        return 0, 0, host
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), host


def reset_peak(device):
    """From now on `peak_memory` is of what comes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def is_out_of_memory(error):
    """True for an out of memory under any of its names: PyTorch's, cuBLAS's, cuDNN's, NCCL's, the CPU allocator's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if "more than 1EB" in str(error):
        return False  # a size that makes no sense: something is broken, and trying again will not help
    signs = ("out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
    signs += ("DefaultCPUAllocator", "bad_alloc")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


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
