"""Triton kernels: `guided_cross_entropy_` of model/nn/guided_loss.py, loss and gradient in place."""

import torch
import triton
import triton.language as tl

from model.nn.guided_loss import LEAST_ROOM
from model.nn.kernels.cross_entropy import COLUMNS, WARPS, _load_logits

KINDS = {"": 0, "unlikelihood": 1, "scalegrad": 2, "contrastive": 3}


@triton.jit
def log_normalisers(LOGITS, NORMS, vocabulary, stride, temperature, COLUMNS: tl.constexpr):
    """NORMS (rows,) = log of the sum of exp(logits / temperature) of each row."""
    row = tl.program_id(0).to(tl.int64)
    row_max, row_sum = float("-inf"), 0.0
    for first in range(0, vocabulary, COLUMNS):
        logits = _load_logits(LOGITS + row * stride, first + tl.arange(0, COLUMNS), vocabulary, stride) / temperature
        new_row_max = tl.maximum(row_max, tl.max(logits, 0))
        row_sum = row_sum * tl.exp(row_max - new_row_max) + tl.sum(tl.exp(logits - new_row_max), 0)
        row_max = new_row_max
    tl.store(NORMS + row, row_max + tl.log(row_sum))


@triton.jit
def _against_loops(seen, ids, label, label_logit, log_z, weight, least_room, KIND: tl.constexpr):
    """(loss, its gradient's share of the softmax, of the label, of the seen ids), for one row's `seen` logits."""
    is_wrong = (ids >= 0) & (ids != label)
    if KIND == 1:
        p = tl.exp(seen - log_z)
        room = tl.maximum(1 - p, least_room)
        rates = tl.where(is_wrong, weight * p / room, 0.0)
        loss = -weight * tl.sum(tl.where(is_wrong, tl.log(room), 0.0), 0)
        of_softmax, of_label = -tl.sum(rates, 0), 0.0
    elif KIND == 2:
        more = tl.where(ids >= 0, tl.exp(seen - log_z), 0.0) * (tl.exp(weight) - 1)
        total = tl.sum(more, 0)
        is_label = tl.max(tl.where(ids == label, 1.0, 0.0), 0)
        loss, rates = tl.log(1 + total) - weight * is_label, more / (1 + total)
        of_softmax, of_label = -total / (1 + total), 0.0
    else:
        beyond = tl.where(is_wrong, seen - label_logit, float("-inf"))
        most = tl.maximum(tl.max(beyond, 0), 0.0)
        loss = most + tl.log(tl.exp(-most) + tl.sum(tl.exp(beyond - most), 0))
        rates = weight * tl.exp(beyond - loss)
        loss, of_softmax, of_label = weight * loss, 0.0, -tl.sum(rates, 0)
    return loss, of_softmax, of_label, rates


@triton.jit
def _sums_of_row(LOGITS, length, vocabulary, stride, temperature, DISTILLS: tl.constexpr, COLUMNS: tl.constexpr):
    """(largest logit, sum of exp(logits - it), sum of the logits, the second at the temperature if DISTILLS) of a row.

    `length` is `vocabulary`, or 0 for padding.
    """
    row_max, row_sum, logits_sum, warm_sum = float("-inf"), 0.0, 0.0, 0.0
    for first in range(0, length, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = _load_logits(LOGITS, columns, vocabulary, stride)
        new_row_max = tl.maximum(row_max, tl.max(logits, 0))
        row_sum = row_sum * tl.exp(row_max - new_row_max) + tl.sum(tl.exp(logits - new_row_max), 0)
        if DISTILLS:
            warm_sum = warm_sum * tl.exp((row_max - new_row_max) / temperature)
            warm_sum += tl.sum(tl.exp((logits - new_row_max) / temperature), 0)
        row_max = new_row_max
        logits_sum += tl.sum(tl.where(columns < vocabulary, logits, 0.0), 0)
    return row_max, row_sum, logits_sum, warm_sum


@triton.jit
def _mean_of_teachers(
    TEACHERS, NORMS, row, rows, columns, shared, teacher_stride, num_teachers, temperature, COLUMNS: tl.constexpr
):
    """Probabilities (COLUMNS,) of the tokens `columns` at the temperature, the mean of all teachers."""
    p = tl.zeros((COLUMNS,), tl.float32)
    for number in range(0, num_teachers):
        place = number * rows + row
        teacher = _load_logits(TEACHERS + place * teacher_stride, columns, shared, teacher_stride)
        p += tl.exp(teacher / temperature - tl.load(NORMS + place))
    return p / num_teachers


@triton.jit
def guided_cross_entropy(
    LOGITS, LABELS, TEACHERS, NORMS, SEEN, LOSSES, vocabulary, stride, shared, teacher_stride, num_teachers, z_loss,
    label_smoothing, distill_weight, temperature, loops_weight, least_room,
    DISTILLS: tl.constexpr, KIND: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """LOSSES (3, rows) = cross-entropy, z-loss and what the other terms add, of each row of LOGITS.

    LOGITS is overwritten by the gradient of their sum. One program per row; a negative label is padding. TEACHERS has
    (num_teachers, rows) rows of `teacher_stride` logits, of which the first `shared` count, NORMS their normalisers at
    the temperature; both are read if DISTILLS. SEEN (rows, IDS) is read if there is a KIND.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    LOGITS += row * stride
    label = tl.load(LABELS + row)
    is_real = label >= 0
    length = tl.where(is_real, vocabulary, 0)
    row_max, row_sum, logits_sum, warm_sum = _sums_of_row(
        LOGITS, length, vocabulary, stride, temperature, DISTILLS, COLUMNS
    )
    log_z = row_max + tl.log(row_sum)
    label_logit = tl.load(LOGITS + label, mask=is_real, other=0.0).to(tl.float32)
    hard = 1 - distill_weight
    added = label_smoothing * hard * (label_logit - logits_sum / vocabulary) - distill_weight * (log_z - label_logit)
    slope, at_label = hard + 2 * z_loss * log_z, -hard * (1 - label_smoothing)
    if KIND > 0:
        ids = tl.where(is_real, tl.load(SEEN + row * IDS + tl.arange(0, IDS)), -1)
        is_seen = ids >= 0
        seen = tl.load(LOGITS + ids, mask=is_seen, other=0.0).to(tl.float32)
        loss, of_softmax, of_label, of_seen = _against_loops(
            seen, ids, label, label_logit, log_z, loops_weight, least_room, KIND
        )
        added, slope, at_label = added + loss, slope + of_softmax, at_label + of_label
    divergence, warm_z = 0.0, row_max / temperature + tl.log(warm_sum)
    for first in range(0, stride, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        logits = _load_logits(LOGITS, columns, vocabulary, stride)
        grad = tl.exp(logits - log_z) * slope + tl.where(columns == label, at_label, 0.0)
        grad -= tl.where(columns < vocabulary, hard * label_smoothing / vocabulary, 0.0)
        if DISTILLS:
            log_q = logits / temperature - warm_z
            p = _mean_of_teachers(
                TEACHERS, NORMS, row, rows, columns, shared, teacher_stride, num_teachers, temperature, COLUMNS
            )
            divergence += tl.sum(tl.where(p > 0, p * (tl.log(p) - log_q), 0.0), 0)
            grad += distill_weight * temperature * (tl.exp(log_q) - p)
        grad = tl.where(is_real & (columns < vocabulary), grad, 0.0)
        tl.store(LOGITS + columns, grad.to(LOGITS.dtype.element_ty), mask=columns < stride)
    if KIND > 0:
        tl.debug_barrier()  # other threads have stored what is read here
        grad = tl.load(LOGITS + ids, mask=is_seen, other=0.0).to(tl.float32) + of_seen
        tl.store(LOGITS + ids, grad.to(LOGITS.dtype.element_ty), mask=is_seen)
    added += distill_weight * temperature * temperature * divergence
    tl.store(LOSSES + row, tl.where(is_real, log_z - label_logit, 0.0))
    tl.store(LOSSES + rows + row, tl.where(is_real, z_loss * log_z * log_z, 0.0))
    tl.store(LOSSES + 2 * rows + row, tl.where(is_real, added, 0.0))


def guided_cross_entropy_(logits, labels, vocabulary, terms, guided):
    """As model.nn.guided_loss.guided_cross_entropy_."""
    teachers, seen = guided
    losses = torch.empty(3, len(labels), device=logits.device)
    norms, shared, num_teachers, teacher_stride, temperature = losses, 1, 0, 1, float(terms.distill_temperature)
    if teachers is not None:
        num_teachers, _, shared = teachers.shape
        teacher_stride, norms = teachers.stride(1), torch.empty(num_teachers, len(labels), device=logits.device)
        log_normalisers[(norms.numel(),)](
            teachers, norms, shared, teacher_stride, temperature, COLUMNS=COLUMNS, num_warps=WARPS
        )
    guided_cross_entropy[(len(labels),)](
        logits, labels, logits if teachers is None else teachers, norms, labels if seen is None else seen, losses,
        vocabulary, logits.stride(0), shared, teacher_stride, num_teachers, float(terms.z_loss),
        float(terms.label_smoothing), float(terms.distill_weight) if num_teachers else 0.0, temperature,
        float(terms.loops_weight), LEAST_ROOM, DISTILLS=num_teachers > 0,
        KIND=0 if seen is None else KINDS[terms.against_loops], IDS=1 if seen is None else seen.shape[1],
        COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return losses
