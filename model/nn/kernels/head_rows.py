"""Rows of one head, loaded and stored in Triton kernels; W is the power of two that holds the head width D."""

import triton
import triton.language as tl


@triton.jit
def _is_real(row_is_real, D: tl.constexpr, W: tl.constexpr):
    """Which numbers (rows, W) of rows of a head exist; (rows, 1) if all columns do, so that these need no mask."""
    if W == D:
        is_real = row_is_real[:, None]
    else:
        is_real = row_is_real[:, None] & (tl.arange(0, W) < D)[None, :]
    return is_real


@triton.jit
def _load_rows(X, rows, row_is_real, stride, head, D: tl.constexpr, W: tl.constexpr):
    """`rows` (rows, W) of one head of X; zeros where `row_is_real` is false and beyond D."""
    columns = head * D + tl.arange(0, W)
    pointers = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(pointers, mask=_is_real(row_is_real, D, W), other=0.0)


@triton.jit
def _store_rows(X, rows, row_is_real, stride, head, values, D: tl.constexpr, W: tl.constexpr):
    """Store `values` (rows, W), but for those beyond D, as the rows of one head of X where `row_is_real`."""
    columns = head * D + tl.arange(0, W)
    pointers = X + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(pointers, values.to(X.dtype.element_ty), mask=_is_real(row_is_real, D, W))
