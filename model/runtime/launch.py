"""How this process was launched: which launches cannot work, and whether it computes on the CPU."""

import os
from glob import glob

import torch

# what accelerate can be told to shard the weights with: then a step could not be retried
SHARDING = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG", "TP")


def check_launch():
    """Raise ValueError, naming the command that works, for a launch that cannot work."""
    # `accelerate launch --cpu --num_processes N` starts one process and leaves only these traces of N
    asked_for_many = "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    if asked_for_many and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "accelerate launch --cpu starts one process and ignores --num_processes: "
            "type accelerate launch --multi_gpu --num_processes N ./train_low_mem.py …, which works without GPUs too"
        )
    # `torchrun --master_port 0` passes on the 0, and each process then waits at another port
    if os.environ.get("MASTER_PORT") == "0":
        raise ValueError("MASTER_PORT=0: the processes have no common port: type torchrun --standalone")
    for name in SHARDING:
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1"):
            raise ValueError(
                f"ACCELERATE_USE_{name} is set, by --use_{name.lower()}, accelerate's configuration file or the "
                "environment: launch with --multi_gpu, and this trainer's own --share_state=True divides masters and "
                "optimizer state among the processes, as ZeRO 2 does; a run takes it by itself where it needs it"
            )


def must_use_cpu(devices="/dev/nvidia[0-9]*", driver="/proc/driver/nvidia/version"):
    """True if there is no GPU or the CPU was asked for.

    Raises RuntimeError if torch cannot see a GPU or driver that the machine has and the CPU was not asked for.
    `devices` (a glob pattern) and `driver` are the files by which the kernel shows them.
    """
    if torch.cuda.is_available():
        return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    asked = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or "ACCELERATE_USE_CPU" in os.environ
    if (glob(devices) or os.path.exists(driver)) and not asked:
        raise RuntimeError(
            f"this machine has an NVIDIA GPU or driver but torch {torch.__version__} sees none: install a CUDA build "
            "of torch that the driver supports (nvidia-smi shows its version), or set CUDA_VISIBLE_DEVICES= for the CPU"
        )
    return True
