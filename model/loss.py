"""Linear layer and cross-entropy that never hold all the logits.

Letters: N target tokens, C tokens of one chunk, D width, V vocabulary.
"""

import torch


def linear_cross_entropy(hidden_ND, weight_VD, labels_N, chunk_tokens=2048, z_loss=0.0):
    """Sum over target tokens of -log softmax(hidden @ weight.T)[label] + z_loss * log(Z)^2, in nats.

    A float32 scalar: the sum, not the mean, so that micro-batches and ranks add up. Memory: one chunk of
    `chunk_tokens` * V logits at a time; the gradients are computed in the forward pass, chunk by chunk.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, z_loss)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, z_loss):
        weight = weight_VD.to(hidden_ND.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(labels_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            chunk_loss, grad_logits_CV = _chunk(hidden_ND[chunk], weight, labels_N[chunk], z_loss)
            loss += chunk_loss
            if wants_hidden:
                torch.mm(grad_logits_CV, weight, out=grad_hidden[chunk])
            if wants_weight:
                grad_weight += grad_logits_CV.T @ hidden_ND[chunk]
            del grad_logits_CV  # before the next chunk's logits are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grads = [None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors]
        return *grads, None, None, None


def _chunk(hidden_CD, weight_VD, labels_C, z_loss):
    """Loss sum of one chunk and its gradient with respect to the logits, in the dtype of `hidden_CD`."""
    logits_CV = (hidden_CD @ weight_VD.T).float()
    log_z_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
    label_C1 = labels_C[:, None]
    loss = (log_z_C1 - logits_CV.gather(1, label_C1)).sum() + z_loss * log_z_C1.square().sum()
    grad_CV = logits_CV.sub_(log_z_C1).exp_()  # softmax, in the logits' own memory
    if z_loss:
        grad_CV *= 1 + 2 * z_loss * log_z_C1
    grad_CV.scatter_add_(1, label_C1, torch.full_like(label_C1, -1, dtype=grad_CV.dtype))
    return loss, grad_CV.to(hidden_CD.dtype)
