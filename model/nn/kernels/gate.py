"""Triton kernels: the gated activation of a feed-forward layer and its gradient, in one pass over memory each.

The sigmoid gives all of them: silu(x) = x sigmoid(x), and gelu(x), in the tanh approximation, = x sigmoid(2 u) with u =
sqrt(2 / pi) (x + 0.044715 x^3), because tanh(u) = 2 sigmoid(2 u) - 1.
"""

import torch
import triton
import triton.language as tl

TWO_ROOTS, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 sqrt(2 / pi)
COLUMNS_AT_ONCE = 1024


@triton.jit
def _activation(x, NAME: tl.constexpr):
    """(activation(x), its derivative)."""
    if NAME == "relu":
        slope = tl.where(x > 0, 1.0, 0.0)
        return tl.where(x <= 0, 0.0, x), slope  # written so that NaN stays NaN
    if NAME == "gelu":
        cubic = x * x * CUBIC  # a tensor before a constant, which Triton's interpreter needs
        inner, inner_slope = x * (1 + cubic) * TWO_ROOTS, (1 + 3 * cubic) * TWO_ROOTS
    else:
        inner, inner_slope = x, 1.0
    share = 1 / (1 + tl.exp(-inner))
    return x * share, share + x * share * (1 - share) * inner_slope


@triton.jit
def _place(width, COLUMNS: tl.constexpr):
    """(row, columns, which of them are real)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(0).to(tl.int64), columns, columns < width


@triton.jit
def gate_forward(BOTH, OUT, width, NAME: tl.constexpr, COLUMNS: tl.constexpr):
    """OUT (N, width) = activation(first half of BOTH's columns) * second half, for one row and COLUMNS columns."""
    row, columns, is_real = _place(width, COLUMNS)
    first = tl.load(BOTH + row * 2 * width + columns, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(BOTH + row * 2 * width + width + columns, mask=is_real, other=0.0).to(tl.float32)
    out, _ = _activation(first, NAME)
    tl.store(OUT + row * width + columns, (out * second).to(OUT.dtype.element_ty), mask=is_real)


@triton.jit
def gate_backward(BOTH, GRAD, width, NAME: tl.constexpr, COLUMNS: tl.constexpr):
    """BOTH (N, 2 * width) becomes its gradient, for one row and COLUMNS columns of each half."""
    row, columns, is_real = _place(width, COLUMNS)
    first = tl.load(BOTH + row * 2 * width + columns, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(BOTH + row * 2 * width + width + columns, mask=is_real, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row * width + columns, mask=is_real, other=0.0).to(tl.float32)
    out, slope = _activation(first, NAME)
    BOTH += row * 2 * width
    tl.store(BOTH + columns, (grad * second * slope).to(BOTH.dtype.element_ty), mask=is_real)
    tl.store(BOTH + width + columns, (grad * out).to(BOTH.dtype.element_ty), mask=is_real)


def gated(both, name):
    """As model.nn.activations.gate's forward."""
    assert both.is_contiguous()
    width = both.shape[1] // 2
    out = torch.empty(len(both), width, dtype=both.dtype, device=both.device)
    gate_forward[_grid(out)](both, out, width, NAME=name, COLUMNS=_columns(width))
    return out


def gate_gradient_(both, grad, name):
    """Write the gradient of the input of `gated` over that input, `both` (N, 2 * width); returns it."""
    assert both.is_contiguous()
    width = grad.shape[1]
    gate_backward[_grid(grad)](both, grad.contiguous(), width, NAME=name, COLUMNS=_columns(width))
    return both


def _columns(width):
    return min(triton.next_power_of_2(width), COLUMNS_AT_ONCE)


def _grid(out):
    return len(out), triton.cdiv(out.shape[1], _columns(out.shape[1]))
