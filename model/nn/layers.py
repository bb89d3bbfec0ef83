"""Layers that several families are built of."""

import torch
import torch.nn.functional as F
from torch import nn

from model.nn.dropout import NO_DROPOUT, add_dropout
from model.nn.flat_params import linear, runs_kernels


class Linear(nn.Module):
    """A linear layer's weight, and its bias if it has one. flat_params.linear applies adjacent ones in one product."""

    def __init__(self, num_in, num_out, init_std, has_bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.zeros(num_out)) if has_bias else None
        self.init_std = init_std

    def forward(self, x, masks=None):
        return linear(x, self.weight, biases=() if self.bias is None else (self.bias,), masks=masks)


def make_embedding(num_rows, width):
    """nn.Embedding without random weights, which on the meta device would import 900 modules in two seconds."""
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)


class ResidualNorm(nn.Module):
    """The residual sum and its RMS norm, which subtracts no mean and has no bias (Zhang and Sennrich 2019)."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x, added, masks=NO_DROPOUT):
        """(x + dropout(added), norm of the sum), each (N, width); an `added` of None adds nothing.

        `masks` are model.nn.dropout's; the norm's statistics are in float32.
        """
        if runs_kernels(x):
            from model.nn.kernels.norm import add_norm  # a CPU build of torch comes without Triton

            return add_norm(x, added, self.weight, self.epsilon, masks)
        x = x if added is None else add_dropout(x, added, masks)
        return x, F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)
