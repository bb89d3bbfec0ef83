"""Triton kernel: attention of each slot's newest token over the keys and values that the slot has in a cache.

Only the keys in use are read, so one graph of a step serves every length. A slot's head is one program; no two
programs write to the same address. Letters: S slots, H heads, N keys per load, D head width, W the power of
two that holds it: columns beyond D exist in registers alone, as zeros. Scores are not scaled.
"""

import torch
import triton
import triton.language as tl

from model.nn.kernels.head_rows import _is_real

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E); exp2 is a hardware instruction
KEYS_AT_ONCE = 64


@triton.jit
def _load_row(X, columns, D: tl.constexpr, W: tl.constexpr):
    """X at `columns` (W,); zeros beyond D."""
    if W == D:
        row = tl.load(X + columns)
    else:
        row = tl.load(X + columns, mask=columns < D, other=0.0)
    return row


@triton.jit
def _store_row(X, columns, row, D: tl.constexpr, W: tl.constexpr):
    """Store `row` (W,), but for what is beyond D, at `columns` of X."""
    if W == D:
        tl.store(X + columns, row)
    else:
        tl.store(X + columns, row, mask=columns < D)


@triton.jit(do_not_specialize=["most", "stride_bias"])
def decode_attention(
    QKV, KEYS, VALUES, BIAS, LENGTHS, OUT, stride_qkv, stride_slot, stride_head, stride_bias, num_heads, most,
    IS_OWN: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """OUT (S, H * D) = softmax(q K^T + bias) V over the first LENGTHS (S,), at most `most`, keys of each slot.

    With IS_OWN a row of QKV holds q, k and v: k and v are attended to as well and added to the cache, and BIAS (H,
    keys) has the bias of each distance back. Without, a row holds q alone and there is no bias.
    """
    slot, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, W)
    length = tl.minimum(tl.load(LENGTHS + slot), most).to(tl.int32)
    QKV += slot * stride_qkv + head * D
    KEYS += slot * stride_slot + head * stride_head
    VALUES += slot * stride_slot + head * stride_head
    q = _load_row(QKV, columns, D, W).to(tl.float32) * LOG2E
    row_max, row_sum, out = float("-inf"), 0.0, tl.zeros([W], tl.float32)
    if IS_OWN:
        QKV += num_heads * D
        new_k, new_v = _load_row(QKV, columns, D, W), _load_row(QKV + num_heads * D, columns, D, W)
        _store_row(KEYS + length * D, columns, new_k, D, W)
        _store_row(VALUES + length * D, columns, new_v, D, W)
        row_max = tl.sum(q * new_k.to(tl.float32), 0) + tl.load(BIAS + head * stride_bias).to(tl.float32) * LOG2E
        row_sum, out = 1.0, new_v.to(tl.float32)
    for first in range(0, length, N):
        keys = first + tl.arange(0, N)
        is_real, offsets = keys < length, keys[:, None] * D + columns[None, :]
        k = tl.load(KEYS + offsets, mask=_is_real(is_real, D, W), other=0.0).to(tl.float32)
        v = tl.load(VALUES + offsets, mask=_is_real(is_real, D, W), other=0.0).to(tl.float32)
        scores = tl.sum(k * q[None, :], 1)
        if IS_OWN:
            bias = tl.load(BIAS + head * stride_bias + length - keys, mask=is_real, other=0.0)
            scores += bias.to(tl.float32) * LOG2E
        scores = tl.where(is_real, scores, float("-inf"))
        new_row_max = tl.maximum(row_max, tl.max(scores, 0))
        weights, rescale = tl.exp2(scores - new_row_max), tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        out = out * rescale + tl.sum(weights[:, None] * v, 0)
        row_max = new_row_max
    out = out / tl.where(row_sum > 0, row_sum, 1.0)  # a slot without keys gets zeros
    _store_row(OUT + (slot * num_heads + head) * D, columns, out.to(OUT.dtype.element_ty), D, W)


def attend_one(qkv, cached, lengths, bias=None):
    """softmax(q k^T + bias) v of one token for each slot, (S, H * D).

    `cached` (2, S, H, tokens, D) holds keys and values, of which the first `lengths` (S,) of each slot count. With
    `bias` (H, tokens), by distance back, `qkv` is (S, 3 * H * D), and its k and v are written into the cache at column
    `lengths`, or the last one; without, `qkv` is q, (S, H * D).
    """
    keys, values = cached
    (slots, heads, tokens, width), is_own = keys.shape, bias is not None
    out = torch.empty(slots, heads * width, dtype=qkv.dtype, device=qkv.device)
    decode_attention[(slots, heads)](
        qkv, keys, values, bias, lengths, out, qkv.stride(0), keys.stride(0), keys.stride(1),
        bias.stride(0) if is_own else 0, heads, tokens - is_own, IS_OWN=is_own, D=width,
        W=triton.next_power_of_2(width), N=KEYS_AT_ONCE,
    )  # fmt: skip
    return out
