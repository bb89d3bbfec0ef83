"""Output projection and cross-entropy, computed in chunks so that all logits never exist at once.

Letters: N target tokens, C tokens per chunk, D width, V vocabulary size, W vocabulary size with padding.
"""

from functools import partial
from itertools import count

import torch

from model.nn.embedding import is_large
from model.nn.flat_params import add_matmul, add_values, runs_kernels, with_padding
from model.nn.guided_loss import guided_cross_entropy_
from model.nn.guides import NO_GUIDES, seen_ids, teacher_logits
from model.nn.loss_terms import PLAIN

ROWS_AT_ONCE = 64  # in cross_entropy_: its temporaries then stay in the CPU's cache


def linear_cross_entropy(
    hidden_ND, weight_VD, labels_N, chunk_tokens=2048, terms=PLAIN, copy_WD=None, guides=NO_GUIDES
):  # fmt: skip
    """(loss, parts): parts (3,) are the cross-entropy, z_loss * log(Z)^2 and what the other LossTerms add to them, each
    summed over target tokens.

    In nats, float32; a label below 0 counts nothing. `loss` is the sum of the parts and carries the gradient; `parts`
    carries none. They are sums, not means, so that micro-batches and ranks add up. With `label_smoothing` the loss has
    (1 - label_smoothing) times the cross-entropy plus label_smoothing times the mean of -log p over the vocabulary
    (Szegedy et al. 2016, arXiv 1512.00567). Terms that look at Guides are off without them. Of each network
    `chunk_tokens` * V logits exist at a time; the forward pass computes the gradients chunk by chunk. `copy_WD` is the
    weight in hidden's dtype, cast here if None; it may end with padding rows of zeros.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, copy_WD, (terms, guides))


def computes_logits_again(checkpointing, num_blocks, table_numbers):
    """Whether backward, which computes so many blocks again, computes the logits again too.

    So the gradient of a large output weight is added to its place chunk by chunk. It costs one product more.
    """
    return checkpointing >= num_blocks and is_large(table_numbers)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, copy_WD, terms_and_guides):
        copy_WD = weight_VD.to(hidden_ND.dtype) if copy_WD is None else copy_WD
        needs_hidden_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden_grad else None
        grad_weight = torch.zeros(copy_WD.shape, device=copy_WD.device) if needs_weight_grad else None
        parts = []
        for chunk, grad_CW, losses_3C in _chunks_of(
            hidden_ND, labels_N, copy_WD, chunk_tokens, len(weight_VD), *terms_and_guides
        ):
            parts.append(losses_3C.sum(1))
            if needs_hidden_grad:
                torch.mm(grad_CW, copy_WD, out=grad_hidden[chunk])
            if needs_weight_grad:
                add_matmul(grad_weight, grad_CW.T, hidden_ND[chunk])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight = weight_VD
        parts_3 = torch.stack(parts).sum(0)
        ctx.mark_non_differentiable(parts_3)
        return parts_3.sum(), parts_3

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = None if grad_hidden is None else grad_hidden.mul_(grad_loss)
        grad_weight = None if grad_weight is None else _scaled_gradient(ctx.weight, grad_weight, grad_loss)
        return grad_hidden, grad_weight, None, None, None, None


def _scaled_gradient(weight, gradient_WD, factor):
    """The gradient of `weight` times `factor`; on a GPU it is added to weight.grad in one pass, and None returned.

    So it is where the gradients are more precise than the weight, to whose dtype autograd would round them.
    """
    gradient = gradient_WD[: len(weight)]
    adds = weight.is_cuda or weight.dtype != gradient.dtype
    if not (adds and weight.is_leaf and weight.grad is not None):
        return gradient.mul_(factor)
    if getattr(weight, "rounding", None):
        add_values([weight], gradient.mul_(factor))
    else:
        weight.grad.addcmul_(gradient, factor)
    return None


def cross_entropy_again(hidden_ND, weight_VD, labels_N, chunk_tokens, terms, guides=NO_GUIDES):
    """As linear_cross_entropy of a weight with a flat gradient, to which backward adds the product of each chunk."""
    return _CrossEntropyAgain.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, (terms, guides))


class _CrossEntropyAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, terms_and_guides):
        ctx.save_for_backward(hidden_ND, labels_N)
        ctx.copy, ctx.chunk_tokens, ctx.weight = with_padding(weight_VD.copy), chunk_tokens, weight_VD
        ctx.terms_and_guides = terms_and_guides
        chunks = _chunks_of(hidden_ND, labels_N, ctx.copy, chunk_tokens, len(weight_VD), *terms_and_guides)
        parts_3 = torch.stack([losses_3C.sum(1) for _, _, losses_3C in chunks]).sum(0)
        ctx.mark_non_differentiable(parts_3)
        return parts_3.sum(), parts_3

    @staticmethod
    def backward(ctx, grad_loss, _):
        factors_N1 = grad_loss.expand(len(ctx.saved_tensors[1]), 1)
        add = partial(_add_chunk, ctx.weight, count())
        return _gradient_again(ctx, factors_N1, add, *ctx.terms_and_guides), None, None, None, None


def _add_chunk(weight, uses, grad_CW, hidden_CD):
    """Add the gradient of a chunk to that of an output weight; the next of `uses` counts the chunks before."""
    total = with_padding(weight.grad)
    if weight.rounding:
        weight.rounding.add_product(total, grad_CW.T, hidden_CD, next(uses))
    else:
        add_matmul(total, grad_CW.T, hidden_CD)


def _gradient_again(ctx, factors_N1, add, *terms_and_guides):
    """The gradient of hidden_ND by the first loss and the terms, times factors, with the logits computed again.

    `add` takes that of each chunk's logits, and its hidden states; None if the weight needs no gradient.
    """
    hidden_ND, labels_N = ctx.saved_tensors
    grad_hidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
    chunks = _chunks_of(hidden_ND, labels_N, ctx.copy, ctx.chunk_tokens, len(ctx.weight), *terms_and_guides)
    for chunk, grad_CW, _ in chunks:
        grad_CW.mul_(factors_N1[chunk])
        if grad_hidden is not None:
            torch.mm(grad_CW, ctx.copy, out=grad_hidden[chunk])
        if add:
            add(grad_CW, hidden_ND[chunk])
    return grad_hidden


def token_log_probs(hidden_ND, weight_VD, labels_N, chunk_tokens=2048, copy_WD=None, by_chunk=False):
    """Log-probability of each label in nats, (N,) float32; 0 where the label is below 0.

    Arguments are those of linear_cross_entropy. A loss may use the values before it knows the gradient: backward
    computes each chunk's logits again, so no more than `chunk_tokens` * V of them exist at a time. `by_chunk`: it adds
    the product of each chunk to the weight's flat gradient.
    """
    return _TokenLogProbs.apply(hidden_ND, weight_VD, labels_N, chunk_tokens, copy_WD, by_chunk)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, chunk_tokens, copy_WD, by_chunk):
        copy_WD = weight_VD.to(hidden_ND.dtype) if copy_WD is None else copy_WD
        ctx.save_for_backward(hidden_ND, labels_N)
        ctx.copy, ctx.chunk_tokens, ctx.weight, ctx.by_chunk = copy_WD, chunk_tokens, weight_VD, by_chunk
        chunks = _chunks_of(hidden_ND, labels_N, copy_WD, chunk_tokens, len(weight_VD))
        return torch.cat([-losses_3C[0] for _, _, losses_3C in chunks])

    @staticmethod
    def backward(ctx, grad_N):
        if ctx.by_chunk or not ctx.needs_input_grad[1]:
            add = partial(_add_chunk, ctx.weight, count()) if ctx.needs_input_grad[1] else None
            return _gradient_again(ctx, -grad_N[:, None], add), None, None, None, None, None
        grad_weight = torch.zeros(ctx.copy.shape, device=ctx.copy.device)

        def add(grad_CW, hidden_CD):
            add_matmul(grad_weight, grad_CW.T, hidden_CD)

        grad_hidden = _gradient_again(ctx, -grad_N[:, None], add)
        grad_weight = _scaled_gradient(ctx.weight, grad_weight, grad_N.new_ones(()))
        return grad_hidden, grad_weight, None, None, None, None


def _chunks_of(hidden_ND, labels_N, copy_WD, chunk_tokens, vocabulary, terms=PLAIN, guides=NO_GUIDES):
    """Yield (slice of the tokens, gradient of their losses by logits (C, W), cross_entropy_'s losses (3, C)).

    The gradients of all chunks share one buffer.
    """
    cross_entropy_, guided_cross_entropy_ = _functions_of(copy_WD)
    buffer_CW = hidden_ND.new_empty(min(chunk_tokens, len(labels_N)), len(copy_WD))
    for start in range(0, len(labels_N), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        labels_C = labels_N[chunk]
        logits_CW = torch.mm(hidden_ND[chunk], copy_WD.T, out=buffer_CW[: len(labels_C)])
        if guides:
            guided = _guided(guides, labels_N, chunk, vocabulary, terms)
            yield chunk, logits_CW, guided_cross_entropy_(logits_CW, labels_C, vocabulary, terms, guided)
        else:
            losses_3C = cross_entropy_(logits_CW, labels_C, vocabulary, terms.z_loss, terms.label_smoothing)
            yield chunk, logits_CW, losses_3C


def _guided(guides, labels_N, chunk, vocabulary, terms):
    """(logits of the teachers, ids seen before each target) of a chunk, as guided_cross_entropy_ takes them."""
    logits = teacher_logits(guides.teachers, chunk, vocabulary) if guides.teachers else None
    if guides.places_N is None:
        return logits, None
    return logits, seen_ids(labels_N, guides.places_N, chunk, terms.loops_ngram)


def _functions_of(tensor):
    """`cross_entropy_` and `guided_cross_entropy_`, as kernels where these run."""
    if not runs_kernels(tensor):
        return cross_entropy_, guided_cross_entropy_
    from model.nn.kernels import cross_entropy, guided_cross_entropy  # a CPU build of torch comes without Triton

    return cross_entropy.cross_entropy_, guided_cross_entropy.guided_cross_entropy_


def cross_entropy_(logits_CW, labels_C, vocabulary, z_loss, label_smoothing=0.0):
    """(cross-entropy, z-loss, what label smoothing adds) in nats, (3, C) float32, of each row of `logits_CW` over its
    first `vocabulary` columns.

    Overwrites `logits_CW` with the gradient of their sum; it is zero in the other columns. Rows whose label is below 0
    get zeros in all.
    """
    losses_3C = logits_CW.new_zeros(3, len(labels_C), dtype=torch.float32)
    for start in range(0, len(labels_C), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits, labels = logits_CW[rows, :vocabulary], labels_C[rows, None].clamp(min=0)
        grad = logits.float()  # no copy if the logits are float32: then the gradient is computed in place
        log_z, label_logits = grad.logsumexp(dim=1, keepdim=True), grad.gather(1, labels)
        losses_3C[0, rows] = (log_z - label_logits)[:, 0]
        losses_3C[1, rows] = z_loss * log_z.square()[:, 0]
        if label_smoothing:
            losses_3C[2, rows] = label_smoothing * (label_logits[:, 0] - grad.mean(dim=1))
        torch.exp(grad.sub_(log_z), out=grad)
        if z_loss:
            grad *= 1 + 2 * z_loss * log_z
        if label_smoothing:
            grad -= label_smoothing / vocabulary
        grad.scatter_add_(1, labels, torch.full_like(labels, label_smoothing - 1, dtype=grad.dtype))
        if len(without := (labels_C[rows] < 0).nonzero()):
            losses_3C[:, start + without[:, 0]], grad[without[:, 0]] = 0, 0
        if grad.dtype != logits.dtype:
            logits.copy_(grad)
    logits_CW[:, vocabulary:] = 0
    return losses_3C
