"""Linear layer and cross-entropy that never hold all the logits.

Letters: N target tokens, C tokens of one chunk, D width, V vocabulary, W vocabulary with its padding.
"""

import torch

from model.weights import add_product, runs_kernels


def linear_cross_entropy(hidden_ND, weight_VD, labels_N, chunk_tokens=2048, z_loss=0.0, copy_WD=None):
    """Sum over target tokens of -log softmax(hidden @ weight.T)[label] + z_loss * log(Z)^2, in nats.

    A float32 scalar: the sum, not the mean, so that micro-batches and ranks add up. Memory: one chunk of
    `chunk_tokens` * V logits at a time; the gradients are computed in the forward pass, chunk by chunk. `copy_WD`:
    the weight in hidden's dtype, where it is at hand, with as many rows of zeros behind as its owner likes.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, z_loss, copy_WD)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, z_loss, copy_WD):
        copy_WD = weight_VD.to(hidden_ND.dtype) if copy_WD is None else copy_WD
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros(copy_WD.shape, device=copy_WD.device) if wants_weight else None
        losses = []
        for start in range(0, len(labels_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            loss, grad_CW = _chunk(hidden_ND[chunk], copy_WD, labels_N[chunk], len(weight_VD), z_loss)
            losses.append(loss)
            if wants_hidden:
                torch.mm(grad_CW, copy_WD, out=grad_hidden[chunk])
            if wants_weight:
                add_product(grad_weight, grad_CW.T, hidden_ND[chunk])
            del grad_CW  # before the next chunk's logits are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.vocabulary = len(weight_VD)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight = (None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors)
        return grad_hidden, None if grad_weight is None else grad_weight[: ctx.vocabulary], None, None, None, None


def _chunk(hidden_CD, copy_WD, labels_C, vocabulary, z_loss):
    """Loss sum of one chunk and its gradient with respect to the logits (C, W), in the dtype of `hidden_CD`."""
    logits_CW = hidden_CD @ copy_WD.T
    if runs_kernels(logits_CW):
        from model.fused import cross_entropy_  # a CPU build of torch comes without Triton

        return cross_entropy_(logits_CW, labels_C, vocabulary, z_loss).sum(), logits_CW
    logits_CV = logits_CW[:, :vocabulary].float()
    log_z_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
    label_C1 = labels_C[:, None]
    loss = (log_z_C1 - logits_CV.gather(1, label_C1)).sum() + z_loss * log_z_C1.square().sum()
    grad_CV = torch.exp(logits_CV.sub_(log_z_C1), out=logits_CV)
    if z_loss:
        grad_CV *= 1 + 2 * z_loss * log_z_C1
    grad_CV.scatter_add_(1, label_C1, torch.full_like(label_C1, -1, dtype=grad_CV.dtype))
    logits_CW[:, :vocabulary] = grad_CV
    logits_CW[:, vocabulary:] = 0
    return loss, logits_CW
