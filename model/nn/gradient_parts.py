"""Parts of the flat gradients in the order in which backward completes them, so that a sum over ranks begins early."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import nn

# Shares of the blocks before each cut. Nothing hides the sum of the last part of backward, which has the first blocks:
# it is the smallest.
CUTS = (1 / 6, 5 / 12, 2 / 3)
LEAST_NUMBERS = 2**22  # fewer gradients than this are one part: its sum takes little more than its launch


@dataclass(frozen=True)
class GradientPart:
    """Gradients that backward completes together."""

    ranges: tuple  # (start, stop) of each in FlatParams.gradients_and_sums
    first_block: nn.Module | None  # complete once backward has left this block; None: at the end of backward


def gradient_parts(flat, blocks):
    """GradientParts of FlatParams, which cover its `gradients_and_sums`, in the order of backward.

    `blocks` are the network's, in the order of forward. A part has the matrices of adjacent blocks; the last one has
    all other weights too.
    """
    matrices, numbers = {id(p) for p in flat.trained[flat.num_others :]}, sum(flat.trained_sizes[flat.num_others :])
    blocks = [block for block in blocks if any(id(p) in matrices for p in block.parameters())]
    cuts = {round(cut * len(blocks)) for cut in CUTS if numbers >= LEAST_NUMBERS}
    firsts = sorted({0} | cuts - {len(blocks)})  # the block that begins each part, in the order of forward
    places = {
        id(p): place
        for place, (first, stop) in reversed([*enumerate(pairwise([*firsts, len(blocks)]))])
        for block in blocks[first:stop] for p in block.parameters()
    }  # fmt: skip
    owners = [places.get(id(p), 0) if id(p) in matrices else 0 for p in flat.trained]
    ranges = _ranges(owners, flat.trained_sizes, len(flat.gradients_and_sums))
    parts = [GradientPart(tuple(ranges[place]), blocks[first] if place else None) for place, first in enumerate(firsts)]
    return parts[::-1]


def _ranges(owners, sizes, end):
    """{owner: [(start, stop)]} of adjacent tensors of so many numbers with the same owner; the last ends at `end`."""
    ranges, owner, start, stop = defaultdict(list), 0, 0, 0
    for owner, same in groupby(zip(owners, sizes, strict=True), key=lambda item: item[0]):
        start, stop = stop, stop + sum(size for _, size in same)
        ranges[owner].append((start, stop))
    ranges[owner][-1:] = [(start, end)]  # the metrics' sums, complete before backward begins, follow the last gradient
    return ranges


@contextmanager
def reporting(parts, report):
    """While it lasts, a forward's backward calls `report(number)` as soon as parts[number] is complete.

    It calls again, later, if the network runs several times before one backward. What ends with backward, and what
    backward does not reach, is not reported.
    """
    handles = [
        part.first_block.register_forward_pre_hook(partial(_mark, partial(report, number)))
        for number, part in enumerate(parts) if part.first_block is not None
    ]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark(report, _block, inputs):
    """The block's inputs, the first of which reports when its gradient is there.

    Autograd runs the functions of a forward in the reverse order of their calls, so all later ones have ended by then.
    """
    return _Mark.apply(inputs[0], report), *inputs[1:]


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, report):
        ctx.report = report
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.report()
        return grad, None
