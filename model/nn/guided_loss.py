"""The loss of a chunk of logits whose targets are not all that it looks at: teachers' distributions, ids to avoid.

Letters: C tokens per chunk, V vocabulary size, W with padding, K teachers, S ids seen before a target, R rows.
"""

import math

import torch

ROWS_AT_ONCE = 64  # the temporaries then stay in a CPU's cache
LEAST_ROOM = 1e-5  # of 1 - p, whose logarithm unlikelihood takes, as in fairseq


def guided_cross_entropy_(logits_CW, labels_C, vocabulary, terms, guided):
    """(cross-entropy, z-loss, what the other LossTerms add) in nats, (3, C) float32, of each row of `logits_CW`.

    `guided` is (teachers' logits (K, C, first ids) or None, ids seen before each target (C, S) or None; -1 is no id).
    Overwrites `logits_CW` with the gradient of the sum of all. Rows whose label is below 0 get zeros. With
    s = distill_weight and t = distill_temperature the loss is
        (1 - s) * cross-entropy, smoothed or not, + s * t^2 * KL(teachers || student), both at the temperature t
    (Hinton et al. 2015, arXiv 1503.02531); teachers' probabilities are averaged.
    """
    teachers_KCV, seen_CS = guided
    losses_3C = logits_CW.new_zeros(3, len(labels_C), dtype=torch.float32)
    for start in range(0, len(labels_C), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits, labels = logits_CW[rows, :vocabulary], labels_C[rows]
        teachers = None if teachers_KCV is None else teachers_KCV[:, rows].float()
        seen = None if seen_CS is None else seen_CS[rows]
        losses_3R, gradient = _of_rows(logits.float(), labels.long(), terms, teachers, seen)
        is_target = labels >= 0
        losses_3C[:, rows] = torch.where(is_target, losses_3R, 0)
        logits.copy_(torch.where(is_target[:, None], gradient, 0))
    logits_CW[:, vocabulary:] = 0
    return losses_3C


def _of_rows(logits_RV, labels_R, terms, teachers_KRV, seen_RS):
    """(losses (3, R), gradient (R, V)) of rows of float32 logits."""
    log_z, labels = logits_RV.logsumexp(1, keepdim=True), labels_R[:, None].clamp(min=0)
    label_logits = logits_RV.gather(1, labels)
    hard = 1.0 if teachers_KRV is None else 1 - terms.distill_weight
    nll, smooth = log_z - label_logits, terms.label_smoothing
    added = (hard - 1) * nll + hard * smooth * (label_logits - logits_RV.mean(1, keepdim=True))
    slope, at_label = hard + 2 * terms.z_loss * log_z, torch.full_like(nll, -hard * (1 - smooth))
    gradient = (logits_RV - log_z).exp()
    if seen_RS is not None:
        loss, of_softmax, of_label, of_seen = against_loops(logits_RV, labels, log_z, seen_RS, terms)
        added, slope, at_label = added + loss, slope + of_softmax, at_label + of_label
    gradient.mul_(slope).sub_(hard * smooth / logits_RV.shape[1]).scatter_add_(1, labels, at_label)
    if seen_RS is not None:
        gradient.scatter_add_(1, seen_RS.clamp(min=0), of_seen)
    if teachers_KRV is not None:
        loss, of_logits = _distillation(logits_RV, teachers_KRV, terms)
        added, gradient = added + loss, gradient.add_(of_logits)
    return torch.cat([nll, terms.z_loss * log_z.square(), added], 1).T, gradient


def _distillation(logits_RV, teachers_KRV, terms):
    """(loss (R, 1), its gradient (R, V)): s t^2 KL(p || q), with p the mean of the teachers' distributions."""
    t, s, shared = terms.distill_temperature, terms.distill_weight, teachers_KRV.shape[2]
    p = (teachers_KRV / t).softmax(2).mean(0)
    log_q = (logits_RV / t).log_softmax(1)
    divergence = torch.xlogy(p, p).sub_(p * log_q[:, :shared]).sum(1, keepdim=True)
    gradient = log_q.exp()
    gradient[:, :shared] -= p
    return s * t * t * divergence, gradient.mul_(s * t)


def against_loops(logits_RV, labels_R1, log_z_R1, seen_RS, terms):
    """(loss (R, 1), its gradient's share of the softmax (R, 1), of the label (R, 1), of the seen ids (R, S)).

    With w = loops_weight and p the probabilities:
    - unlikelihood (Welleck et al. 2019, arXiv 1908.04319): -w times the sum of log(1 - p) over seen ids;
    - contrastive (Jiang et al. 2022, arXiv 2205.02517): w log(1 + the sum of exp(logit of a seen id - the label's));
    - scalegrad (Lin et al. 2021, arXiv 2106.07207): what the cross-entropy grows by if w is added to the logits of seen
      ids, the label's too if it is one; their gamma, which multiplies the probability of all others, is exp(-w).
    """
    w, seen = terms.loops_weight, logits_RV.gather(1, seen_RS.clamp(min=0))
    is_label = seen_RS == labels_R1
    if terms.against_loops == "scalegrad":
        more = torch.where(seen_RS >= 0, (seen - log_z_R1).exp(), 0) * math.expm1(w)
        total = more.sum(1, keepdim=True)
        loss = total.log1p() - w * is_label.any(1, keepdim=True)
        return loss, -total / (1 + total), torch.zeros_like(loss), more / (1 + total)
    is_wrong = (seen_RS >= 0) & ~is_label
    if terms.against_loops == "contrastive":
        beyond = torch.where(is_wrong, seen - logits_RV.gather(1, labels_R1), -torch.inf)
        loss = torch.cat([beyond, torch.zeros_like(labels_R1, dtype=beyond.dtype)], 1).logsumexp(1, keepdim=True)
        rates = w * (beyond - loss).exp()
        return w * loss, torch.zeros_like(loss), -rates.sum(1, keepdim=True), rates
    p = (seen - log_z_R1).exp()
    room = (1 - p).clamp(min=LEAST_ROOM)
    rates = torch.where(is_wrong, w * p / room, 0)
    loss = -w * torch.where(is_wrong, room.log(), 0).sum(1, keepdim=True)
    return loss, -rates.sum(1, keepdim=True), torch.zeros_like(loss), rates
