"""Triton kernels that do in one pass over memory what would each be several: residual sum and norm, softmax
cross-entropy and its gradient, the AdamW update. No two programs write to the same place: the same bits at every run.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

NORM_PROGRAMS = 264  # that share the rows in backward, each with its own part of the weight's gradient
ROWS_AT_ONCE = 4  # rows of one norm program
COLUMNS = 4096  # of the logits that are read at once
TILE = 4096  # weights of one update program
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


@triton.jit
def cross_entropy(LOGITS, LABELS, LOSSES, vocabulary, stride, z_loss, COLUMNS: tl.constexpr):
    """LOSSES (2, rows), cross-entropy and z-loss, of one row of LOGITS, and in the logits' place their gradient.

    Without a z-loss that is softmax minus the label's one. A negative label is padding.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    counts = label >= 0  # padding has neither loss nor gradient
    highest, total = float("-inf"), 0.0
    for first in range(0, tl.where(counts, vocabulary, 0), COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = tl.load(LOGITS + row * stride + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(logits, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(logits - new_highest), 0)
        highest = new_highest
    log_z = highest + tl.log(total)
    of_label = tl.load(LOGITS + row * stride + label, mask=counts, other=0.0).to(tl.float32)
    tl.store(LOSSES + row, tl.where(counts, log_z - of_label, 0.0))
    tl.store(LOSSES + tl.num_programs(0) + row, tl.where(counts, z_loss * log_z * log_z, 0.0))
    for first in range(0, stride, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        place = LOGITS + row * stride + columns
        logits = tl.load(place, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        grad = tl.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - tl.where(columns == label, 1.0, 0.0)
        grad = tl.where(counts, grad, 0.0)
        tl.store(place, grad.to(LOGITS.dtype.element_ty), mask=columns < stride)


def cross_entropy_(logits, labels, vocabulary, z_loss):
    """Cross-entropy and z-loss (2, C) of each row of `logits` (C, W), of which `vocabulary` columns count.

    Leaves the gradient of their sum in the logits' place.
    """
    losses = torch.empty(2, len(labels), device=logits.device)
    cross_entropy[(len(labels),)](
        logits, labels, losses, vocabulary, logits.stride(0), float(z_loss), COLUMNS=COLUMNS, num_warps=8
    )
    return losses


@triton.jit
def sums_of_squares(X, TILES, SUMS, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """SUMS of the squares of each tile of X."""
    places = tl.multiple_of(tl.load(TILES + 3 * tl.program_id(0) + 1), ALIGNMENT) + tl.arange(0, TILE)
    x = tl.load(X + places, mask=places < tl.load(TILES + 3 * tl.program_id(0) + 2), other=0.0)
    tl.store(SUMS + tl.program_id(0), tl.sum(x * x))


@triton.jit
def adamw_rms(
    WEIGHTS, GRADIENTS, AVERAGES, SQUARES, TILES, TENSORS, SIZES, SUMS, RATE, SCALE,
    beta1, beta2, correction1, root_correction2, epsilon, weight_decay, rms_floor,
    TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One tile of RMSScaledAdamW's update; SUMS: of the squares of the tiles of WEIGHTS."""
    tensor = tl.load(TILES + 3 * tl.program_id(0))
    total, last_tile = 0.0, tl.load(TENSORS + tensor + 1)
    for first_tile in range(tl.load(TENSORS + tensor), last_tile, 1024):
        tiles = first_tile + tl.arange(0, 1024)
        total += tl.sum(tl.load(SUMS + tiles, mask=tiles < last_tile, other=0.0))
    rate = tl.load(RATE)
    step = rate * tl.maximum(tl.sqrt(total / tl.load(SIZES + tensor)), rms_floor) / correction1
    places = tl.multiple_of(tl.load(TILES + 3 * tl.program_id(0) + 1), ALIGNMENT) + tl.arange(0, TILE)
    real = places < tl.load(TILES + 3 * tl.program_id(0) + 2)
    scale = tl.load(SCALE)
    gradient = tl.load(GRADIENTS + places, mask=real, other=0.0) * scale
    average = tl.load(AVERAGES + places, mask=real, other=0.0)
    average += (gradient - average) * (1 - beta1)
    square = tl.load(SQUARES + places, mask=real, other=0.0) * beta2 + gradient * gradient * (1 - beta2)
    update = average / (tl.sqrt(square) / root_correction2 + epsilon)
    weight = tl.load(WEIGHTS + places, mask=real, other=0.0)
    tl.store(WEIGHTS + places, weight * (1 - rate * weight_decay) - step * update, mask=real)
    tl.store(AVERAGES + places, average, mask=real)
    tl.store(SQUARES + places, square, mask=real)


@dataclass(frozen=True)
class UpdateTiles:
    """Neighbouring tensors cut into tiles, none of which belongs to two."""

    tiles: torch.Tensor  # (tiles, 3) int32: tensor, first place, last place + 1
    tensors: torch.Tensor  # (tensors + 1,) int32: the first tile of each
    sizes: torch.Tensor  # (tensors,) float32: numbers in each, without its padding
    alignment: int  # divides all first places: 16 where loads and stores can be wide


def update_tiles(padded_sizes, sizes, device):
    """UpdateTiles of tensors that take `padded_sizes` numbers each and hold `sizes`."""
    ends = np.cumsum(padded_sizes).tolist()
    tiles = [
        (tensor, first, min(first + TILE, end))
        for tensor, (size, end) in enumerate(zip(padded_sizes, ends, strict=True))
        for first in range(end - size, end, TILE)
    ]
    first_tiles = np.searchsorted([tile[0] for tile in tiles], np.arange(len(sizes) + 1))
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (tiles, first_tiles.tolist())]
    alignment = 16 if all(first % 16 == 0 for _, first, _ in tiles) else 1
    return UpdateTiles(*tensors, torch.tensor(sizes, dtype=torch.float32, device=device), alignment)


def update_adamw_rms(
    weights, gradients, averages, squares, tiles, rate, scale,
    beta1, beta2, correction1, correction2, epsilon, weight_decay, rms_floor,
):  # fmt: skip
    """RMSScaledAdamW's update of flat tensors in place; `rate` and `scale` (of the gradients) are on the device."""
    grid, options = (len(tiles.tiles),), dict(TILE=TILE, ALIGNMENT=tiles.alignment, num_warps=8)
    sums = torch.empty(len(tiles.tiles), device=weights.device)
    sums_of_squares[grid](weights, tiles.tiles, sums, **options)
    adamw_rms[grid](
        weights, gradients, averages, squares, tiles.tiles, tiles.tensors, tiles.sizes, sums, rate, scale,
        beta1, beta2, correction1, correction2**0.5, epsilon, weight_decay, rms_floor, **options,
    )  # fmt: skip
