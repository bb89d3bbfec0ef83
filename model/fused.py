"""Triton kernels that do in one pass over memory what would each be several: residual sum and norm, softmax
cross-entropy and its gradient, the AdamW update. No two programs write to the same place: the same bits at every run.
"""

import numpy as np
import torch
import triton
import triton.language as tl

NORM_PROGRAMS = 512  # that share the rows in backward, each with its own part of the weight's gradient
ROWS_AT_ONCE = 4  # rows of one norm program
COLUMNS = 4096  # of the logits that are read at once
TILE = 4096  # weights of one update program


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
    weight = tl.load(WEIGHT + columns, mask=columns < width, other=0.0)
    tl.store(NORMED + place, (x * rstd[:, None] * weight[None, :]).to(NORMED.dtype.element_ty), mask=real)
    tl.store(RSTD + rows, rstd, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward(
    SUM, WEIGHT, RSTD, GRAD_SUM, GRAD_NORMED, GRAD_X, GRAD_WEIGHT, num_rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """GRAD_X = GRAD_SUM + the norm's own gradient; GRAD_WEIGHT (programs, width), each program's part."""
    columns = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + columns, mask=columns < width, other=0.0)
    grad_weight = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        real = (rows < num_rows)[:, None] & (columns < width)[None, :]
        place = rows[:, None].to(tl.int64) * width + columns[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)[:, None]
        unit = tl.load(SUM + place, mask=real, other=0.0).to(tl.float32) * rstd
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
        ctx.save_for_backward(total, weight, rstd)
        ctx.has_added = has_added
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        total, weight, rstd = ctx.saved_tensors
        grad_x = torch.empty_like(total)
        programs = min(NORM_PROGRAMS, triton.cdiv(len(total), ROWS_AT_ONCE))
        grad_weight = torch.empty(programs, len(weight), device=total.device)
        norm_backward[(programs,)](
            total, weight, rstd, grad_total.contiguous(), grad_normed.contiguous(), grad_x, grad_weight, *total.shape,
            ROWS=ROWS_AT_ONCE, WIDTH=triton.next_power_of_2(total.shape[1]),
        )  # fmt: skip
        return grad_x, grad_x if ctx.has_added else None, grad_weight.sum(0), None


@triton.jit
def cross_entropy(LOGITS, LABELS, LOSSES, vocabulary, stride, z_loss, COLUMNS: tl.constexpr):
    """LOSSES of one row of LOGITS, and in the logits' place their gradient: softmax minus the label's one."""
    row = tl.program_id(0).to(tl.int64)
    highest, total = float("-inf"), 0.0
    for first in range(0, vocabulary, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = tl.load(LOGITS + row * stride + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(logits, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(logits - new_highest), 0)
        highest = new_highest
    log_z = highest + tl.log(total)
    label = tl.load(LABELS + row)
    of_label = tl.load(LOGITS + row * stride + label).to(tl.float32)
    tl.store(LOSSES + row, log_z - of_label + z_loss * log_z * log_z)
    for first in range(0, stride, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        place = LOGITS + row * stride + columns
        logits = tl.load(place, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        grad = tl.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - tl.where(columns == label, 1.0, 0.0)
        tl.store(place, grad.to(LOGITS.dtype.element_ty), mask=columns < stride)


def cross_entropy_(logits, labels, vocabulary, z_loss):
    """Loss (C,) of each row of `logits` (C, W), of which `vocabulary` columns count; leaves their gradient in place."""
    losses = torch.empty(len(labels), device=logits.device)
    cross_entropy[(len(labels),)](
        logits, labels, losses, vocabulary, logits.stride(0), float(z_loss), COLUMNS=COLUMNS, num_warps=8
    )
    return losses


@triton.jit
def adamw_rms(WEIGHTS, GRADIENTS, AVERAGES, SQUARES, TILES, RATES, SCALARS, beta1, beta2, epsilon, TILE: tl.constexpr):
    """One tile of RMSScaledAdamW's update. SCALARS: weight decay's factor, root of the second bias correction."""
    tensor = tl.load(TILES + 3 * tl.program_id(0))
    places = tl.load(TILES + 3 * tl.program_id(0) + 1) + tl.arange(0, TILE)
    real = places < tl.load(TILES + 3 * tl.program_id(0) + 2)
    gradient = tl.load(GRADIENTS + places, mask=real, other=0.0)
    average = tl.load(AVERAGES + places, mask=real, other=0.0)
    average += (gradient - average) * (1 - beta1)
    square = tl.load(SQUARES + places, mask=real, other=0.0) * beta2 + gradient * gradient * (1 - beta2)
    update = average / (tl.sqrt(square) / tl.load(SCALARS + 1) + epsilon)
    weight = tl.load(WEIGHTS + places, mask=real, other=0.0)
    tl.store(WEIGHTS + places, weight * tl.load(SCALARS) + update * tl.load(RATES + tensor), mask=real)
    tl.store(AVERAGES + places, average, mask=real)
    tl.store(SQUARES + places, square, mask=real)


def update_tiles(sizes, device):
    """(tiles, 3) int32: of each tile of neighbouring tensors of these sizes, its tensor, first and last place + 1."""
    ends = np.cumsum(sizes)
    tiles = [
        (tensor, first, min(first + TILE, end))
        for tensor, (size, end) in enumerate(zip(sizes, ends.tolist(), strict=True))
        for first in range(end - size, end, TILE)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device)


def update_adamw_rms(weights, gradients, averages, squares, tiles, rates, scalars, beta1, beta2, epsilon):
    """RMSScaledAdamW's update of flat tensors in place. `rates` (tensors,): what each adds of its direction;
    `scalars` (2,): what is kept of a weight, and the root of the second moment's bias correction."""
    adamw_rms[(len(tiles),)](
        weights, gradients, averages, squares, tiles, rates, scalars, beta1, beta2, epsilon, TILE=TILE, num_warps=8
    )  # fmt: skip
