"""The tensors of a checkpoint, and those that ranks share: gathered on rank 0, or dealt out to the ranks again."""

from dataclasses import dataclass, field

import torch

from model.nn.weight_parts import masters_of
from model.runtime.distributed import broadcast

PIECE_NUMBERS = 2**22  # that a rank sends at a time


@dataclass(frozen=True)
class Snapshot:
    """The tensors of a checkpoint: weights by parameter name (an adapter's alone, if there is one), optimizer state by
    <parameter name>/<field>, the weights' average by parameter name, if there is one.
    """

    weights: dict
    optimizer: dict
    average: dict = field(default_factory=dict)

    @property
    def bytes(self):
        return sum(t.nbytes for tensors in (self.weights, self.optimizer, self.average) for t in tensors.values())


@dataclass(frozen=True)
class Stretch:
    """Adjacent numbers of a tensor of a Snapshot, which one rank holds."""

    rank: int
    is_state: bool  # of the optimizer; else a weight
    key: str  # in the Snapshot
    start: int
    numbers: torch.Tensor | None  # on their rank, one-dimensional; None on all others
    length: int

    def place(self, snapshot):
        """Where the numbers lie in the tensors of a Snapshot."""
        tensors = snapshot.optimizer if self.is_state else snapshot.weights
        return tensors[self.key].view(-1)[self.start : self.start + self.length]


def snapshot_of(model, optimizer):
    """A Snapshot that shares the memory of `model` and `optimizer`: the next update changes it.

    What ranks share is there in its whole size, without memory.
    """
    if model.flat.is_shared:
        return _shared_snapshot(model, optimizer)
    names = _names(model)
    moments = {
        f"{names[p]}/{name}": torch.as_tensor(value)
        for p, fields in optimizer.state.items()
        for name, value in fields.items()
        if value is not None
    }
    weights, average = model.saved_tensors(), {}
    if model.flat.is_offloaded and model.flat.masters.dtype == torch.float32:
        weights |= {names[piece.tensor]: piece.of(model.flat.masters) for piece in model.flat.own.pieces}
    if optimizer.average:
        average = weights | named_average(optimizer.average, model)
    return Snapshot(weights, moments, average)


def named_average(average, model):
    """{parameter name: its average} of a WeightAverage of `model`."""
    names = _names(model)
    return {names[p]: tensor for p, tensor in zip(average.flat.trained, average.tensors(), strict=True)}


def _names(model):
    return {p: name for name, p in model.named_parameters()}


def _shared_snapshot(model, optimizer):
    flat, names, weights, moments = model.flat, _names(model), model.saved_tensors(), {}
    for number, p in enumerate(flat.trained):
        dtype = torch.float32 if flat.masters.dtype == torch.float32 else p.dtype
        weights[names[p]] = torch.empty(p.shape, dtype=dtype, device="meta")
        for name in sorted(optimizer.fields_of(number >= flat.num_others)):
            shape = () if name == optimizer.count_field else p.shape
            moments[f"{names[p]}/{name}"] = torch.empty(shape, device="meta")
    return Snapshot(weights, moments)


def _stretches(model, optimizer):
    """Every Stretch of what ranks share, of at most PIECE_NUMBERS, in the same order on all ranks."""
    flat, names = model.flat, _names(model)
    for rank, part in enumerate(flat.parts):
        for piece in part.pieces:
            for name in ("", *sorted(optimizer.fields_of(piece.is_matrix))):
                key = f"{names[piece.tensor]}/{name}" if name else names[piece.tensor]
                start, stop = (0, 1) if name == optimizer.count_field else (piece.start, piece.stop)
                own = None
                if rank == flat.rank:
                    own = optimizer.state[piece.tensor][name] if name else masters_of(flat, piece)
                for first in range(start, stop, PIECE_NUMBERS):
                    last = min(first + PIECE_NUMBERS, stop)
                    numbers = None if own is None else own.view(-1)[first - start : last - start]
                    yield Stretch(rank, bool(name), key, first, numbers, last - first)


@torch.no_grad()
def gather(ranks, model, optimizer, snapshot, buffer):
    """Copy what the ranks share into the tensors of a Snapshot on rank 0; None elsewhere. Nothing is allocated.

    `buffer` is one of `make_buffer`.
    """
    for stretch in _stretches(model, optimizer):
        numbers = stretch.numbers
        if stretch.rank:
            sent = buffer[: stretch.length]
            broadcast(ranks, [sent if numbers is None else sent.copy_(numbers)], stretch.rank)
            numbers = sent
        if snapshot:
            stretch.place(snapshot).copy_(numbers, non_blocking=True)


@torch.no_grad()
def deal(ranks, model, optimizer, snapshot):
    """Copy to each rank what it has of the tensors of a Snapshot, which rank 0 has."""
    buffer = make_buffer(model)
    for stretch in _stretches(model, optimizer):
        sent = buffer[: stretch.length]
        if ranks.is_main:
            sent.copy_(stretch.place(snapshot))
        broadcast(ranks, [sent])
        if stretch.numbers is not None:
            stretch.numbers.copy_(sent)
    flat = model.flat
    if flat.is_offloaded and flat.masters.dtype == torch.float32:
        flat.copies[flat.own.start : flat.own.stop].copy_(flat.masters)


def make_buffer(model):
    """What `gather` sends numbers in."""
    return torch.empty(PIECE_NUMBERS, device=model.device)
