"""Attention over packed examples, with a bias for each distance if the network has one.

Packed: one flat tensor holds the tokens of all examples of a micro-batch one after the other, without padding. No
example attends to another. On GPUs the Triton kernels of model/nn/kernels/attention.py compute it. This file holds the
reference implementation in PyTorch: it batches examples of similar lengths into dense blocks, so its cost grows with
the sum of the squared lengths, not with the square of their sum.

Letters: N tokens, B examples per block, H heads, K head width, T queries, S keys.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from model.nn.flat_params import has_triton, split_qkv
from model.nn.packed_layout import PackedLayout, packed_tiles


@dataclass(frozen=True)
class PadIndices:
    """Row indices from packed to padded tokens (a gather) and back."""

    padded_rows: torch.Tensor  # (padded tokens,) a row of the packed tokens; padding repeats its example's first row
    packed_rows: torch.Tensor  # (N,) a row of the padded tokens

    def to(self, device):
        return PadIndices(self.padded_rows.to(device), self.packed_rows.to(device))


@dataclass(frozen=True)
class DenseBlock:
    """Examples computed together, padded to T queries and S keys each."""

    shape: tuple[int, int, int]  # B, T, S
    key_is_pad: torch.Tensor  # (B, 1, 1, S)

    def to(self, device):
        return DenseBlock(self.shape, self.key_is_pad.to(device))


@dataclass(frozen=True)
class Layout:
    """How packed examples are grouped into blocks of similar lengths."""

    blocks: tuple[DenseBlock, ...]
    queries: PadIndices
    keys: PadIndices

    def to(self, device):
        return Layout(tuple(block.to(device) for block in self.blocks), self.queries.to(device), self.keys.to(device))

    @property
    def longest(self):
        """The largest number of queries or keys of a block, in tokens."""
        return max(max(block.shape[1:]) for block in self.blocks)


def has_kernels(device, dtype, head_width, num_buckets=16):
    """True if the Triton kernels support this: bf16 on a GPU, a head width, and a number of buckets of a bias."""
    sizes_fit = head_width in (16, 32, 64, 96, 128) and num_buckets in (16, 32, 64, 128)
    return device.type == "cuda" and dtype == torch.bfloat16 and sizes_fit and has_triton()


def make_layout(query_lengths, key_lengths, device="cpu", kernels=False):
    """Layout of packed examples, or PackedLayout if `kernels`. Lengths are in tokens, in the order of packing."""
    if kernels:
        tiles = packed_tiles(np.asarray(query_lengths), np.asarray(key_lengths))
        return PackedLayout(*map(torch.from_numpy, tiles)).to(device)
    lengths = np.stack([query_lengths, key_lengths])
    padded = round_up(lengths)
    order = np.lexsort(padded)
    edges = np.flatnonzero(np.diff(padded[:, order], axis=1).any(axis=0)) + 1
    blocks = []
    for start, end in pairwise([0, *edges, len(order)]):
        num_queries, num_keys = padded[:, order[start]].tolist()
        key_is_pad = np.arange(num_keys) >= lengths[1, order[start:end], None]
        blocks.append(
            DenseBlock((int(end - start), num_queries, num_keys), torch.from_numpy(key_is_pad[:, None, None]))
        )
    return Layout(tuple(blocks), *(_pad_indices(lengths[i], padded[i], order) for i in (0, 1))).to(device)


def _pad_indices(lengths, padded, order):
    starts = (np.cumsum(lengths) - lengths)[order]
    ends = np.cumsum(padded[order])
    offsets = np.arange(ends[-1]) - np.repeat(ends - padded[order], padded[order])
    is_pad = offsets >= np.repeat(lengths[order], padded[order])
    padded_rows = np.repeat(starts, padded[order]) + np.where(is_pad, 0, offsets)
    packed_rows = np.empty(lengths.sum(), np.int64)
    packed_rows[padded_rows[~is_pad]] = np.flatnonzero(~is_pad)
    return PadIndices(torch.from_numpy(padded_rows), torch.from_numpy(packed_rows))


def round_up(lengths):
    """Each length rounded up to 16, 24, 32, 48, 64, 96 …: few block shapes; above 16, padding adds at most half."""
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 16))).astype(np.int64)
    return np.where((lengths <= power * 3 // 4) & (power > 16), power * 3 // 4, power)


class _Pad(torch.autograd.Function):
    """Packed rows to padded rows; backward drops the gradient of padding."""

    @staticmethod
    def forward(ctx, packed, side):
        ctx.side = side
        return packed.index_select(0, side.padded_rows)

    @staticmethod
    def backward(ctx, grad_padded):
        return grad_padded.index_select(0, ctx.side.packed_rows), None


class _Unpad(torch.autograd.Function):
    """Padded rows to packed rows; backward gives padding a zero gradient."""

    @staticmethod
    def forward(ctx, padded, side):
        ctx.side = side
        return padded.index_select(0, side.packed_rows)

    @staticmethod
    def backward(ctx, grad_packed):
        grad_padded = grad_packed.new_zeros(len(ctx.side.padded_rows), grad_packed.shape[1])
        return grad_padded.index_copy_(0, ctx.side.packed_rows, grad_packed), None


@dataclass(frozen=True)
class ScoreBias:
    """The bias and mask of attention scores, which all layers of a stack share.

    With a Layout only `causal` and `blocks` are set; with a PackedLayout all but `blocks`, the last three if there is
    a bias.
    """

    causal: bool
    blocks: tuple = ()  # Layout: (B or 1, H or 1, T, S) of each block, -inf where masked
    weight: torch.Tensor | None = None  # PackedLayout: the learned table (buckets, H)
    buckets: torch.Tensor | None = None  # PackedLayout: bucket of each distance, -max_distance to max_distance
    table: torch.Tensor | None = None  # PackedLayout: bias (H, distances), -inf where a causal mask forbids


def score_mask(layout, causal=False, dtype=torch.float32):
    """ScoreBias without a bias: padding is masked, and with `causal` every later key."""
    if not isinstance(layout, Layout):
        return ScoreBias(causal)
    masked = (is_masked(block, causal) for block in layout.blocks)
    return ScoreBias(causal, tuple(torch.zeros_like(m, dtype=dtype).masked_fill_(m, -math.inf) for m in masked))


def is_masked(block, causal):
    """bool (B, 1, 1 or T, S): the scores of a DenseBlock that attention leaves out."""
    _, num_queries, num_keys = block.shape
    if not causal:
        return block.key_is_pad
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=block.key_is_pad.device).triu(1)
    return block.key_is_pad | later


def attend(qkv, layout, bias, num_heads, num_kv_heads=None):
    """softmax(q k^T + bias) v within each example of `layout`, (N, H*K).

    `qkv` holds one to three tensors whose concatenated columns are q, k and v: one (N, 3*H*K) in self-attention, two in
    cross-attention. With `num_kv_heads`, which divides H, each head of k and v serves H / num_kv_heads heads of q in
    order (Ainslie et al. 2023, arXiv 2305.13245); there must then be no bias. Scores are not scaled here: scale q.
    """
    num_kv_heads = num_kv_heads or num_heads
    if not isinstance(layout, Layout):
        from model.nn.kernels.attention import packed_attention  # a CPU build of torch comes without Triton

        return packed_attention(qkv, layout, bias, num_heads, num_kv_heads)
    q, k, v = with_repeated_heads(split_qkv(qkv, num_heads, num_kv_heads), num_heads, num_kv_heads)
    q_blocks = _Pad.apply(q, layout.queries).split([b * t for b, t, _ in (block.shape for block in layout.blocks)])
    k_blocks, v_blocks = (
        _Pad.apply(x, layout.keys).split([b * s for b, _, s in (block.shape for block in layout.blocks)])
        for x in (k, v)
    )
    outputs = []
    for block, block_bias, *qkv in zip(layout.blocks, bias.blocks, q_blocks, k_blocks, v_blocks, strict=True):
        q_BHTK, k_BHSK, v_BHSK = (
            x.view(block.shape[0], -1, num_heads, x.shape[1] // num_heads).transpose(1, 2) for x in qkv
        )
        scores_BHTS = (q_BHTK @ k_BHSK.transpose(2, 3)).add_(block_bias)
        outputs.append((scores_BHTS.softmax(dim=-1) @ v_BHSK).transpose(1, 2).reshape(-1, q.shape[1]))
    return _Unpad.apply(torch.cat(outputs), layout.queries)


def with_repeated_heads(qkv, num_heads, num_kv_heads):
    """(q, k, v), (N, H*K) each, where each head of k and v is repeated for the heads of q that share it."""
    q, k, v = qkv
    if num_heads == num_kv_heads:
        return qkv
    k, v = (x.view(len(x), num_kv_heads, -1).repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
    return q, k.flatten(1), v.flatten(1)
