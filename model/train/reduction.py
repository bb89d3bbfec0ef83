"""The sum of a step's gradients over ranks: sent in float32, or in bf16 and added in float32 (`reduce_dtype`)."""

import functools

import torch

from model.runtime.distributed import gather, sum_over_ranks

PIECE_NUMBERS = 2**22  # that a rank sends at a time
MOST_RANKS = 3  # that send fewer bytes in bf16: each gets all others' gradients, where a sum in float32 sends parts
BUFFER_BYTES = PIECE_NUMBERS * (4 + 2 * (MOST_RANKS + 1))  # at most


def sum_gradients(ranks, flat, reduce_dtype="float32"):
    """Sum the gradients and metrics of FlatParams over all ranks in place; all ranks get the same bits.

    With bf16 each rank rounds its gradients once; they are added in float32 in the order of the ranks.
    """
    if ranks.world_size == 1 or reduce_dtype == "float32":
        sum_over_ranks(ranks, flat.gradients_and_sums)
        return
    sum_over_ranks(ranks, flat.sums)
    added, sent, received = _buffers(ranks.world_size, flat.gradients.device)
    for piece in flat.gradients.split(PIECE_NUMBERS):
        count = len(piece)
        gather(ranks, sent[:count].copy_(piece), received[: ranks.world_size * count])
        piece.zero_()
        for part in received[: ranks.world_size * count].split(count):
            piece.add_(added[:count].copy_(part))  # a CPU would make its own float32 copy of the part


@functools.cache
def _buffers(world_size, device):
    """A piece in float32 and in bf16, and those of all ranks in bf16.

    The dry run makes them: after a vote nothing may fail, or one rank would leave the others in a gather.
    """
    return (
        torch.empty(PIECE_NUMBERS, device=device),
        torch.empty(PIECE_NUMBERS, dtype=torch.bfloat16, device=device),
        torch.empty(world_size * PIECE_NUMBERS, dtype=torch.bfloat16, device=device),
    )


def check_ranks(reduce_dtype, world_size):
    """Raise ValueError if bf16 would send as many bytes as float32 does."""
    if reduce_dtype == "bf16" and world_size > MOST_RANKS:
        raise ValueError(
            f"--reduce_dtype=bf16: {world_size} processes would send as many bytes as in float32 or more, only 2 or "
            f"{MOST_RANKS} send fewer: type --reduce_dtype=float32"
        )
