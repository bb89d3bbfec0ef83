"""Stochastic rounding to bf16: up or down with the probabilities that keep the mean (arXiv 2502.20566).

The random bits are Philox's of the key of a step and the position of the number among all weights: another attempt, a
resume and any number of ranks draw the same.
"""

import torch

from model.nn.flat_params import runs_kernels
from model.nn.philox import MASK, philox

NUMBERS_PER_DRAW = 8  # 16 random bits for each
NUMBERS_AT_ONCE = 2**16  # on a CPU, whose cache then holds the random bits


def round_to(out, values, position, key):
    """Write float32 `values` (N,) to `out` (N,) in bf16, each as one of its two neighbours there.

    `position` is that of the first, `key` (2,) int32 on the device. A number of bf16, and an infinite one, stays.
    """
    if runs_kernels(values):
        from model.nn.kernels.rounding import round_to_bf16  # a CPU build of torch comes without Triton

        round_to_bf16(out, values, position, key)
        return
    for start in range(0, len(values), NUMBERS_AT_ONCE):
        part = values[start : start + NUMBERS_AT_ONCE].view(torch.int32)
        rounded = (part + random_bits(position + start, len(part), key)) & -(2**16)
        out[start : start + len(part)].copy_(rounded.view(torch.float32))


def random_bits(position, count, key):
    """16 random bits of each of `count` positions, int32 (count,)."""
    first, stop = position // NUMBERS_PER_DRAW, -(-(position + count) // NUMBERS_PER_DRAW)
    draws = torch.arange(first, stop, device=key.device)
    zeros = torch.zeros_like(draws)
    words = torch.stack(philox((draws, zeros, zeros, zeros), (key.long() & MASK).unbind()), dim=1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2).flatten().int()
    return halves[position - first * NUMBERS_PER_DRAW :][:count]
