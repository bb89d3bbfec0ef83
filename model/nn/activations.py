"""Activations of feed-forward layers; the gated ones keep only their input for backward."""

import torch
import torch.nn.functional as F

from model.nn.flat_params import runs_kernels

aten = torch.ops.aten


def activate(x, name):
    """gelu or silu of `x`; relu is model.nn.dropout's relu_dropout."""
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
