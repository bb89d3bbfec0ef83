"""Dropout whose masks depend on what a number is (its step, example, token and site), not on where it lies.

A mask is drawn by model/nn/philox.py, so it is the same however a step is cut, padded or dealt to ranks, and when it is
computed again, by activation checkpointing or another attempt. No mask is kept: backward draws it again. The seed and
the step are read from the device, so a CUDA graph captured once draws the masks of every step.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from model.nn.flat_params import runs_kernels
from model.nn.philox import MASK, philox

LEVELS = 2**16  # a number is kept or dropped by 16 random bits, so a draw of Philox serves 8 columns
COLUMNS_PER_DRAW = 8
MAX_SITES = 2**16
ROWS_AT_ONCE = 256  # rows whose random bits are drawn together: they then stay in the CPU's cache


@dataclass(frozen=True)
class Masks:
    """The dropout masks of the tokens of one stack, at one site: a place in the network where dropout acts.

    The probability is rounded to a multiple of 1 / LEVELS, at least one. Masks of probability 0 need no tensors.
    """

    probability: float
    step_key: torch.Tensor | None = None  # (2,) int32 of the seed and the step, as from `step_key`
    token_keys: torch.Tensor | None = None  # (N, 3) int32, as from `token_keys`
    site: int = 0

    @property
    def threshold(self):
        """Random bits below this number drop."""
        return min(max(round(self.probability * LEVELS), 1), LEVELS - 1) if self.probability else 0

    @property
    def scale(self):
        """Factor of what is kept: 1 / (share that is kept)."""
        return LEVELS / (LEVELS - self.threshold)

    def at(self, offset):
        """The masks of the site `offset` after this one."""
        assert self.site + offset < MAX_SITES
        return replace(self, site=self.site + offset) if self.probability else self


NO_DROPOUT = Masks(0.0)


def step_key(seed, step):
    """Two int32 that differ for each seed and step: 64 bits of a sha256, Philox's key."""
    digest = hashlib.sha256(repr((seed, step)).encode()).digest()
    return np.frombuffer(digest[:8], "<i4").tolist()


def token_keys(ids, lengths, column):
    """int32 (tokens, 3): a key for each token of a column of the packed `ids`: the last three words of the counter.

    `lengths` are in tokens; `column` is 0 or 1. The words are 2 * (position in the example's column) + column, and the
    low and high half of the example's id.
    """
    lengths = np.asarray(lengths, np.int64)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    ids = np.repeat(np.asarray(ids, np.int64), lengths)
    words = np.stack([2 * position + column, ids & MASK, ids >> 32], axis=1)
    return words.astype(np.uint32).view(np.int32)


def dropout(x, masks):
    """x (N, width) with dropped numbers 0 and the others scaled by 1 / (share kept); x itself for probability 0."""
    return _Dropout.apply(x, None, masks) if masks.probability else x


def add_dropout(x, added, masks):
    """x + dropout(added), each (N, width)."""
    return _Dropout.apply(added, x, masks) if masks.probability else x + added


def relu_dropout(x, masks):
    """dropout(relu(x)) (N, width), in place of x."""
    return _ReluDropout.apply(x, masks) if masks.probability else F.relu(x, inplace=True)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, masks):
        ctx.masks = masks
        return _drop(x, residual, masks)

    @staticmethod
    def backward(ctx, grad):
        return _drop(grad, None, ctx.masks), grad if ctx.needs_input_grad[1] else None, None


class _ReluDropout(torch.autograd.Function):
    """Keeps only its output, which the next layer keeps anyway: what is above 0 there was kept and above 0 before."""

    @staticmethod
    def forward(ctx, x, masks):
        if runs_kernels(x):
            from model.nn.kernels.dropout import relu_drop_  # a CPU build of torch comes without Triton

            relu_drop_(x, masks)
        else:
            F.relu(x, inplace=True).masked_fill_(~is_kept(masks, x.shape[1]), 0).mul_(masks.scale)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.scale = masks.scale
        return x

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        if runs_kernels(out):
            from model.nn.kernels.dropout import relu_drop_backward  # a CPU build of torch comes without Triton

            return relu_drop_backward(grad, out, ctx.scale), None
        return torch.where(out > 0, grad * ctx.scale, 0), None


def _drop(x, residual, masks):
    """dropout(x), plus `residual` if it is not None."""
    if runs_kernels(x):
        from model.nn.kernels.dropout import drop  # a CPU build of torch comes without Triton

        return drop(x, residual, masks)
    dropped = torch.where(is_kept(masks, x.shape[1]), x * masks.scale, 0)
    return dropped if residual is None else residual + dropped


def is_kept(masks, width):
    """bool (N, width): what the masks keep."""
    kept = torch.empty(len(masks.token_keys), width, dtype=torch.bool, device=masks.token_keys.device)
    for rows, token_keys in zip(kept.split(ROWS_AT_ONCE), masks.token_keys.split(ROWS_AT_ONCE), strict=True):
        rows.copy_(random_bits(masks.step_key, token_keys, masks.site, width) >= masks.threshold)
    return kept


def random_bits(step_key, token_keys, site, width):
    """int64 (N, width), 16 random bits for each column; width is at most 2^19.

    A draw's words give two columns each, low half first.
    """
    draws = torch.arange(-(-width // COLUMNS_PER_DRAW), device=token_keys.device)
    counter = (draws + site * LEVELS, *(token_keys.long() & MASK)[:, :, None].unbind(1))
    words = torch.stack(philox(counter, (step_key.long() & MASK).unbind()), dim=2)
    return torch.stack([words & (LEVELS - 1), words >> 16], dim=3).flatten(1)[:, :width]
