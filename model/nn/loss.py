"""Linear layer and cross-entropy that never hold all the logits.

Letters: N target tokens, C tokens of one chunk, D width, V vocabulary, W vocabulary with its padding.
"""

import torch

from model.nn.flat_params import add_product, runs_kernels

ROWS_AT_ONCE = 64  # of the plain cross-entropy, whose temporaries then stay in the cache


def linear_cross_entropy(hidden_ND, weight_VD, labels_N, chunk_tokens=2048, z_loss=0.0, copy_WD=None):
    """(loss, its parts (2,)): sums over target tokens of -log softmax(hidden @ weight.T)[label] and z_loss * log(Z)^2.

    In nats, float32. The loss is what to differentiate, the sum of both parts, which carry no gradient. Sums, not
    means, so that micro-batches and ranks add up. Memory: one chunk of `chunk_tokens` * V logits at a time; the
    gradients are computed in the forward pass, chunk by chunk. `copy_WD`: the weight in hidden's dtype, where it is at
    hand, with as many rows of zeros behind as its owner likes.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, z_loss, copy_WD)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, z_loss, copy_WD):
        copy_WD = weight_VD.to(hidden_ND.dtype) if copy_WD is None else copy_WD
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros(copy_WD.shape, device=copy_WD.device) if wants_weight else None
        cross_entropy_ = _cross_entropy_of(copy_WD)
        parts = []
        buffer_CW = hidden_ND.new_empty(min(chunk_tokens, len(labels_N)), len(copy_WD))
        for start in range(0, len(labels_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            hidden_CD, labels_C = hidden_ND[chunk], labels_N[chunk]
            logits_CW = torch.mm(hidden_CD, copy_WD.T, out=buffer_CW[: len(labels_C)])
            parts.append(cross_entropy_(logits_CW, labels_C, len(weight_VD), z_loss).sum(1))
            if wants_hidden:
                torch.mm(logits_CW, copy_WD, out=grad_hidden[chunk])
            if wants_weight:
                add_product(grad_weight, logits_CW.T, hidden_CD)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.vocabulary = len(weight_VD)
        parts_2 = torch.stack(parts).sum(0)
        ctx.mark_non_differentiable(parts_2)
        return parts_2.sum(), parts_2

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = (None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors)
        return grad_hidden, None if grad_weight is None else grad_weight[: ctx.vocabulary], None, None, None, None


def _cross_entropy_of(tensor):
    if not runs_kernels(tensor):
        return cross_entropy_
    from model.nn.kernels.cross_entropy import cross_entropy_ as kernel  # a CPU build of torch comes without Triton

    return kernel


def cross_entropy_(logits_CW, labels_C, vocabulary, z_loss):
    """Cross-entropy and z-loss (2, C) of each row of `logits_CW`, of which `vocabulary` columns count.

    Leaves the gradient of their sum in the logits' place.
    """
    losses_2C = logits_CW.new_empty(2, len(labels_C), dtype=torch.float32)
    for start in range(0, len(labels_C), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits, labels = logits_CW[rows, :vocabulary], labels_C[rows, None]
        grad = logits.float()  # of float32 logits no copy: what follows happens in their place
        log_z = grad.logsumexp(dim=1, keepdim=True)
        losses_2C[0, rows] = (log_z - grad.gather(1, labels))[:, 0]
        losses_2C[1, rows] = z_loss * log_z.square()[:, 0]
        torch.exp(grad.sub_(log_z), out=grad)
        if z_loss:
            grad *= 1 + 2 * z_loss * log_z
        grad.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=grad.dtype))
        if grad.dtype != logits.dtype:
            logits.copy_(grad)
    logits_CW[:, vocabulary:] = 0
    return losses_2C
