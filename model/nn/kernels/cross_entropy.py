"""Triton kernel: cross-entropy of a chunk of logits and its gradient, in one pass and in place."""

import torch
import triton
import triton.language as tl

COLUMNS = 4096  # of the logits that are read at once


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
