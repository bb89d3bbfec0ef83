"""Rotary positions: each pair of numbers of a head of q or k is turned by an angle (Su et al. 2021, arXiv 2104.09864).

The angle grows with the token's position, at a rate of its own for each pair. A pair is a number of the head's first
half with one of its second half, as in transformers.
"""

from dataclasses import dataclass

import torch

from model.nn.flat_params import runs_kernels


@dataclass(frozen=True)
class Turns:
    """The angles of N tokens for each of the K / 2 pairs of a head of width K, (N, K / 2) float32 each."""

    cos: torch.Tensor
    sin: torch.Tensor


def turns_at(positions, head_dim, theta):
    """Turns of tokens at these positions (N,), counted from the first token of their sequence."""
    powers = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, None].float() * (1.0 / theta**powers)
    return Turns(angles.cos(), angles.sin())


def turn_heads(x, turns, num_turned, num_scaled=0):
    """The heads of x, (N, heads * K), of which the first `num_turned` are turned.

    The first `num_scaled` are also multiplied by K ** -0.5, by which attention scores are scaled.
    """
    return _TurnHeads.apply(x, turns, num_turned, num_scaled)


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turns, num_turned, num_scaled):
        ctx.turns, ctx.numbers = turns, (num_turned, num_scaled)
        return _turned(x, turns, num_turned, num_scaled)

    @staticmethod
    def backward(ctx, grad):
        back = Turns(ctx.turns.cos, -ctx.turns.sin)
        return _turned(grad, back, *ctx.numbers), None, None, None


def _turned(x, turns, num_turned, num_scaled):
    if runs_kernels(x):
        from model.nn.kernels.rotary import turned  # a CPU build of torch comes without Triton

        return turned(x, turns.cos, turns.sin, num_turned, num_scaled)
    half = turns.cos.shape[1]
    heads = x.contiguous().view(len(x), -1, 2, half)
    first, second = heads[:, :num_turned].float().unbind(2)
    cos, sin = turns.cos[:, None], turns.sin[:, None]
    out = heads.clone()
    out[:, :num_turned, 0] = first * cos - second * sin
    out[:, :num_turned, 1] = second * cos + first * sin
    out[:, :num_scaled] *= (2 * half) ** -0.5
    return out.view(x.shape)
