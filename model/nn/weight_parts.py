"""The parts of the trained weights of which one rank each holds masters and optimizer state."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

EQUAL_UNIT = 64  # numbers, of which an equal part is a multiple: kernels read several at a time


@dataclass(frozen=True)
class Piece:
    """Numbers of a trained tensor that lie in a part."""

    tensor: nn.Parameter
    start: int  # of the tensor's numbers
    stop: int
    at: int  # where they lie in the part's flat tensors
    is_matrix: bool  # of a layer

    def of(self, flat):
        """View of the part's tensor `flat`; it has the tensor's shape where the piece is all of it."""
        view = flat[self.at : self.at + self.stop - self.start]
        return view.view(self.tensor.shape) if len(view) == self.tensor.numel() else view

    def whole(self, tensor):
        """View of the piece's numbers in a tensor of the shape of its own."""
        return tensor.view(-1)[self.start : self.stop]


@dataclass(frozen=True)
class WeightPart:
    """Adjacent numbers of the flat tensors."""

    start: int
    stop: int
    pieces: tuple  # Piece of each tensor that has numbers here
    sizes: tuple  # numbers of each, with the padding that follows them here

    @property
    def num_others(self):
        """The first of `pieces`, which are of no layer's matrix."""
        return sum(not piece.is_matrix for piece in self.pieces)


def weight_parts(flat, ends):
    """The WeightParts of a FlatParams that end at `ends`."""
    places = [*pairwise(accumulate(flat.trained_sizes, initial=0))]
    return tuple(_part(flat, places, start, stop) for start, stop in pairwise([0, *ends]))


def _part(flat, places, start, stop):
    pieces, sizes = [], []
    for number, (tensor, (first, end)) in enumerate(zip(flat.trained, places, strict=True)):
        low, high = max(start, first), min(stop, end)
        count = min(high - first, tensor.numel()) - (low - first)
        if count > 0:
            pieces.append(Piece(tensor, low - first, low - first + count, low - start, number >= flat.num_others))
            sizes.append(high - low)
    return WeightPart(start, stop, tuple(pieces), tuple(sizes))


def equal_ends(sizes, num_ranks):
    """Where parts end that share tensors of so many numbers equally, in units of EQUAL_UNIT."""
    total = sum(sizes)
    size = -(-total // (num_ranks * EQUAL_UNIT)) * EQUAL_UNIT
    return [min(rank * size, total) for rank in range(1, num_ranks + 1)]


def whole_ends(sizes, num_ranks):
    """Where parts of whole tensors end, which have so many numbers each, so that all are about as large."""
    stops, total = list(accumulate(sizes)), sum(sizes)
    owners = [int((stop - size / 2) * num_ranks / total) for stop, size in zip(stops, sizes, strict=True)]
    return [max((s for s, owner in zip(stops, owners, strict=True) if owner <= r), default=0) for r in range(num_ranks)]


@torch.no_grad()
def share(flat, ends, rank, keeps_masters=True, offloads=False):
    """Keep in a FlatParams the masters of this rank's part alone, of parts that end at `ends`.

    Its parameters become views of the copies; those that are read in float32, of the tensor `whole`. These are the
    masters too, unless it `keeps_masters`: then `masters` are the copies of the part. With `offloads` masters are in
    host memory, page-locked on a machine with a GPU, and whoever updates them writes the copies.
    """
    flat.refresh()
    flat.parts, flat.rank = weight_parts(flat, ends), rank
    flat.is_apart, flat.is_offloaded = True, offloads
    start, stop = flat.own.start, flat.own.stop
    if flat.copies.dtype == torch.float32:
        flat.masters = _on_host(flat.copies[start:stop]) if offloads else flat.copies[start:stop]
        return
    flat.whole = torch.cat([p.data.flatten() for p in flat.read_whole] or [flat.masters[:0]]).float()
    lay_there = flat.masters is flat.gradients
    if keeps_masters:
        own = flat.masters[start:stop]
        flat.masters = _on_host(own) if offloads else own.clone()
    else:
        flat.masters = flat.copies[start:stop]
    if lay_there:
        flat.gradients.zero_()
    for p in flat.trained:
        p.data = p.copy
    for p, part in zip(flat.read_whole, flat.whole.split([p.numel() for p in flat.read_whole]), strict=True):
        p.data = part.view(p.shape)


def _on_host(flat):
    """A copy in host memory, page-locked if it comes from a GPU."""
    return torch.empty(flat.shape, pin_memory=flat.is_cuda).copy_(flat)


@torch.no_grad()
def write_own(flat):
    """Write the masters of this rank's part to the copies, and to `whole`, where all others' become zero.

    An update of masters in host memory has written the copies.
    """
    if flat.whole is None:
        return  # the masters lie in the copies
    has_masters = flat.masters.dtype != flat.copies.dtype
    if has_masters and not flat.is_offloaded:
        flat.copies[flat.own.start : flat.own.stop].copy_(flat.masters)
    own = {id(piece.tensor): piece for piece in flat.own.pieces}
    for p in flat.read_whole:
        numbers, piece = p.data.view(-1), own.get(id(p))
        start, stop = (piece.start, piece.stop) if piece else (0, 0)
        numbers[:start].zero_()
        numbers[stop:].zero_()
        if has_masters and piece:
            numbers[start:stop].copy_(piece.of(flat.masters).view(-1))


def gradients_of(flat, piece):
    """The gradients of a Piece of this rank's part."""
    if flat.rounding and not piece.tensor.rounding:  # in float32, whole on every rank
        return piece.whole(piece.tensor.grad)
    return piece.of(flat.own_gradients)


def masters_of(flat, piece):
    """The masters of a Piece of this rank's part."""
    if flat.masters.dtype == torch.float32 or piece.tensor.dtype != torch.float32:
        return piece.of(flat.masters)
    return piece.whole(piece.tensor.data)
