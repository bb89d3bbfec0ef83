"""The sum of a step's gradients over ranks: sent in float32, or in bf16 and added in float32 (`reduce_dtype`).

Where ranks share masters and state, each gets the sum of its part alone, and sends its weights once they are updated.
"""

import functools
from contextlib import contextmanager
from itertools import islice

import torch

from model.nn import gradient_parts
from model.nn.flat_params import norm
from model.nn.weight_parts import write_own
from model.runtime.distributed import sum_over_ranks
from model.runtime.exchange import collect_parts, exchange_parts, send_parts, sum_parts

PIECE_NUMBERS = 2**23  # of the gradients that are sent at a time in bf16; half as many in float32
PIECES_AT_ONCE = 3  # while one is rounded, the second is exchanged and the sum of the third comes back
_DTYPES = dict(float32=torch.float32, bf16=torch.bfloat16)


def sum_gradients(ranks, model, reduce_dtype="float32", ready=None):
    """Sum a model's gradients and metrics over all ranks in place; all ranks get the same bits.

    Gradients that are held in bf16 are sent in it.

    `ready` has an event of the device for each of model.gradient_parts: a part is sent once its event is reached, while
    the device still computes the next parts. Without events all are sent after the work that the device has. With bf16
    each rank rounds its gradients once, adds a part of them in float32 and rounds the sum once. Where ranks share
    masters and state, the sums are those of the rank's own part, in float32; all other gradients are then unknown.
    """
    if ranks.world_size == 1:
        return
    flat = model.flat
    reduce_dtype = "bf16" if flat.rounding else reduce_dtype
    if flat.is_shared:
        with _beside(ranks.device, waits=True):
            parts = [flat.gradients[part.start : part.stop] for part in flat.parts]
            if ranks.backend == "nccl" and reduce_dtype == "float32":
                sum_parts(ranks, parts)
            else:
                _sum_own_part(ranks, flat, parts, reduce_dtype)
            sum_over_ranks(ranks, flat.beside)
        return
    with _beside(ranks.device, waits=not ready):
        for number, part in enumerate(model.gradient_parts):
            if ready:
                ready[number].wait()
            _sum_part(ranks, flat, part, reduce_dtype)
        if reduce_dtype == "bf16":
            sum_over_ranks(ranks, flat.beside)


def _sum_part(ranks, flat, part, reduce_dtype):
    """Sum a GradientPart, with the metrics where they are in it; with bf16 without them."""
    if reduce_dtype == "float32":
        for start, stop in part.ranges:
            sum_over_ranks(ranks, flat.gradients_and_sums[start:stop])
        return
    buffers = _buffers(ranks.world_size, len(flat.gradients), flat.gradients.device, torch.bfloat16)
    pieces = [piece for start, stop in part.ranges for piece in flat.gradients[start:stop].split(PIECE_NUMBERS)]
    _take_turns(_sum_in_bf16(ranks, piece, *buffers[n % len(buffers)]) for n, piece in enumerate(pieces))


def _sum_own_part(ranks, flat, parts, reduce_dtype):
    """Sum over ranks, in this rank's part, the gradients; each rank sends every other one its part, in pieces."""
    buffers = _buffers(ranks.world_size, len(flat.gradients), flat.gradients.device, _DTYPES[reduce_dtype])
    length = len(buffers[0][0]) // ranks.world_size
    turns = enumerate(range(0, max(map(len, parts)), length))
    works = (
        _sum_piece(ranks.rank, [part[start : start + length] for part in parts], *buffers[n % len(buffers)])
        for n, start in turns
    )
    if len(buffers) == PIECES_AT_ONCE:
        _take_turns(works)
    else:
        for work in works:
            _take_turns(iter([work]))


def _sum_piece(rank, pieces, sent, received):
    """Sum in pieces[rank] those of all ranks: a generator of two pauses, the first while its numbers travel."""
    length = len(sent) // len(pieces)
    for piece, place in zip(pieces, sent.split(length), strict=True):
        place[: len(piece)].copy_(piece)
    wait = send_parts(sent, received)
    yield
    wait()
    own = pieces[rank]
    torch.sum(received.view(-1, length)[:, : len(own)], dim=0, dtype=own.dtype, out=own)  # added in float32
    yield


def gradient_norm(ranks, flat):
    """The norm of the gradients, which are summed over ranks; the same bits on all of them."""
    whole = flat.beside[: len(flat.beside) - len(flat.sums)]  # gradients that all ranks have
    own = norm(flat.own_gradients)
    own = sum_over_ranks(ranks, own.square()).sqrt() if flat.is_shared else own
    return torch.hypot(own, norm(whole))


def publish(ranks, flat):
    """Send the weights of this rank's part to the other ranks, and receive those of theirs, where ranks share them."""
    if not flat.is_shared:
        if flat.is_offloaded:
            write_own(flat)
        return
    write_own(flat)
    exchange_parts(ranks, [flat.copies[part.start : part.stop] for part in flat.parts])
    if flat.whole is not None:
        sum_over_ranks(ranks, flat.whole)  # each number is zero on all ranks but one


@contextmanager
def _beside(device, waits):
    """On a GPU, work on a stream of its own, for which later work waits; with `waits` it begins after earlier work."""
    if device.type != "cuda":
        yield
        return
    stream, current = _sending_stream(device), torch.cuda.current_stream(device)
    if waits:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@functools.cache
def _sending_stream(device):
    return torch.cuda.Stream(device, priority=-1)


def _take_turns(works):
    """Run generators of two pauses, at most PIECES_AT_ONCE at a time: in the pauses of one the next ones go on."""
    begun, done = [], object()
    while new := [*islice(works, 1), *begun]:
        begun = [work for work in new if next(work, done) is not done]


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


def buffer_bytes(numbers, number_bytes=2):
    """Bytes that a sum of so many gradients holds where they are sent in pieces: two of each number in `_buffers`."""
    return _buffer_pairs(numbers) * min(numbers, _piece_numbers(number_bytes)) * 2 * number_bytes


def _piece_numbers(number_bytes):
    """Numbers of so many bytes that are sent at a time."""
    return PIECE_NUMBERS * 2 // max(number_bytes, 2)


def _buffer_pairs(numbers):
    """Pieces of so many gradients that are under way at a time; those of a network without cuts are one piece."""
    return 1 if numbers < gradient_parts.LEAST_NUMBERS else PIECES_AT_ONCE


@functools.cache
def _buffers(world_size, numbers, device, dtype):
    """A pair of tensors, each as long as a piece of so many gradients, for each piece that is under way.

    The dry run makes them: after a vote nothing may fail, or one rank would leave the others in an exchange.
    """
    length = world_size * -(-min(numbers, _piece_numbers(dtype.itemsize)) // world_size)
    shape = dict(size=(length,), dtype=dtype, device=device)
    return [[torch.zeros(**shape) for _ in range(2)] for _ in range(_buffer_pairs(numbers))]
