"""The sum of a step's gradients over ranks: sent in float32, or in bf16 and added in float32 (`reduce_dtype`)."""

import functools

import torch

from model.runtime.distributed import exchange, gather, sum_over_ranks

PIECE_NUMBERS = 2**24  # of the gradients that are summed at a time in bf16


def sum_gradients(ranks, flat, reduce_dtype="float32"):
    """Sum the gradients and metrics of FlatParams over all ranks in place; all ranks get the same bits.

    With bf16 each rank rounds its gradients once, adds a part of them in float32 in the order of the ranks, and rounds
    the sum once.
    """
    if ranks.world_size == 1 or reduce_dtype == "float32":
        sum_over_ranks(ranks, flat.gradients_and_sums)
        return
    sum_over_ranks(ranks, flat.sums)
    pieces = flat.gradients.split(PIECE_NUMBERS)
    buffers = _buffers(ranks.world_size, len(pieces[0]), flat.gradients.device)
    for piece in pieces:
        _sum_in_bf16(ranks, piece, buffers)


def _sum_in_bf16(ranks, piece, buffers):
    """Sum `piece` (numbers,) over all ranks in place, each of which adds an equal part of it and sends that to all."""
    part = -(-len(piece) // ranks.world_size)
    sent, received, total, addend = buffers
    sent, received = sent[: part * ranks.world_size], received[: part * ranks.world_size]
    sent[: len(piece)].copy_(piece)
    exchange(sent, received)
    first, *others = received.split(part)
    total = total[:part].copy_(first)
    for other in others:
        total.add_(addend[:part].copy_(other))  # a CPU would make its own float32 copy of `other`
    gather(first.copy_(total), sent)
    piece.copy_(sent[: len(piece)])


def buffer_bytes(numbers):
    """Most bytes that a sum of so many gradients in bf16 holds, on two ranks: two pieces, two halves in float32."""
    return min(numbers, PIECE_NUMBERS) * (2 + 2 + (4 + 4) // 2)


@functools.cache
def _buffers(world_size, piece_numbers, device):
    """Two pieces in bf16, and two parts of one in float32, each for one of so many ranks.

    The dry run makes them: after a vote nothing may fail, or one rank would leave the others in an exchange.
    """
    part = -(-piece_numbers // world_size)
    pieces = [torch.zeros(world_size * part, dtype=torch.bfloat16, device=device) for _ in range(2)]
    return *pieces, *(torch.empty(part, device=device) for _ in range(2))
