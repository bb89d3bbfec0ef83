"""A model's weights in three flat tensors: float32 masters, their gradients, and copies in the compute dtype.

Weights that stand one after the other are one matrix to a product (q, k and v), and all of them are one tensor to the
cast, the reduction and the update. Gradients are summed in float32 where they lie, over micro-batches too.
"""

import functools
from importlib.util import find_spec

import torch
import torch.nn.functional as F

NUM_PARTS = 2  # of the loss: cross-entropy and z-loss
ROWS = 64  # a vocabulary is padded to a multiple: a GPU's products over an odd number are several times slower


class FlatParams:
    """Makes a model's parameters views of one tensor and their gradients views of another.

    Each parameter has `.grad`, None only while it is not trained, and `.copy`, its value in the compute dtype as of
    the last `refresh`. `vocabulary` is the parameter whose rows are padded with zeros. Masters and gradients have the
    layout: the trained weights stand first, the `matrices` of the layers behind the `others`, those of one shape one
    after the other. `loss_parts`, the sums that make up the loss, lie behind the gradients and are reduced with them.
    """

    def __init__(self, others, matrices, vocabulary, compute_dtype):
        by_shape = sorted(matrices, key=lambda p: p.shape)
        params = sorted([*others, *by_shape], key=lambda p: not p.requires_grad)
        sizes = [_padded(len(p)) * p.shape[1] if p is vocabulary else p.numel() for p in params]
        self.trained = [p for p in params if p.requires_grad]
        self.trained_sizes = sizes[: len(self.trained)]
        self.num_others = sum(p.requires_grad for p in others)  # of the trained
        device = params[0].device
        self.masters = torch.zeros(sum(sizes), device=device)
        self.copies = self.masters
        if compute_dtype != torch.float32:
            self.copies = torch.zeros(sum(sizes), device=device, dtype=compute_dtype)
        self.gradients_and_parts = torch.zeros(sum(self.trained_sizes) + NUM_PARTS, device=device)
        self.gradients, self.loss_parts = self.gradients_and_parts.split((sum(self.trained_sizes), NUM_PARTS))
        for p, master, copy in zip(params, self.masters.split(sizes), self.copies.split(sizes), strict=True):
            p.data, p.copy, p.grad = _as(p, master).copy_(p.data), _as(p, copy), None
        for p, gradient in zip(self.trained, self.gradients.split(self.trained_sizes), strict=True):
            p.grad = _as(p, gradient)

    def refresh(self):
        """Bring the copies up to date with the masters."""
        if self.copies is not self.masters:
            self.copies.copy_(self.masters)


def _padded(rows):
    return -(-rows // ROWS) * ROWS


def _as(p, flat):
    return flat[: p.numel()].view(p.shape)


def with_padding(view):
    """A vocabulary's `.copy` or `.grad` with the rows of zeros that follow it."""
    return view.as_strided((_padded(len(view)), view.shape[1]), view.stride(), view.storage_offset())


def joined(views):
    """Neighbouring matrices of one width as one matrix."""
    first, rows = views[0], sum(map(len, views))
    assert views[-1].storage_offset() + views[-1].numel() == first.storage_offset() + rows * first.shape[1]
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def product(x, *weights):
    """x @ w.T for each of `weights`, side by side: (N, width) to (N, sum of their rows). They must be neighbours."""
    return _Product.apply(x, *weights)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x)
        ctx.weights = weights
        return F.linear(x, joined([w.copy for w in weights]))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad_x = grad @ joined([w.copy for w in ctx.weights]) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            add_product(joined([w.grad for w in ctx.weights]), grad.T, x)
        return grad_x, *(None for _ in ctx.weights)  # already added


def columns(qkv):
    """q, k and v, views of the one to three tensors that hold them side by side."""
    width = sum(x.shape[1] for x in qkv) // 3
    return [part for x in qkv for part in x.split(width, dim=1)]


def embed(ids, weight):
    """Rows `ids` of `weight`'s copy, (N,) to (N, width)."""
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


def add_product(total, a, b):
    """total += a @ b, in float32 whatever the factors' dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def runs_kernels(x):
    """True where Triton kernels can work on `x`."""
    return x.is_cuda and has_triton()


@functools.cache
def has_triton():
    """True where the package triton is installed: a CPU build of torch comes without it."""
    return find_spec("triton") is not None
