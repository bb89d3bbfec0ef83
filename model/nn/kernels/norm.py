"""Triton kernels that do in one pass over memory what would each be several: residual sum and norm, softmax
cross-entropy and its gradient, the AdamW update. No two programs write to the same place: the same bits at every run.
"""

import torch
import triton
import triton.language as tl

NORM_PROGRAMS = 264  # that share the rows in backward, each with its own part of the weight's gradient
ROWS_AT_ONCE = 4  # rows of one norm program
LEAST_WEIGHT = tl.constexpr(1e-30)  # a norm's weight below this counts as this: its output still tells its input


@triton.jit
def _norm_weight(WEIGHT, columns, width):
    weight = tl.load(WEIGHT + columns, mask=columns < width, other=0.0)
    return tl.where(tl.abs(weight) < LEAST_WEIGHT, LEAST_WEIGHT, weight)


@triton.jit(do_not_specialize=["num_rows"])
def norm_forward(
    X, ADDED, WEIGHT, SUM, NORMED, RSTD, num_rows, width, epsilon,
    HAS_ADDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """SUM = X + ADDED, NORMED = SUM / rms(SUM) * WEIGHT and RSTD = 1 / rms(SUM), of ROWS rows."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (rows < num_rows)[:, None] & (columns < width)[None, :]
    place = rows[:, None].to(tl.int64) * width + columns[None, :]
    x = tl.load(X + place, mask=real, other=0.0)
    if HAS_ADDED:
        x = (x.to(tl.float32) + tl.load(ADDED + place, mask=real, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(SUM + place, x, mask=real)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)
    weight = _norm_weight(WEIGHT, columns, width)
    tl.store(NORMED + place, (x * rstd[:, None] * weight[None, :]).to(NORMED.dtype.element_ty), mask=real)
    tl.store(RSTD + rows, rstd, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward(
    NORMED, WEIGHT, RSTD, GRAD_SUM, GRAD_NORMED, GRAD_X, GRAD_WEIGHT, num_rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """GRAD_X = GRAD_SUM + the norm's own gradient; GRAD_WEIGHT (programs, width), each program's part.

    From the norm's output, which the product behind it keeps anyway, so that the stream need not be kept.
    """
    columns = tl.arange(0, WIDTH)
    weight = _norm_weight(WEIGHT, columns, width)
    inverse = 1 / weight
    grad_weight = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        real = (rows < num_rows)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)[:, None]
        unit = tl.load(NORMED + place, mask=real, other=0.0).to(tl.float32) * inverse[None, :]
        grad_normed = tl.load(GRAD_NORMED + place, mask=real, other=0.0).to(tl.float32)
        grad_weight += tl.sum(grad_normed * unit, 0)
        grad_unit = grad_normed * weight[None, :]
        grad = rstd * (grad_unit - unit * (tl.sum(grad_unit * unit, 1) / width)[:, None])
        grad += tl.load(GRAD_SUM + place, mask=real, other=0.0).to(tl.float32)
        tl.store(GRAD_X + place, grad.to(GRAD_X.dtype.element_ty), mask=real)
    tl.store(GRAD_WEIGHT + tl.program_id(0) * width + columns, grad_weight, mask=columns < width)


def add_norm(x, added, weight, epsilon):
    """(x + added, its root-mean-square norm times `weight`), each (N, width); `added` None adds nothing."""
    return _AddNorm.apply(x, added, weight, epsilon)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, added, weight, epsilon):
        has_added = added is not None
        total = torch.empty_like(x) if has_added else x
        normed, rstd = torch.empty_like(x), torch.empty(len(x), device=x.device)
        norm_forward[(triton.cdiv(len(x), ROWS_AT_ONCE),)](
            x, added, weight, total, normed, rstd, *x.shape, epsilon,
            HAS_ADDED=has_added, ROWS=ROWS_AT_ONCE, WIDTH=triton.next_power_of_2(x.shape[1]),
        )  # fmt: skip
        ctx.save_for_backward(normed, weight, rstd)
        ctx.has_added = has_added
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        normed, weight, rstd = ctx.saved_tensors
        grad_x = torch.empty_like(normed)
        programs = min(NORM_PROGRAMS, triton.cdiv(len(normed), ROWS_AT_ONCE))
        grad_weight = torch.empty(programs, len(weight), device=normed.device)
        norm_backward[(programs,)](
            normed, weight, rstd, grad_total.contiguous(), grad_normed.contiguous(), grad_x, grad_weight, *normed.shape,
            ROWS=ROWS_AT_ONCE, WIDTH=triton.next_power_of_2(normed.shape[1]),
        )  # fmt: skip
        return grad_x, grad_x if ctx.has_added else None, grad_weight.sum(0), None
