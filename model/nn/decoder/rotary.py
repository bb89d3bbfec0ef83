"""Rotary positions: each pair of numbers of a head of q or k is rotated by an angle (Su et al. 2021, arXiv 2104.09864).

The angle grows with the token's position, at a frequency of its own for each pair. A pair is a number of the head's
first half with one of its second half, as in transformers.
"""

import functools
from dataclasses import dataclass

import torch

from model.nn.flat_params import runs_kernels


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of the angles of N tokens, for each of the K / 2 pairs of a head: (N, K / 2) float32 each."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_at(positions, model_config):
    """Rotary of tokens at these positions (N,), counted from the first token of their sequence."""
    c = model_config
    if c.rope_scaling:
        frequencies, factor = scaled_frequencies(c, positions.device)
        angles = positions[:, None].float() * frequencies
        return Rotary(angles.cos() * factor, angles.sin() * factor)
    powers = torch.arange(0, c.head_dim, 2, device=positions.device).float() / c.head_dim
    angles = positions[:, None].float() * (1.0 / c.rope_theta**powers)
    return Rotary(angles.cos(), angles.sin())


@functools.cache  # once: transformers computes them on the host, which a CUDA graph cannot capture
def scaled_frequencies(model_config, device):
    """(frequencies (K / 2,) on `device`, factor of cosine and sine) of positions that are scaled, from transformers."""
    from transformers import LlamaConfig  # imported late: a run needs no other part of transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    c, scaling = model_config, dict(model_config.rope_scaling)
    config = LlamaConfig(
        hidden_size=c.hidden_size, num_attention_heads=c.num_attention_heads, head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings, rope_parameters=scaling | dict(rope_theta=c.rope_theta),
    )  # fmt: skip
    with torch.inference_mode(False):
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
        return frequencies.to(device), factor


def rotate_heads(x, rotary, num_rotated, num_scaled=0, norm=None):
    """The heads of x, (N, heads * K), of which the first `num_rotated` are normed, if there is a `norm`, and rotated.

    The first `num_scaled` are also multiplied by K ** -0.5, by which attention scores are scaled. Backward may write
    over the gradient.
    """
    if runs_kernels(x):
        from model.nn.kernels import rotary as kernels  # a CPU build of torch comes without Triton

        return kernels.rotate_heads(x, rotary, num_rotated, num_scaled, norm)
    if norm is not None:
        width = len(norm.weight)
        first, others = x.split((num_rotated * width, x.shape[1] - num_rotated * width), dim=1)
        normed = norm(first.reshape(-1, width), None)[1].view(first.shape)
        x = torch.cat((normed, others), dim=1) if others.shape[1] else normed
    return _Rotate.apply(x, rotary, num_rotated, num_scaled)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotary, num_rotated, num_scaled):
        ctx.rotary, ctx.numbers = rotary, (num_rotated, num_scaled)
        return _rotated(x, rotary, num_rotated, num_scaled)

    @staticmethod
    def backward(ctx, grad):
        back = Rotary(ctx.rotary.cos, -ctx.rotary.sin)
        return _rotated(grad, back, *ctx.numbers), None, None, None


def _rotated(x, rotary, num_rotated, num_scaled):
    half = rotary.cos.shape[1]
    heads = x.contiguous().view(len(x), -1, 2, half)
    first, second = heads[:, :num_rotated].float().unbind(2)
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    out = heads.clone()
    out[:, :num_rotated, 0] = first * cos - second * sin
    out[:, :num_rotated, 1] = second * cos + first * sin
    out[:, :num_scaled] *= (2 * half) ** -0.5
    return out.view(x.shape)
