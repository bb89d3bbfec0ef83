"""Memory of a device: what is free, what this process uses, its limit and its peak."""

import gc
import logging

import torch

LOGGER = logging.getLogger("chat_trainer")

GATES_GB = dict(start=3.0, model=2.5, optimizer=2.0, ready=1.5)  # GiB that the guides ask to be free at each stage

CONTEXT_BYTES = 600 * 2**20  # a CUDA context with torch's kernels; at start-up, use beyond it is another process's
MAX_NON_TORCH_BYTES = 3 * 2**30  # context, NCCL and CUDA graphs together; use beyond it is another process's


def release_memory():
    """Free this process's cached GPU memory; call it when no tensor of a failed attempt is referenced."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def within_memory(work, *args):
    """(True, `work(*args)`), or (False, None) if it ran out of memory; other errors are raised."""
    try:
        return True, work(*args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return False, None  # here no exception is being handled, so no traceback keeps the failed attempt's tensors alive


def other_process_bytes(device):
    """Estimated bytes of `device` that other processes use; call it before this one uses much. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES, 0)


def non_torch_bytes(device, other_process):
    """Bytes of `device` that this process uses outside PyTorch's allocator (context, NCCL, graphs); 0 on a CPU.

    `other_process` is the bytes that other processes used at start-up. A result that only another process's later use
    can explain is replaced by CONTEXT_BYTES.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    non_torch = max(total - free - torch.cuda.memory_reserved(device) - other_process, 0)
    return non_torch if non_torch <= MAX_NON_TORCH_BYTES else CONTEXT_BYTES


def check_allocator(backend):
    """Raise ValueError if PyTorch allocates GPU memory without pools, which captured steps share with others."""
    if backend != "native":
        raise ValueError(
            f"PyTorch's allocator is {backend}, which has no pools for captured steps: leave backend: out of "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )


def limit_memory(device, limit_gb, non_torch):
    """Limit this process to `limit_gb` GiB of `device` (0: no limit), `non_torch` bytes of them outside the allocator.

    Returns the bytes that the allocator may reserve, given the limit and what is free; None on a CPU. Raises
    ValueError if the limit leaves nothing to the allocator.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)
    if not limit_gb:
        return available
    allowed = int(limit_gb * 2**30) - non_torch
    if allowed <= 0:
        raise ValueError(
            f"--gpu_memory_limit_gb={limit_gb}: the CUDA context alone takes {non_torch / 2**30:.2f} GiB: raise it"
        )
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), device)
    return min(allowed, available)


def memory_cap(device, limit_gb=0.0):
    """Bytes of `device` that this process may use: `limit_gb` GiB (0: no limit), at most its total; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    return min(int(limit_gb * 2**30) or total, total)


def peak_memory(device):
    """(Peak allocated, peak reserved) bytes on `device` since `reset_peak`, and the process's resident host bytes.

    A call does not reset the peaks: a CUDA graph allocates when it is captured and not when it is replayed.
    """
    with open("/proc/self/statm") as statm:
        host = int(statm.read().split()[1]) * 4096
    if device.type != "cuda":
        return 0, 0, host
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), host


def reset_peak(device):
    """Reset the peaks that `peak_memory` gives to the present use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def is_out_of_memory(error):
    """True if `error` means out of memory, whether PyTorch, cuBLAS, cuDNN, NCCL or the CPU allocator raised it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if "more than 1EB" in str(error):
        return False  # the size is corrupt: a retry cannot help
    phrases = ("out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
    phrases += ("DefaultCPUAllocator", "bad_alloc")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def monitor_gpu_memory():
    """Memory of the current GPU in bytes: allocated, reserved and peak reserved by this process, free, total.

    An empty dict without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return dict(
        allocated_bytes=torch.cuda.memory_allocated(), reserved_bytes=torch.cuda.memory_reserved(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(), free_bytes=free, total_bytes=total,
    )  # fmt: skip


def free_bytes():
    """Free bytes of the current GPU; None without a GPU."""
    return monitor_gpu_memory().get("free_bytes")


def cleanup_gpu_memory():
    """Free this process's cached GPU memory; returns the number of bytes freed."""
    before = monitor_gpu_memory().get("reserved_bytes", 0)
    release_memory()
    return before - monitor_gpu_memory().get("reserved_bytes", 0)


def check_gates(free, planned_bytes):
    """Warn for each stage with less free than GATES_GB; `free` maps a stage to free bytes (None without a GPU)."""
    for stage, stage_bytes in free.items():
        if stage_bytes is not None:
            check_memory_safety(GATES_GB[stage], stage_bytes, planned_bytes, f"stage {stage}: ")


def check_memory_safety(required_memory_gb=2.0, free_bytes=None, planned_bytes=None, where=""):
    """True if `required_memory_gb` GiB are free on the current GPU, or if there is no GPU; otherwise logs a warning.

    `free_bytes` replaces the measurement. The warning begins with `where`, and names the plan's total if
    `planned_bytes` is given.
    """
    if free_bytes is None:
        free_bytes = monitor_gpu_memory().get("free_bytes")
    if free_bytes is None or free_bytes >= required_memory_gb * 2**30:
        return True
    planned = "" if planned_bytes is None else f"; the plan's peak is {planned_bytes / 2**30:.2f} GiB in all"
    free = f"{where}{free_bytes / 2**30:.2f} GiB of GPU memory are free"
    LOGGER.warning("%s, below %.1f%s", free, required_memory_gb, planned)
    return False
