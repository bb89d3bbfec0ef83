"""The sum of a step's gradients over ranks: sent in float32, or in bf16 and added in float32 (`reduce_dtype`)."""

import functools
from collections import deque

import torch

from model.runtime.distributed import collect_parts, send_parts, sum_over_ranks

PIECE_NUMBERS = 2**23  # of the gradients that are sent at a time in bf16
PIECES_AT_ONCE = 3  # while one is rounded, the second is exchanged and the sum of the third comes back


def sum_gradients(ranks, flat, reduce_dtype="float32"):
    """Sum the gradients and metrics of FlatParams over all ranks in place; all ranks get the same bits.

    With bf16 each rank rounds its gradients once, adds a part of them in float32 and rounds the sum once.
    """
    if ranks.world_size == 1 or reduce_dtype == "float32":
        sum_over_ranks(ranks, flat.gradients_and_sums)
        return
    sum_over_ranks(ranks, flat.sums)
    pieces = flat.gradients.split(PIECE_NUMBERS)
    buffers = _buffers(ranks.world_size, len(pieces[0]), min(len(pieces), PIECES_AT_ONCE), flat.gradients.device)
    _take_turns(_sum_in_bf16(ranks, piece, *buffers[n % PIECES_AT_ONCE]) for n, piece in enumerate(pieces))


def _take_turns(works):
    """Run generators of two pauses, at most PIECES_AT_ONCE at a time: in the pauses of one the next ones go on."""
    works, begun, done = deque(works), [], object()
    while works or begun:
        begun = [*([works.popleft()] if works else []), *begun]
        begun = [work for work in begun if next(work, done) is not done]


def _sum_in_bf16(ranks, piece, sent, received):
    """Sum `piece` (numbers,) over all ranks in place: a generator that pauses while its numbers travel.

    Each rank adds an equal part of the piece and sends the sum to all.
    """
    part = -(-len(piece) // ranks.world_size)
    sent, received = sent[: part * ranks.world_size], received[: part * ranks.world_size]
    sent[: len(piece)].copy_(piece)
    wait = send_parts(sent, received)
    yield
    wait()
    own = sent[part * ranks.rank : part * (ranks.rank + 1)]
    torch.sum(received.view(ranks.world_size, part), dim=0, out=own)  # PyTorch adds bf16 in float32
    wait = collect_parts(own, sent)
    yield
    wait()
    piece.copy_(sent[: len(piece)])


def buffer_bytes(numbers):
    """Bytes that a sum of so many gradients in bf16 holds: two of each number in `_buffers`."""
    count = min(-(-numbers // PIECE_NUMBERS), PIECES_AT_ONCE)
    return count * min(numbers, PIECE_NUMBERS) * (2 + 2)


@functools.cache
def _buffers(world_size, piece_numbers, count, device):
    """`count` pairs of tensors in bf16, each as long as a piece.

    The dry run makes them: after a vote nothing may fail, or one rank would leave the others in an exchange.
    """
    numbers = world_size * -(-piece_numbers // world_size)
    return [[torch.zeros(numbers, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in range(count)]
