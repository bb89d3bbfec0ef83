"""What a run's options come to: its adapter, optimizer and update, and the memory that it is estimated to take."""

from dataclasses import replace

import torch

from model.memory.estimate import Answers, Estimate
from model.memory.plan import PlanOptions
from model.nn.attention import has_kernels
from model.nn.lora import LoraConfig
from model.nn.memory_spec import MemorySpec
from model.nn.registry import family_of
from model.runtime.distributed import vote
from model.train.optim import OPTIMIZERS, UpdateOptions
from model.train.reduction import buffer_bytes

# MemorySpec.launch_tokens per streaming multiprocessor (SM): from compute capability 9.0 on, and before
LAUNCH_TOKENS_PER_SM, OLDER_LAUNCH_TOKENS_PER_SM = 250, 75
CPU_ANSWERS = 128  # at a time on a CPU: 1.2 times as fast as 64, in twice the memory


def memory_spec(config, model_config, dtype, device_type="cuda", launch_tokens=None):
    """MemorySpec of a run with `config` on a device of this type.

    `launch_tokens`: the value of `launch_tokens_here`; None: MemorySpec's default, that of a small GPU.
    """
    family = family_of(model_config)
    kernels = has_kernels(torch.device(device_type), dtype, *model_config.kernel_sizes)
    launch = dict(launch_tokens=launch_tokens) if launch_tokens else {}
    spec = MemorySpec(
        family, model_config, dtype.itemsize, kernels, has_dropout(config), config.trainable,
        lora_of(config, model_config), **launch,
    )  # fmt: skip
    spec = with_optimizer(spec, config.optimizer)
    sends_bf16 = config.reduce_dtype == "bf16"  # counted on one rank, too, which has no sum
    return replace(spec, sum_bytes=buffer_bytes(spec.trained)) if sends_bf16 else spec


def with_optimizer(spec, name):
    """`spec` with the bytes of the optimizer of this name."""
    state, update = OPTIMIZERS[name].needed_bytes(spec.trained, spec.trained_matrix_numbers)
    return replace(spec, state_bytes=state, update_bytes=update)


def has_dropout(config):
    """Whether a run draws masks."""
    return config.dropout > 0 or config.lora_dropout > 0


def lora_of(config, model_config, base="", base_sha256=""):
    """LoraConfig of a run whose weights are in the directory `base`; None if it trains no adapter."""
    if not config.lora_rank:
        return None
    known = family_of(model_config).adapter_targets(model_config)
    targets = [name.strip() for name in config.lora_targets.split(",") if name.strip()]
    return LoraConfig(
        rank=config.lora_rank, alpha=config.lora_alpha or 2.0 * config.lora_rank, targets=tuple(targets or known),
        dropout=config.lora_dropout, use_rslora=config.use_rslora, base=base, base_sha256=base_sha256,
        base_precision=config.base_precision,
    )  # fmt: skip


def update_options(config):
    """The UpdateOptions of a TrainConfig."""
    return UpdateOptions(
        config.optimizer, config.learn_rate, config.weight_decay, config.max_grad_norm, config.spike_guard,
        config.reduce_dtype, config.share_update,
    )  # fmt: skip


def plan_options(config):
    """The PlanOptions of a TrainConfig."""
    return PlanOptions(
        config.micro_batch_tokens, config.gradient_checkpointing, config.compile, config.max_seq_len,
        config.gpu_memory_limit_gb,
    )  # fmt: skip


def launch_tokens_here():
    """Tokens that this process's GPU computes in the time that launching a forward and backward takes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    gpu = torch.cuda.get_device_properties()
    return gpu.multi_processor_count * (LAUNCH_TOKENS_PER_SM if gpu.major >= 9 else OLDER_LAUNCH_TOKENS_PER_SM)


def estimate_for(ranks, config, model_config, dtype, lengths, global_batch):
    """Estimate of a run on examples of these Lengths, the same on all ranks."""
    share_pairs = -(-global_batch // ranks.world_size)
    launch_tokens = -vote(ranks, -launch_tokens_here())[0]  # the minimum over ranks: all must choose the same plan
    spec = memory_spec(config, model_config, dtype, ranks.device.type, launch_tokens)
    spec = replace(spec, num_ranks=ranks.world_size)
    return Estimate(spec, lengths, share_pairs, answers_wanted(config, ranks.world_size, ranks.device.type))


def answers_wanted(config, world_size, device_type="cuda"):
    """The Answers of a rank: all of its share of the questions together, if the memory allows."""
    questions = config.bleu_pairs if config.validation_file else 0
    share = max(-(-questions // world_size), 1)
    return Answers(share if device_type == "cuda" else min(share, CPU_ANSWERS), config.max_new_tokens)
