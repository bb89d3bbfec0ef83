"""What a device holds and how much of it is ours: free memory, the limit of this process, its peak."""

import gc

import torch

CONTEXT_BYTES = 600 * 2**20  # of a CUDA context with torch's kernels; more than this was there before us
MOST_OUTSIDE_BYTES = 3 * 2**30  # that context, NCCL and graphs take; more than this is what another process took since


def release_memory(device):
    """Give cached memory back after an out of memory, when no tensor of the failed attempt is held any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def foreign_bytes(device):
    """Bytes of `device` that other processes hold, as far as can be told before this one holds much; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device) - CONTEXT_BYTES, 0)


def outside_bytes(device, foreign):
    """Bytes of `device` that this process holds outside PyTorch's allocator: context, NCCL, graphs; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    outside = max(total - free - torch.cuda.memory_reserved(device) - foreign, 0)
    return outside if outside <= MOST_OUTSIDE_BYTES else CONTEXT_BYTES


def limit_memory(device, limit_gb, outside):
    """Let this process fill at most `limit_gb` GiB of `device`, `outside` bytes of which the allocator never sees.

    Returns the bytes that the allocator may reserve: of the limit, or where it is 0 of what is free; None on a CPU.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    there = free + torch.cuda.memory_reserved(device)
    if not limit_gb:
        return there
    allowed = int(limit_gb * 2**30) - outside
    if allowed <= 0:
        raise ValueError(
            f"--gpu_memory_limit_gb={limit_gb}: the CUDA context alone takes {outside / 2**30:.2f} GiB: give more"
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
    """Highest (allocated, reserved) bytes on `device` since `forget_peak`, and the process's resident host bytes.

    Not since the last call: a recorded step allocates when it is recorded and never again.
    """
    with open("/proc/self/statm") as statm:
        host = int(statm.read().split()[1]) * 4096
    if device.type != "cuda":
        return 0, 0, host
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), host


def forget_peak(device):
    """From now on `peak_memory` is of what comes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
