"""Activations of feed-forward layers; the gated ones keep only their input for backward."""

import functools

import torch
import torch.nn.functional as F

from model.nn.flat_params import add_product, linear, runs_kernels

aten = torch.ops.aten


def activate(x, name):
    """gelu or silu of `x`; relu is `relu_linear`, or with dropout model.nn.dropout's relu_dropout."""
    return {"gelu": F.gelu, "silu": F.silu}[name](x)


def gate(both, name):
    """activation(first half of the columns) * second half, (N, 2 F) to (N, F) (Shazeer 2020, arXiv 2002.05202).

    The gated gelu is the tanh approximation, as in transformers. Backward writes the gradient over `both`.
    """
    return _Gate.apply(both, name)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both, name):
        both = both.contiguous()
        ctx.save_for_backward(both)
        ctx.name = name
        if runs_kernels(both):
            from model.nn.kernels.gate import gated  # a CPU build of torch comes without Triton

            return gated(both, name)
        first, second = both.chunk(2, dim=1)
        return ACTIVATIONS[name](first) * second

    @staticmethod
    def backward(ctx, grad):
        (both,) = ctx.saved_tensors
        if runs_kernels(both):
            from model.nn.kernels.gate import gate_gradient_  # a CPU build of torch comes without Triton

            return gate_gradient_(both, grad, ctx.name), None
        first, second = both.chunk(2, dim=1)
        of_second = ACTIVATIONS[ctx.name](first).mul_(grad)
        # in place of `both`, which nothing else reads: beside it only N * F numbers more exist
        GRADIENTS[ctx.name](second.mul_(grad), first, grad_input=first)
        second.copy_(of_second)
        return both, None


ACTIVATIONS = dict(relu=F.relu, gelu=lambda x: F.gelu(x, approximate="tanh"), silu=F.silu)
GRADIENTS = dict(
    relu=lambda grad, x, grad_input: aten.threshold_backward(grad, x, 0, grad_input=grad_input),
    gelu=lambda grad, x, grad_input: aten.gelu_backward(grad, x, approximate="tanh", grad_input=grad_input),
    silu=aten.silu_backward,
)


def relu_linear(x, weight, masks=None):
    """relu(linear(x, weight, masks=masks)); on a GPU the product's own kernel applies the ReLU."""
    if hasattr(weight, "adapter"):
        return weight.adapter.linear(x, (weight,), (), masks, has_relu=True)
    return _ReluLinear.apply(x, weight) if runs_kernels(x) else F.relu(linear(x, weight), inplace=True)


class _ReluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        out = relu_product(x, weight.copy)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, out)
        ctx.weight = weight
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        grad = relu_backward(grad, out)
        if ctx.needs_input_grad[1]:
            add_product([ctx.weight], grad.T, x)
        return grad @ ctx.weight.copy if ctx.needs_input_grad[0] else None, None


def relu_backward(grad, out):
    """`grad` where relu's output `out` is above 0, else 0; written over `grad`, which only relu's output has."""
    if not grad.is_contiguous():  # numbers that share memory, as the gradient of a sum
        return torch.ops.aten.threshold_backward(grad, out, 0)
    return torch.ops.aten.threshold_backward(grad, out, 0, grad_input=grad)


def relu_product(x, matrix):
    """relu(x @ matrix.T), on a GPU in one launch."""
    if not x.is_cuda:
        return F.relu(x @ matrix.T, inplace=True)
    return torch._addmm_activation(_no_bias(len(matrix), x.dtype, x.device), x, matrix.T)


@functools.cache
@torch.inference_mode(False)  # what an answer makes first, training uses too
def _no_bias(width, dtype, device):
    return torch.zeros(width, dtype=dtype, device=device)
