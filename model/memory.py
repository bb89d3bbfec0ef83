"""How a step is cut so that it fits: predict the peak, choose a plan, shrink a plan."""

import gc
from dataclasses import dataclass, replace

import torch

SMALLEST_CHUNK_TOKENS = 128
USABLE = 0.8  # of free memory: the prediction is coarse, and the allocator rounds
CPU_MICRO_BATCH_TOKENS = 8192  # larger ones are not faster on a CPU
LARGEST_MICRO_BATCH_TOKENS = 131_072  # beyond this a GPU gains nothing
ADAM_BYTES, ADAFACTOR_BYTES = 8, 0  # optimizer state, bytes a parameter


@dataclass(frozen=True)
class MemoryPlan:
    """How each step is cut. It never changes which examples form the step, nor its gradient."""

    micro_batch_tokens: int  # tokens of both sides in one forward
    chunk_tokens: int  # target tokens whose logits exist at a time
    gradient_checkpointing: bool
    predicted_peak_bytes: int
    graphs: bool = False  # forward and backward of a step in one micro-batch are recorded and replayed


def choose_plan(config, shape, num_parameters, free_bytes, compute_dtype, share_tokens, longest_tokens):
    """The plan that `config` asks for, or the one with the fewest forwards that fits `free_bytes` (None on a CPU).

    `share_tokens` is the most that one rank's share of a step can have, `longest_tokens` the longest example's.
    Raises RuntimeError when one example alone does not fit the memory, ValueError when it does not fit the
    micro-batch that `config` names.
    """
    if 0 < config.micro_batch_tokens < longest_tokens:
        raise ValueError(
            f"micro_batch_tokens={config.micro_batch_tokens}: the longest example has {longest_tokens} tokens on both "
            "sides: give at least that, or lower --max_seq_len"
        )
    chunk_tokens = 2048 if free_bytes else 1024
    largest = LARGEST_MICRO_BATCH_TOKENS if free_bytes else CPU_MICRO_BATCH_TOKENS
    wanted = config.micro_batch_tokens or max(min(share_tokens, largest), longest_tokens)
    choices = {"auto": (False, True), "True": (True,), "False": (False,)}[config.gradient_checkpointing]
    for checkpointing in choices:
        for tokens in _halves(wanted, longest_tokens):
            peak = predict_peak_bytes(config, shape, num_parameters, tokens, chunk_tokens, checkpointing, compute_dtype)
            if free_bytes is None or peak <= free_bytes * USABLE or config.micro_batch_tokens:
                return MemoryPlan(tokens, chunk_tokens, checkpointing, peak)
    raise RuntimeError(
        f"one example of {longest_tokens} tokens needs about {peak / 2**30:.2f} GiB and {free_bytes / 2**30:.2f} GiB "
        f"are free: lower --max_seq_len (now {config.max_seq_len}), choose a smaller --model, or free the GPU"
    )


def _halves(tokens, least):
    """`tokens`, half of them and so on while above `least`; last `least` itself."""
    while tokens > least:
        yield tokens
        tokens //= 2
    yield least


def predict_peak_bytes(config, shape, num_parameters, tokens, chunk_tokens, checkpointing, compute_dtype):
    """Predicted peak of a training step in bytes: weights, gradients, optimizer, activations and one chunk of logits.

    Activations of one block and token: about 14 vectors of d_model and 3 of d_ff in the compute dtype, the norms'
    float32 copies, and attention's scores against max_seq_len keys.
    """
    size = torch.finfo(compute_dtype).bits // 8
    state = ADAFACTOR_BYTES if config.optimizer == "adafactor" else ADAM_BYTES
    fixed = num_parameters * (4 + 4 + state + size)
    blocks = shape.num_layers + 1.6 * shape.num_decoder_layers  # a decoder block has cross-attention too
    block_token = size * (14 * shape.d_model + 3 * shape.d_ff) + 8 * shape.d_model
    block_token += size * 2 * shape.num_heads * config.max_seq_len
    saved = blocks * size * shape.d_model + block_token if checkpointing else blocks / 2 * block_token
    logits = chunk_tokens * shape.vocab_size * (4 + 2 * size) + shape.vocab_size * shape.d_model * (8 + size)
    update = num_parameters * 8  # the optimizer's temporaries, when activations are gone
    return int(fixed + max(tokens * saved + logits, update))


def shrink_plan(plan, longest_tokens):
    """The next smaller plan after an out of memory, or None when there is none.

    First the micro-batch, then the loss's chunk, then gradient checkpointing.
    """
    if plan.micro_batch_tokens > longest_tokens:
        return replace(plan, micro_batch_tokens=max(plan.micro_batch_tokens // 2, longest_tokens))
    if plan.chunk_tokens > SMALLEST_CHUNK_TOKENS:
        return replace(plan, chunk_tokens=plan.chunk_tokens // 2)
    return None if plan.gradient_checkpointing else replace(plan, gradient_checkpointing=True)


def is_out_of_memory(error):
    """True for an out of memory under any of its names: PyTorch's, cuBLAS's, cuDNN's, NCCL's, the CPU allocator's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    signs = ("out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in (*signs, "DefaultCPUAllocator"))


def free_memory(device, limit_gb=0.0):
    """Bytes this process may still allocate on `device` under its limit (GiB; 0: none); None on a CPU."""
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    return min(free, int(limit_gb * 2**30) - torch.cuda.memory_reserved(device)) if limit_gb else free


def limit_memory(device, limit_gb):
    """Let this process use at most `limit_gb` GiB of `device`; 0 sets no limit."""
    if limit_gb and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_gb * 2**30 / total, 1.0), device)


def release_memory(device):
    """Give cached memory back after an out of memory, when no tensor of the failed attempt is held any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_cap(device, limit_gb=0.0):
    """Bytes of `device` that this process may fill: its limit (GiB; 0: none) or all of the card; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(limit_gb * 2**30) or torch.cuda.get_device_properties(device).total_memory


def peak_memory(device):
    """Highest (allocated, reserved) bytes on `device` since the last call, and the process's resident host bytes."""
    with open("/proc/self/statm") as statm:
        host = int(statm.read().split()[1]) * 4096
    if device.type != "cuda":
        return 0, 0, host
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return *peaks, host
