"""The product of tokens with frozen matrices that have adapters: x @ (W + s B A).T.

Letters: N tokens, G adapters, R rank, I inputs, O outputs of one weight.

Many tokens are multiplied by W + s B A, a temporary in the compute dtype: to make it takes less time than more passes
over the tokens' inputs and outputs. The kernel that makes it in bf16 rounds so that an adapter far smaller than W still
counts. Few tokens, and those whose adapters have dropout, are multiplied by A and B one after the other.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.nn.activations import relu_backward, relu_product
from model.nn.dropout import Masks, dropout
from model.nn.flat_params import add_matmul, bias_of, matrix_of, merge_adjacent, runs_kernels


@dataclass(frozen=True)
class AdaptedProduct:
    """What tokens are multiplied by: adjacent frozen weights of one shape, of which some have adapters."""

    weights: tuple
    biases: tuple
    masks: Masks  # of the adapters' input
    has_relu: bool  # after the product, which then has no biases

    @property
    def adapters(self):
        return [weight.adapter for weight in self.weights if hasattr(weight, "adapter")]

    @property
    def places(self):
        """Places of the weights with adapters, as a slice: they are evenly spaced."""
        places = [place for place, weight in enumerate(self.weights) if hasattr(weight, "adapter")]
        step = places[1] - places[0] if len(places) > 1 else 1
        assert places == list(range(places[0], places[-1] + 1, step))
        return slice(places[0], places[-1] + 1, step)

    @property
    def scale(self):
        return self.adapters[0].scale

    def factors(self, kind):
        """(A (G, R, I), B (G, O, R)), or their gradients: `kind` is copy or grad."""
        return tuple(
            merge_adjacent([getattr(factor, kind) for factor in same]).view(len(same), *same[0].shape)
            for same in zip(*((adapter.A, adapter.B) for adapter in self.adapters), strict=True)
        )

    def of_adapters(self, x):
        """View (G, N, O) of the columns of x (N, weights * O) that belong to weights with adapters."""
        return x.view(len(x), len(self.weights), -1).transpose(0, 1)[self.places]

    def merges(self, x):
        """Whether x is multiplied by W + s B A."""
        is_exact = in_kernels(x) or x.dtype == torch.float32
        return is_exact and not self.masks.probability and len(x) >= min(self.weights[0].shape)

    def matrix(self, merges):
        """(weights * O, I): W, with s B A added if it `merges`."""
        matrix = matrix_of(self.weights)
        if not merges:
            return matrix
        (A, B), is_own = self.factors("copy"), hasattr(self.weights[0], "packed")
        if in_kernels(matrix):
            from model.nn.kernels.lora import merged  # a CPU build of torch comes without Triton

            return merged(matrix, A, B, self.places, self.scale, is_own)
        matrix = matrix if is_own else matrix.clone()
        matrix.view(len(self.weights), -1, matrix.shape[1])[self.places].baddbmm_(B, A, alpha=self.scale)
        return matrix

    def add_gradients(self, x, grad):
        """Add the adapters' gradients to the flat ones; returns s grad B, (N, G R). `x` is the adapters' input."""
        if in_kernels(x):
            from model.nn.kernels.lora import add_gradients  # a CPU build of torch comes without Triton

            return add_gradients(x, grad, self.factors("copy"), self.factors("grad"), self.places, self.scale)
        (A, B), (grad_A, grad_B) = self.factors("copy"), self.factors("grad")
        grad_GNO, up = self.of_adapters(grad), x.new_empty(len(x), A.shape[0] * A.shape[1])
        torch.mul(torch.bmm(grad_GNO, B), self.scale, out=_by_adapter(up, A))
        add_matmul(grad_B, grad_GNO.mT, _by_adapter(_down(x, A, self.scale), A))
        add_matmul(grad_A.flatten(0, 1), up.T, x)
        return up


def _down(x, A, scale):
    """s x A^T, (N, G R)."""
    return torch.addmm(x.new_empty(()), x, A.flatten(0, 1).T, beta=0, alpha=scale)


def _by_adapter(x, A):
    """View (G, N, R) of x (N, G R)."""
    return x.view(len(x), len(A), -1).transpose(0, 1)


def in_kernels(x):
    return runs_kernels(x) and x.dtype == torch.bfloat16


def adapted_product(x, product):
    """x (N, I) times the weights of an AdaptedProduct, (N, weights * O)."""
    factors = [factor for adapter in product.adapters for factor in (adapter.A, adapter.B)]
    return _AdaptedProduct.apply(x, product, *factors)  # the factors make the result need a gradient


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, product, *factors):
        ctx.product, ctx.merges = product, product.merges(x)
        matrix = product.matrix(ctx.merges)
        if ctx.merges and product.has_relu:
            out = relu_product(x, matrix)
        else:
            out = F.linear(x, matrix, bias_of(product.biases))
        if not ctx.merges:
            A, B = product.factors("copy")
            down = _down(dropout(x, product.masks), A, product.scale)
            product.of_adapters(out).baddbmm_(_by_adapter(down, A), B.mT)
            out = F.relu(out, inplace=True) if product.has_relu else out
        ctx.save_for_backward(x, out if product.has_relu else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        (x, out), product, grad = ctx.saved_tensors, ctx.product, grad.contiguous()
        grad = relu_backward(grad, out) if product.has_relu else grad
        up = product.add_gradients(dropout(x, product.masks), grad)
        grad_x = grad @ product.matrix(ctx.merges) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[0] and not ctx.merges:
            A = product.factors("copy")[0].flatten(0, 1)
            if product.masks.probability:
                grad_x += dropout(up @ A, product.masks)
            else:
                grad_x.addmm_(up, A)
        # backward has already added the adapters' gradients to the flat ones
        return grad_x, None, *(None for _ in ctx.needs_input_grad[2:])
