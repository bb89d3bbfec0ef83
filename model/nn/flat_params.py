"""A model's weights in three flat tensors: float32 masters, their gradients, and copies in the compute dtype.

The cast, the all-reduce and the optimizer each work on one tensor. Adjacent weights (q, k and v) act as one matrix in
a matmul. Backward adds gradients to the flat tensor in float32, so they accumulate over micro-batches.
"""

import functools
from importlib.util import find_spec

import torch
import torch.nn.functional as F

NUM_LOSS_PARTS = 2  # cross-entropy and z-loss
VOCABULARY_MULTIPLE = 64  # rows of the padded embedding: a GPU's matmul with an odd number is several times slower


class FlatParams:
    """Makes a model's parameters views of one tensor and their gradients views of another.

    Each parameter gets `.grad` (None if it is frozen) and `.copy`, its value in the compute dtype as of the last
    `refresh`. The rows of `vocabulary`, the embedding, are padded with zeros. Masters and gradients share one order:
    trained weights before frozen ones; within each, `others` before the layers' `matrices`, which are sorted by shape.
    `loss_parts`, the sums that make up the loss, follow the gradients, so that one all-reduce covers both.
    """

    def __init__(self, others, matrices, vocabulary, compute_dtype):
        by_shape = sorted(matrices, key=lambda p: p.shape)
        params = sorted([*others, *by_shape], key=lambda p: not p.requires_grad)
        sizes = [_padded_rows(len(p)) * p.shape[1] if p is vocabulary else p.numel() for p in params]
        self.trained = [p for p in params if p.requires_grad]
        self.trained_sizes = sizes[: len(self.trained)]
        self.num_others = sum(p.requires_grad for p in others)  # the first of `trained`
        device = params[0].device
        self.masters = torch.zeros(sum(sizes), device=device)
        self.copies = self.masters
        if compute_dtype != torch.float32:
            self.copies = torch.zeros(sum(sizes), device=device, dtype=compute_dtype)
        self.gradients_and_parts = torch.zeros(sum(self.trained_sizes) + NUM_LOSS_PARTS, device=device)
        self.gradients, self.loss_parts = self.gradients_and_parts.split((sum(self.trained_sizes), NUM_LOSS_PARTS))
        for p, master, copy in zip(params, self.masters.split(sizes), self.copies.split(sizes), strict=True):
            p.data, p.copy, p.grad = _view_as(p, master).copy_(p.data), _view_as(p, copy), None
        for p, gradient in zip(self.trained, self.gradients.split(self.trained_sizes), strict=True):
            p.grad = _view_as(p, gradient)

    def refresh(self):
        """Copy the masters to the copies in the compute dtype."""
        if self.copies is not self.masters:
            self.copies.copy_(self.masters)


def _padded_rows(rows):
    return -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _view_as(p, flat):
    return flat[: p.numel()].view(p.shape)


def with_padding(view):
    """The embedding's `.copy` or `.grad`, (vocabulary, width), extended by its padding rows of zeros."""
    return view.as_strided((_padded_rows(len(view)), view.shape[1]), view.stride(), view.storage_offset())


def merge_adjacent(views):
    """View of adjacent matrices of the same width as one matrix (sum of their rows, width)."""
    first, rows = views[0], sum(map(len, views))
    assert views[-1].storage_offset() + views[-1].numel() == first.storage_offset() + rows * first.shape[1]
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def linear(x, *weights):
    """x @ torch.cat(weights).T, (N, width) to (N, sum of their rows); `weights` are adjacent in the flat tensor."""
    return _Linear.apply(x, *weights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x)
        ctx.weights = weights
        return F.linear(x, merge_adjacent([w.copy for w in weights]))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad_x = grad @ merge_adjacent([w.copy for w in ctx.weights]) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            add_matmul(merge_adjacent([w.grad for w in ctx.weights]), grad.T, x)
        return grad_x, *(None for _ in ctx.weights)  # backward has already added them to w.grad


def split_qkv(qkv):
    """[q, k, v] as views of the one to three tensors whose concatenated columns they are."""
    width = sum(x.shape[1] for x in qkv) // 3
    return [part for x in qkv for part in x.split(width, dim=1)]


def embed(ids, weight):
    """Embedding lookup in the compute dtype, (N,) to (N, width)."""
    return _Embed.apply(ids, weight)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight.copy)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        ctx.weight.grad += torch.ops.aten.embedding_dense_backward(grad.float(), ids, len(ctx.weight), -1, False)
        return None, None


def add_matmul(total, a, b):
    """total += a @ b, accumulated in the dtype of `total` (float32), whatever the dtype of a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def runs_kernels(x):
    """True if Triton kernels can run on `x`."""
    return x.is_cuda and has_triton()


@functools.cache
def has_triton():
    """True if the package triton is installed; a CPU build of torch comes without it."""
    return find_spec("triton") is not None
