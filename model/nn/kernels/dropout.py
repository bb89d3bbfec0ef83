"""Triton kernels: dropout, with a residual sum or after ReLU, in one pass over memory.

The masks are those of model/nn/dropout.py, bit for bit. `_is_kept` draws them inside any kernel.
"""

import torch
import triton
import triton.language as tl

from model.nn import philox

MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, philox.MULTIPLIERS)
KEY_STEP_0, KEY_STEP_1 = map(tl.constexpr, philox.KEY_STEPS)
PHILOX_ROUNDS = tl.constexpr(philox.ROUNDS)
LEAST_COLUMNS = 8  # columns that a draw serves
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 4, 512  # of a program
NUMBERS_AT_ONCE = 2048  # of a program that draws nothing


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 of random bits, as model.nn.philox.philox."""
    for _ in tl.static_range(PHILOX_ROUNDS):
        high0, low0 = tl.umulhi(c0, MULTIPLIER_0), c0 * MULTIPLIER_0
        high2, low2 = tl.umulhi(c2, MULTIPLIER_1), c2 * MULTIPLIER_1
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += KEY_STEP_0
        k1 += KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def _load_words(pointers, mask):
    """Words of the counter (ROWS, 1), 0 outside of the mask."""
    return tl.load(pointers, mask=mask, other=0).to(tl.uint32, bitcast=True)[:, None]


@triton.jit
def _is_kept(
    STEP_KEY, TOKEN_KEYS, rows, num_rows, first_column, site, threshold, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """bool (ROWS, WIDTH): what the mask of `site` keeps, for these rows and WIDTH columns from `first_column` on.

    `first_column` and WIDTH are multiples of 8.
    """
    k0, k1 = tl.load(STEP_KEY).to(tl.uint32, bitcast=True), tl.load(STEP_KEY + 1).to(tl.uint32, bitcast=True)
    c0 = (site * 65536 + first_column // 8 + tl.arange(0, WIDTH // 8)).to(tl.uint32, bitcast=True)[None, :]
    tokens, is_real = TOKEN_KEYS + rows.to(tl.int64) * 3, rows < num_rows
    c1, c2, c3 = _load_words(tokens, is_real), _load_words(tokens + 1, is_real), _load_words(tokens + 2, is_real)
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, WIDTH // 2)  # w0, w1, w2, w3 side by side
    return tl.join(words & 0xFFFF, words >> 16).reshape(ROWS, WIDTH) >= threshold


@triton.jit(do_not_specialize=["num_rows", "site", "threshold"])
def dropout_forward(
    X, RESIDUAL, OUT, STEP_KEY, TOKEN_KEYS, num_rows, width, site, threshold, scale,
    HAS_RESIDUAL: tl.constexpr, HAS_RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """OUT = dropout(X), or dropout(relu(X)); RESIDUAL is added last. For ROWS rows and COLUMNS columns.

    `width` and the count below are specialised: loads take 16 bytes at once only where they are known multiples of 16.
    """
    rows, first_column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    is_real = (rows < num_rows)[:, None] & (columns < width)[None, :]
    offsets = rows[:, None].to(tl.int64) * width + columns[None, :]
    x = tl.load(X + offsets, mask=is_real, other=0.0).to(tl.float32)
    is_kept = _is_kept(STEP_KEY, TOKEN_KEYS, rows, num_rows, first_column, site, threshold, ROWS, COLUMNS)
    if HAS_RELU:
        is_kept = is_kept & ~(x <= 0)  # written so that NaN stays NaN
    x = tl.where(is_kept, x * scale, 0.0)
    if HAS_RESIDUAL:
        x += tl.load(RESIDUAL + offsets, mask=is_real, other=0.0).to(tl.float32)
    tl.store(OUT + offsets, x.to(OUT.dtype.element_ty), mask=is_real)


@triton.jit
def relu_dropout_backward(OUT, GRAD, count, scale, NUMBERS: tl.constexpr):
    """GRAD *= scale where OUT, the output of dropout after ReLU, is above 0, else 0: what was dropped is 0 there."""
    offsets = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_real = offsets < count
    out = tl.load(OUT + offsets, mask=is_real, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + offsets, mask=is_real, other=0.0).to(tl.float32)
    tl.store(GRAD + offsets, tl.where(out > 0, grad * scale, 0.0).to(GRAD.dtype.element_ty), mask=is_real)


def drop(x, residual, masks):
    """dropout(x) (N, width), plus `residual` if it is not None, as model.nn.dropout's."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, residual, out, masks, has_relu=False)
    return out


def relu_drop_(x, masks):
    """Overwrite x (N, width) by dropout(relu(x))."""
    assert x.is_contiguous()
    _launch(x, None, x, masks, has_relu=True)


def relu_drop_backward(grad, out, scale):
    """Gradient of the input of `relu_drop_`; written over `grad`, which only its output `out` has."""
    grad, count = grad.contiguous(), out.numel()
    relu_dropout_backward[(triton.cdiv(count, NUMBERS_AT_ONCE),)](out, grad, count, scale, NUMBERS=NUMBERS_AT_ONCE)
    return grad


def padded_width(width):
    """Columns of a tile that holds `width` columns: a power of two, and whole draws."""
    return max(triton.next_power_of_2(width), LEAST_COLUMNS)


def _launch(x, residual, out, masks, has_relu):
    columns = min(padded_width(x.shape[1]), COLUMNS_AT_ONCE)
    dropout_forward[triton.cdiv(len(x), ROWS_AT_ONCE), triton.cdiv(x.shape[1], columns)](
        x, residual, out, masks.step_key, masks.token_keys, *x.shape, masks.site, masks.threshold, masks.scale,
        HAS_RESIDUAL=residual is not None, HAS_RELU=has_relu, ROWS=ROWS_AT_ONCE, COLUMNS=columns,
    )  # fmt: skip
