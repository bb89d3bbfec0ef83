"""Triton kernel: heads rotated by their positions, in one pass over memory."""

import torch
import triton
import triton.language as tl

ROWS_AT_ONCE = 16  # tokens that a program rotates together, for one head


@triton.jit(do_not_specialize=["num_rows"])
def rotary(
    X, OUT, COS, SIN, num_rows, stride_x, stride_out, half, num_rotated, num_scaled, scale,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """OUT = X, (num_rows, heads * 2 * half), with the pairs of the first heads rotated by COS and SIN and scaled."""
    head = tl.program_id(1)
    rows, pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    is_real = (rows < num_rows)[:, None] & (pairs < half)[None, :]
    columns = (head * 2 * half + pairs)[None, :]
    offsets = rows[:, None].to(tl.int64) * stride_x + columns
    first, second = tl.load(X + offsets, mask=is_real), tl.load(X + offsets + half, mask=is_real)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if head < num_rotated:
        angles = rows[:, None].to(tl.int64) * half + pairs[None, :]
        cos, sin = tl.load(COS + angles, mask=is_real), tl.load(SIN + angles, mask=is_real)
        x, y = x * cos - y * sin, y * cos + x * sin
    if head < num_scaled:
        x, y = x * scale, y * scale
    offsets = rows[:, None].to(tl.int64) * stride_out + columns
    tl.store(OUT + offsets, x.to(OUT.dtype.element_ty), mask=is_real)
    tl.store(OUT + offsets + half, y.to(OUT.dtype.element_ty), mask=is_real)


def rotated(x, cos, sin, num_rotated, num_scaled):
    """As model.nn.decoder.rotary.apply_rotary; `cos` and `sin` are (N, K / 2)."""
    half = cos.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(len(x), ROWS_AT_ONCE), x.shape[1] // (2 * half))
    rotary[grid](
        x, out, cos, sin, len(x), x.stride(0), out.stride(0), half, num_rotated, num_scaled, (2 * half) ** -0.5,
        ROWS=ROWS_AT_ONCE, HALF=triton.next_power_of_2(half),
    )  # fmt: skip
    return out
