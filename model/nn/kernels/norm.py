"""Triton kernels: the residual sum, with dropout, and the RMS norm of it in one pass over memory.

No two programs write to the same address, so results are bit-identical in every run.
"""

import torch
import triton
import triton.language as tl

from model.nn.kernels.dropout import _is_kept, padded_width
from model.nn.kernels.sums import add_to_gradient

# At most, in backward; each sums the weight's gradient over its share of the rows. Four on each of an H200's 132
# multiprocessors: with two, too few loads are under way to use its memory's bandwidth.
NORM_PROGRAMS = 512
# Rows that a program loads together where they have 512 to 1,024 numbers. Of narrower rows (heads) it loads as many
# numbers, or too few loads are under way; of wider ones it loads fewer rows: more do not fit its registers.
ROWS_AT_ONCE, LEAST_NUMBERS, MOST_NUMBERS = 4, 2048, 4096
LEAST_WEIGHT = tl.constexpr(1e-30)  # smaller norm weights are clamped, so that backward can divide by the weight


@triton.jit
def _norm_weight(WEIGHT, columns, width):
    weight = tl.load(WEIGHT + columns, mask=columns < width, other=0.0)
    return tl.where(tl.abs(weight) < LEAST_WEIGHT, LEAST_WEIGHT, weight)


@triton.jit(do_not_specialize=["num_rows", "site", "threshold"])
def norm_forward(
    X, ADDED, WEIGHT, SUM, NORMED, RSTD, STEP_KEY, TOKEN_KEYS, num_rows, width, epsilon, site, threshold, scale,
    HAS_ADDED: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """SUM = X + dropout(ADDED), NORMED = SUM / rms(SUM) * WEIGHT and RSTD = 1 / rms(SUM), for ROWS rows."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_real = (rows < num_rows)[:, None] & (columns < width)[None, :]
    offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
    x = tl.load(X + offsets, mask=is_real, other=0.0)
    if HAS_ADDED:
        added = tl.load(ADDED + offsets, mask=is_real, other=0.0).to(tl.float32)
        if HAS_DROPOUT:
            is_kept = _is_kept(STEP_KEY, TOKEN_KEYS, rows, num_rows, 0, site, threshold, ROWS, WIDTH)
            added = tl.where(is_kept, added * scale, 0.0)
        x = (x.to(tl.float32) + added).to(x.dtype)
        tl.store(SUM + offsets, x, mask=is_real)
    x = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)
    weight = _norm_weight(WEIGHT, columns, width)
    tl.store(NORMED + offsets, (x * rstd[:, None] * weight[None, :]).to(NORMED.dtype.element_ty), mask=is_real)
    tl.store(RSTD + rows, rstd, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "site", "threshold"])
def norm_backward(
    NORMED, WEIGHT, RSTD, GRAD_SUM, GRAD_NORMED, GRAD_X, GRAD_ADDED, GRAD_WEIGHT, STEP_KEY, TOKEN_KEYS,
    num_rows, width, site, threshold, scale,
    HAS_GRAD_SUM: tl.constexpr, HAS_DROPOUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """GRAD_X = GRAD_SUM + the gradient through the norm; GRAD_WEIGHT (programs, width) = each program's partial sum.

    Without HAS_GRAD_SUM only the norm was used, as in the norms of heads, and GRAD_SUM is not read.

    GRAD_ADDED, written with dropout only, is GRAD_X through the mask; without, the two gradients are equal.

    Recomputes the normalised input from the norm's output, which the next linear layer keeps for its own backward
    anyway, so the residual stream need not be kept.
    """
    columns = tl.arange(0, WIDTH)
    weight = _norm_weight(WEIGHT, columns, width)
    inverse = 1 / weight
    grad_weight = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        is_real = (rows < num_rows)[:, None] & (columns < width)[None, :]
        offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < num_rows, other=0.0)[:, None]
        unit = tl.load(NORMED + offsets, mask=is_real, other=0.0).to(tl.float32) * inverse[None, :]
        grad_normed = tl.load(GRAD_NORMED + offsets, mask=is_real, other=0.0).to(tl.float32)
        grad_weight += tl.sum(grad_normed * unit, 0)
        grad_unit = grad_normed * weight[None, :]
        grad = rstd * (grad_unit - unit * (tl.sum(grad_unit * unit, 1) / width)[:, None])
        if HAS_GRAD_SUM:
            grad += tl.load(GRAD_SUM + offsets, mask=is_real, other=0.0).to(tl.float32)
        tl.store(GRAD_X + offsets, grad.to(GRAD_X.dtype.element_ty), mask=is_real)
        if HAS_DROPOUT:
            is_kept = _is_kept(STEP_KEY, TOKEN_KEYS, rows, num_rows, 0, site, threshold, ROWS, WIDTH)
            grad = tl.where(is_kept, grad * scale, 0.0)
            tl.store(GRAD_ADDED + offsets, grad.to(GRAD_X.dtype.element_ty), mask=is_real)
    tl.store(GRAD_WEIGHT + tl.program_id(0) * width + columns, grad_weight, mask=columns < width)


def add_norm(x, added, weight, epsilon, masks=None):
    """(x + dropout(added), RMS norm of the sum times `weight`), each (N, width); an `added` of None adds nothing.

    `masks` are model.nn.dropout's; None or a probability of 0 drops nothing.
    """
    return _AddNorm.apply(x, added, weight, epsilon, masks)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, added, weight, epsilon, masks):
        has_added = added is not None
        has_dropout = has_added and masks is not None and masks.probability > 0
        total = torch.empty_like(x) if has_added else x
        normed, rstd = torch.empty_like(x), torch.empty(len(x), device=x.device)
        ctx.drawn, ctx.keys = _arguments(masks if has_dropout else None)
        ctx.tile = dict(HAS_DROPOUT=has_dropout) | _tile(x.shape[1])
        norm_forward[(triton.cdiv(len(x), ctx.tile["ROWS"]),)](
            x, added, weight, total, normed, rstd, *ctx.keys, *x.shape, epsilon, *ctx.drawn, HAS_ADDED=has_added,
            **ctx.tile,
        )  # fmt: skip
        ctx.save_for_backward(normed, rstd)
        ctx.weight, ctx.has_added = weight, has_added
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad_normed):
        (normed, rstd), weight = ctx.saved_tensors, ctx.weight
        if grad_total is None and ctx.has_added:  # once in a network, behind its last block: no kernel of its own
            grad_total = torch.zeros_like(normed)
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_normed = torch.zeros_like(normed) if grad_normed is None else grad_normed.contiguous()
        grad_x = torch.empty_like(normed)
        grad_added = torch.empty_like(normed) if ctx.tile["HAS_DROPOUT"] else grad_x
        num_programs = min(NORM_PROGRAMS, triton.cdiv(len(normed), ctx.tile["ROWS"]))
        parts = torch.empty(num_programs, len(weight), device=normed.device)
        norm_backward[(num_programs,)](
            normed, weight, rstd, grad_total, grad_normed, grad_x, grad_added, parts,
            *ctx.keys, *normed.shape, *ctx.drawn, HAS_GRAD_SUM=grad_total is not None, **ctx.tile,
        )  # fmt: skip
        grad_weight = add_to_gradient(weight, parts) if ctx.needs_input_grad[2] else None
        return grad_x, grad_added if ctx.has_added else None, grad_weight, None, None


def _tile(width):
    """The rows and columns that a program loads together."""
    columns = padded_width(width)
    return dict(ROWS=max(min(MOST_NUMBERS // columns, max(ROWS_AT_ONCE, LEAST_NUMBERS // columns)), 1), WIDTH=columns)


def _arguments(masks):
    """((site, threshold, scale), (step key, token keys)) of the masks, as the kernels take them; None draws nothing."""
    if masks is None:
        return (0, 0, 1.0), (None, None)
    return (masks.site, masks.threshold, masks.scale), (masks.step_key, masks.token_keys)
