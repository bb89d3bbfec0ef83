"""Triton kernel: cross-entropy of a chunk of logits and its gradient, computed together and in place."""

import torch
import triton
import triton.language as tl

COLUMNS, WARPS = 2048, 4  # logits per load, and who loads them


@triton.jit
def _load_logits(ROW, columns, vocabulary, stride):
    """Logits of these columns in float32, minus infinity beyond the vocabulary.

    The mask is that of the padded row: one at the vocabulary's end makes each load 2 bytes wide.
    """
    logits = tl.load(ROW + columns, mask=columns < stride, other=float("-inf")).to(tl.float32)
    return tl.where(columns < vocabulary, logits, float("-inf"))


@triton.jit
def cross_entropy(
    LOGITS, LABELS, LOSSES, vocabulary, stride, z_loss, label_smoothing, SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """LOSSES (3, rows) = cross-entropy, z-loss and what label smoothing adds, of each row of LOGITS.

    LOGITS is overwritten by the gradient of their sum: softmax(logits) - one_hot(label), if the latter two are off.
    One program per row. A negative label is padding. `label_smoothing` is 0 unless SMOOTHS.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    is_real = label >= 0  # padding has zero loss and zero gradient
    row_max, row_sum, logits_sum = float("-inf"), 0.0, 0.0
    for first in range(0, tl.where(is_real, vocabulary, 0), COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = _load_logits(LOGITS + row * stride, columns, vocabulary, stride)
        new_row_max = tl.maximum(row_max, tl.max(logits, 0))
        row_sum = row_sum * tl.exp(row_max - new_row_max) + tl.sum(tl.exp(logits - new_row_max), 0)
        row_max = new_row_max
        if SMOOTHS:
            logits_sum += tl.sum(tl.where(columns < vocabulary, logits, 0.0), 0)
    log_z = row_max + tl.log(row_sum)
    label_logit = tl.load(LOGITS + row * stride + label, mask=is_real, other=0.0).to(tl.float32)
    tl.store(LOSSES + row, tl.where(is_real, log_z - label_logit, 0.0))
    tl.store(LOSSES + tl.num_programs(0) + row, tl.where(is_real, z_loss * log_z * log_z, 0.0))
    added = label_smoothing * (label_logit - logits_sum / vocabulary)
    tl.store(LOSSES + 2 * tl.num_programs(0) + row, tl.where(is_real, added, 0.0))
    for first in range(0, stride, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = _load_logits(LOGITS + row * stride, columns, vocabulary, stride)
        grad = tl.exp(logits - log_z) * (1 + 2 * z_loss * log_z) - tl.where(columns == label, 1 - label_smoothing, 0.0)
        if SMOOTHS:
            grad -= tl.where(columns < vocabulary, label_smoothing / vocabulary, 0.0)
        grad = tl.where(is_real, grad, 0.0)
        tl.store(LOGITS + row * stride + columns, grad.to(LOGITS.dtype.element_ty), mask=columns < stride)


def cross_entropy_(logits, labels, vocabulary, z_loss, label_smoothing=0.0):
    """(cross-entropy, z-loss, what label smoothing adds) in nats, (3, C) float32, of each row of `logits` (C, W) over
    its first `vocabulary` columns.

    Overwrites `logits` with the gradient of their sum; the other columns' gradient is zero.
    """
    losses = torch.empty(3, len(labels), device=logits.device)
    cross_entropy[(len(labels),)](
        logits, labels, losses, vocabulary, logits.stride(0), float(z_loss), float(label_smoothing),
        SMOOTHS=label_smoothing > 0, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return losses
