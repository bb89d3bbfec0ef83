"""Where a run computes: how many processes, on what, and how fast it launches."""

from dataclasses import dataclass

import torch

from model.runtime.distributed import vote

# MemorySpec.launch_tokens per streaming multiprocessor (SM): from compute capability 9.0 on, and before
LAUNCH_TOKENS_PER_SM, OLDER_LAUNCH_TOKENS_PER_SM = 250, 75
NATIVE_BF16 = (8, 0)  # compute capability from which on a GPU computes in bfloat16


@dataclass(frozen=True)
class Machine:
    """Where a run computes; equal on all of its ranks."""

    num_processes: int = 1
    device_type: str = "cpu"  # cuda or cpu
    native_bf16: bool = False  # its GPUs compute in bfloat16
    launch_tokens: int = 0  # tokens computed in the time that launching a forward and backward takes; 0: unknown


def machine_of(ranks):
    """The Machine of these Ranks; the slowest launches of all count, because all must choose the same plan."""
    launch_tokens = -vote(ranks, -launch_tokens_here())[0]
    return Machine(ranks.world_size, ranks.device.type, has_native_bf16(ranks.device), launch_tokens)


def machine_here(num_processes, device_type="cpu"):
    """The Machine of so many processes on this machine's GPUs, or on those of another one where this has none."""
    native_bf16 = device_type == "cuda" and (not torch.cuda.device_count() or has_native_bf16(torch.device("cuda")))
    return Machine(num_processes, device_type, native_bf16, launch_tokens_here())


def compute_dtype(mixed_precision, native_bf16):
    """bfloat16 if `mixed_precision` is bf16, or if it is auto and the device has it; else float32."""
    is_bf16 = mixed_precision == "bf16" or (mixed_precision == "auto" and native_bf16)
    return torch.bfloat16 if is_bf16 else torch.float32


def has_native_bf16(device):
    """Whether a device computes in bfloat16 by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE_BF16


def launch_tokens_here():
    """Tokens that this process's GPU computes in the time that launching a forward and backward takes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    gpu = torch.cuda.get_device_properties()
    return gpu.multi_processor_count * (LAUNCH_TOKENS_PER_SM if gpu.major >= 9 else OLDER_LAUNCH_TOKENS_PER_SM)
