"""Triton kernels: heads normed if they have a norm, rotated by their positions and scaled, in one pass over memory.

A program takes some tokens of one head. Programs with the same tokens stand side by side, so that the second reads
their angles from the cache. No two write to the same address, so results are bit-identical in every run.
"""

import torch
import triton
import triton.language as tl

from model.nn.kernels.sums import add_to_gradient

PAIRS_AT_ONCE = 2048  # that a program loads together; with fewer, too few loads are under way
BACKWARD_PROGRAMS = 512  # at most; each sums the norm weight's gradient over its share of the tiles


@triton.jit
def _place(tile, num_rows, half, num_heads, ROWS: tl.constexpr, HALF: tl.constexpr):
    """(head, rows (ROWS, 1), pairs (1, HALF), which of the numbers are real) of a tile."""
    rows = (tile // num_heads) * ROWS + tl.arange(0, ROWS)
    pairs = tl.arange(0, HALF)
    is_real = (rows < num_rows)[:, None] & (pairs < half)[None, :]
    return tile % num_heads, rows[:, None].to(tl.int64), pairs[None, :], is_real


@triton.jit
def _load_pairs(X, offsets, half, is_real):
    """First and second number of each pair, float32; zeros where none is."""
    first = tl.load(X + offsets, mask=is_real, other=0.0).to(tl.float32)
    return first, tl.load(X + offsets + half, mask=is_real, other=0.0).to(tl.float32)


@triton.jit
def _store_pairs(OUT, offsets, half, x, y, is_real):
    tl.store(OUT + offsets, x.to(OUT.dtype.element_ty), mask=is_real)
    tl.store(OUT + offsets + half, y.to(OUT.dtype.element_ty), mask=is_real)


@triton.jit
def _angles(COS, SIN, rows, pairs, half, is_real):
    offsets = rows * half + pairs
    return tl.load(COS + offsets, mask=is_real, other=0.0), tl.load(SIN + offsets, mask=is_real, other=0.0)


@triton.jit
def _inverse_rms(x, y, half, epsilon):
    """1 / rms of each head, (ROWS, 1)."""
    return tl.rsqrt(tl.sum(x * x + y * y, 1) / (2 * half) + epsilon)[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_scaled"])
def rotary(
    X, OUT, KEPT, COS, SIN, WEIGHT, num_rows, stride, stride_kept, half, num_heads, num_scaled, scale, turn,
    epsilon, HAS_NORM: tl.constexpr, HAS_KEPT: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """OUT = the first heads of X (num_rows, heads * 2 * half), normed, rotated, and the first `num_scaled` scaled.

    OUT may be X. KEPT is a copy of those heads of X. A `turn` of -1 rotates the other way.
    """
    head, rows, pairs, is_real = _place(tl.program_id(0), num_rows, half, num_heads, ROWS, HALF)
    columns = head * 2 * half + pairs
    x, y = _load_pairs(X, rows * stride + columns, half, is_real)
    if HAS_KEPT:
        _store_pairs(KEPT, rows * stride_kept + columns, half, x, y, is_real)
    if HAS_NORM:
        inverse_rms = _inverse_rms(x, y, half, epsilon)
        weight_x, weight_y = _load_pairs(WEIGHT, pairs, half, pairs < half)
        x, y = x * inverse_rms * weight_x, y * inverse_rms * weight_y
    cos, sin = _angles(COS, SIN, rows, pairs, half, is_real)
    sin = sin * turn
    x, y = x * cos - y * sin, y * cos + x * sin
    if head < num_scaled:
        x, y = x * scale, y * scale
    _store_pairs(OUT, rows * stride + columns, half, x, y, is_real)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_scaled", "num_tiles"])
def rotary_norm_backward(
    KEPT, GRAD, COS, SIN, WEIGHT, GRAD_WEIGHT, num_rows, stride_kept, stride_grad, half, num_heads, num_scaled,
    num_tiles, scale, epsilon, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """GRAD of the output of `rotary`'s normed heads becomes that of its input, KEPT, whose rms is computed again.

    GRAD_WEIGHT (programs, 2 * half) = each program's partial sum.
    """
    columns = tl.arange(0, HALF)
    weight_x, weight_y = _load_pairs(WEIGHT, columns[None, :], half, (columns < half)[None, :])
    grad_weight_x, grad_weight_y = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        head, rows, pairs, is_real = _place(tile, num_rows, half, num_heads, ROWS, HALF)
        x, y = _load_pairs(KEPT, rows * stride_kept + head * 2 * half + pairs, half, is_real)
        grads = rows * stride_grad + head * 2 * half + pairs
        rotated_x, rotated_y = _load_pairs(GRAD, grads, half, is_real)
        cos, sin = _angles(COS, SIN, rows, pairs, half, is_real)
        if head < num_scaled:
            cos, sin = cos * scale, sin * scale
        grad_x, grad_y = rotated_x * cos + rotated_y * sin, rotated_y * cos - rotated_x * sin
        inverse_rms = _inverse_rms(x, y, half, epsilon)
        x, y = x * inverse_rms, y * inverse_rms
        grad_weight_x += tl.sum(grad_x * x, 0)
        grad_weight_y += tl.sum(grad_y * y, 0)
        grad_x, grad_y = grad_x * weight_x, grad_y * weight_y
        mean = (tl.sum(grad_x * x + grad_y * y, 1) / (2 * half))[:, None]
        _store_pairs(GRAD, grads, half, inverse_rms * (grad_x - x * mean), inverse_rms * (grad_y - y * mean), is_real)
    sums = tl.program_id(0) * 2 * half + columns
    _store_pairs(GRAD_WEIGHT, sums, half, grad_weight_x, grad_weight_y, columns < half)


def rotate_heads(x, angles, num_rotated, num_scaled, norm=None):
    """As model.nn.decoder.rotary.rotate_heads; may write over `x` (N, heads * K), which a product has just made."""
    assert x.is_contiguous()
    weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.epsilon)
    if torch.is_grad_enabled():
        return _RotateHeads.apply(x, weight, epsilon, angles, num_rotated, num_scaled)
    return _rotate(x, x, None, angles, (weight, epsilon), num_rotated, num_scaled)


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon, angles, num_rotated, num_scaled):
        width = 2 * angles.cos.shape[1] * num_rotated
        out, kept, copy = x, None, None
        if weight is not None and width == x.shape[1]:
            out, kept = torch.empty_like(x), x
        elif weight is not None:  # what follows the rotated heads stays where it is, and so does its gradient
            kept = copy = x.new_empty(len(x), width)
        _rotate(x, out, copy, angles, (weight, epsilon), num_rotated, num_scaled)
        if out is x:
            ctx.mark_dirty(x)
        ctx.save_for_backward(kept)
        ctx.weight, ctx.epsilon, ctx.angles, ctx.numbers = weight, epsilon, angles, (num_rotated, num_scaled)
        return out

    @staticmethod
    def backward(ctx, grad):
        (kept,), grad_weight = ctx.saved_tensors, None
        grad = grad.contiguous()  # attention has made it for this alone, so it may be written over
        if kept is None:
            _rotate(grad, grad, None, ctx.angles, (None, 0.0), *ctx.numbers, turn=-1.0)
        else:
            parts = _norm_gradients(kept, grad, ctx.angles, (ctx.weight, ctx.epsilon), *ctx.numbers)
            grad_weight = add_to_gradient(ctx.weight, parts) if ctx.needs_input_grad[1] else None
        return grad, grad_weight, None, None, None, None


def _rotate(x, out, copy, angles, norm, num_rotated, num_scaled, turn=1.0):
    """Launch `rotary`; `norm` is (weight or None, epsilon)."""
    (weight, epsilon), half = norm, angles.cos.shape[1]
    tile = _tile(half)
    rotary[(triton.cdiv(len(x), tile["ROWS"]) * num_rotated,)](
        x, out, copy, angles.cos, angles.sin, weight, len(x), x.stride(0), 2 * half * num_rotated, half,
        num_rotated, num_scaled, (2 * half) ** -0.5, turn, epsilon,
        HAS_NORM=weight is not None, HAS_KEPT=copy is not None, **tile,
    )  # fmt: skip
    return out


def _norm_gradients(kept, grad, angles, norm, num_rotated, num_scaled):
    """Partial sums (programs, K) of the norm weight's gradient; the rotated heads of `grad` become the input's."""
    (weight, epsilon), half = norm, angles.cos.shape[1]
    tile = _tile(half)
    num_tiles = triton.cdiv(len(kept), tile["ROWS"]) * num_rotated
    parts = torch.empty(min(BACKWARD_PROGRAMS, num_tiles), 2 * half, device=kept.device)
    rotary_norm_backward[(len(parts),)](
        kept, grad, angles.cos, angles.sin, weight, parts, len(kept), kept.stride(0), grad.stride(0), half,
        num_rotated, num_scaled, num_tiles, (2 * half) ** -0.5, epsilon, **tile,
    )  # fmt: skip
    return parts


def _tile(half):
    columns = triton.next_power_of_2(half)
    return dict(ROWS=max(PAIRS_AT_ONCE // columns, 1), HALF=columns)
