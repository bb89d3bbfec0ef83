"""Triton kernel: partial sums of a weight's gradient, added to it in a fixed order."""

import torch
import triton
import triton.language as tl

TILE = dict(ROWS=256, COLUMNS=16)  # of the parts; few columns, so that a narrow weight still has many programs


@triton.jit(do_not_specialize=["num_parts"])
def add_sums(PARTS, TOTAL, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """TOTAL (width,) += the sum of PARTS (num_parts, width), for COLUMNS columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, num_parts, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_real = (rows < num_parts)[:, None] & (columns < width)[None, :]
        sums += tl.sum(tl.load(PARTS + rows[:, None] * width + columns[None, :], mask=is_real, other=0.0), 0)
    is_real = columns < width
    tl.store(TOTAL + columns, tl.load(TOTAL + columns, mask=is_real, other=0.0) + sums, mask=is_real)


def add_to_gradient(weight, parts):
    """Add the sum of `parts` (P, *weight's shape), float32, to weight.grad; returns the sum if that is None."""
    total = torch.zeros_like(parts[0]) if weight.grad is None else weight.grad
    add_sums[(triton.cdiv(weight.numel(), TILE["COLUMNS"]),)](parts, total, len(parts), weight.numel(), **TILE)
    return total if weight.grad is None else None
