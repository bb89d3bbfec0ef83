"""The sum of a step's gradients over ranks: sent in float32, or in bf16 and added in float32 (`reduce_dtype`)."""

import functools

import torch

from model.runtime.distributed import gather, sum_over_ranks

PIECE_NUMBERS = 2**22  # that a rank sends at a time
MOST_RANKS = 3  # that send fewer bytes in bf16: each gets all others' gradients, where a sum in float32 sends parts
BUFFER_BYTES = 2 * PIECE_NUMBERS * (MOST_RANKS + 1)  # at most


def sum_gradients(ranks, flat, in_bf16=False):
    """Sum the gradients and metrics of FlatParams over all ranks in place; all ranks get the same bits.

    With `in_bf16` each rank rounds its gradients to bf16 once; they are added in float32 in the order of the ranks.
    """
    if ranks.world_size == 1 or not in_bf16:
        sum_over_ranks(ranks, flat.gradients_and_sums)
        return
    sum_over_ranks(ranks, flat.sums)
    own, gathered = _buffers(ranks.world_size, flat.gradients.device)
    for piece in flat.gradients.split(PIECE_NUMBERS):
        sent, received = own[: len(piece)], gathered[: ranks.world_size * len(piece)]
        gather(ranks, sent.copy_(piece), received)
        torch.sum(received.view(ranks.world_size, -1), 0, dtype=torch.float32, out=piece)


@functools.cache
def _buffers(world_size, device):
    """bf16 (numbers of a piece,) and (those of all ranks,). The dry run makes them: nothing may fail after a vote."""
    return torch.empty(PIECE_NUMBERS * (1 + world_size), dtype=torch.bfloat16, device=device).tensor_split(
        [PIECE_NUMBERS]
    )


def check_ranks(reduce_dtype, world_size):
    """Raise ValueError if bf16 would send as many bytes as float32 does."""
    if reduce_dtype == "bf16" and world_size > MOST_RANKS:
        raise ValueError(
            f"--reduce_dtype=bf16: {world_size} processes send no fewer bytes so than in float32, only up to "
            f"{MOST_RANKS} do: leave it out"
        )
