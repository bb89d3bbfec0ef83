"""The memory estimate of a run, from its options, network and data."""

from dataclasses import replace

import torch

from model.data.length_histogram import histogram
from model.memory.estimate import Estimate
from model.nn.attention import has_kernels
from model.nn.t5.footprint import MemorySpec
from model.runtime.distributed import vote
from model.train.fixed_shards import NUM_SHARDS

# MemorySpec.launch_tokens per streaming multiprocessor (SM): from compute capability 9.0 on, and before
LAUNCH_TOKENS_PER_SM, OLDER_LAUNCH_TOKENS_PER_SM = 250, 75


def make_estimate(config, model_config, dtype, lengths, share_pairs, device="cuda", launch_tokens=None):
    """Estimate of a run with `config` on `device`: examples of `lengths` (Lengths), `share_pairs` per rank and step.

    `launch_tokens`: the value of `launch_tokens_here`; None: MemorySpec's default, that of a small GPU.
    """
    spec = MemorySpec(
        model_config, dtype.itemsize, has_kernels(torch.device(device), dtype, model_config), config.optimizer,
        config.dropout > 0, config.trainable == "decoder",
    )  # fmt: skip
    spec = replace(spec, launch_tokens=launch_tokens or spec.launch_tokens)
    return Estimate(spec, lengths, share_pairs, config.max_new_tokens)


def launch_tokens_here():
    """Tokens that this process's GPU computes in the time that launching a forward and backward takes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    gpu = torch.cuda.get_device_properties()
    return gpu.multi_processor_count * (LAUNCH_TOKENS_PER_SM if gpu.major >= 9 else OLDER_LAUNCH_TOKENS_PER_SM)


def estimate_for(ranks, config, model_config, dtype, lengths, global_batch):
    """Estimate of a run on examples of `lengths` (pairs, 2), the same on all ranks."""
    share_pairs = -(-global_batch // (NUM_SHARDS if config.exact else ranks.world_size))
    launch_tokens = -vote(ranks, -launch_tokens_here())[0]  # the minimum over ranks: all must choose the same plan
    return make_estimate(config, model_config, dtype, histogram(lengths), share_pairs, ranks.device.type, launch_tokens)
