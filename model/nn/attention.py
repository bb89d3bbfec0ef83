"""Attention over packed examples with T5's relative position bias.

Packed: the tokens of all examples of a micro-batch stand one after the other, without padding, in one flat
tensor. Examples never see each other. On GPUs the Triton kernels of model/nn/kernels/attention.py do the work; here is
the plain twin, which defines the truth: examples of like lengths form dense blocks, so its cost is the sum of squared
lengths, never the square of the sum.

Letters: N tokens, B examples of one block, H heads, K head width, T queries, S keys.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from model.nn.flat_params import columns, has_triton


@dataclass(frozen=True)
class Side:
    """Where packed tokens stand once each block is padded: a gather and its inverse."""

    padded_rows: torch.Tensor  # (padded tokens,) row of the packed tokens; padding repeats its example's first row
    packed_rows: torch.Tensor  # (N,) row of the padded tokens

    def to(self, device):
        return Side(self.padded_rows.to(device), self.packed_rows.to(device))


@dataclass(frozen=True)
class DenseBlock:
    """Examples that are attended together, padded to T queries and S keys."""

    shape: tuple[int, int, int]  # B, T, S
    key_is_pad: torch.Tensor  # (B, 1, 1, S)

    def to(self, device):
        return DenseBlock(self.shape, self.key_is_pad.to(device))


@dataclass(frozen=True)
class Layout:
    """How packed examples fall into blocks of like lengths."""

    blocks: tuple[DenseBlock, ...]
    queries: Side
    keys: Side

    def to(self, device):
        return Layout(tuple(block.to(device) for block in self.blocks), self.queries.to(device), self.keys.to(device))

    @property
    def longest(self):
        return max(max(block.shape[1:]) for block in self.blocks)


def has_kernels(device, dtype, shape):
    """True where the kernels can stand in for the plain twin: bf16 on a GPU, and a T5ModelConfig of sizes they have."""
    sizes_fit = shape.d_kv in (16, 32, 64, 128) and shape.relative_attention_num_buckets in (16, 32, 64, 128)
    return device.type == "cuda" and dtype == torch.bfloat16 and sizes_fit and has_triton()


def make_layout(query_lengths, key_lengths, device="cpu", kernels=False):
    """Layout of packed examples, for the kernels or for the plain twin; lengths are in tokens, in the packed order."""
    if kernels:
        from model.nn.kernels.attention import PackedLayout, packed_tiles  # a CPU build of torch comes without Triton

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
    return Layout(tuple(blocks), *(_side(lengths[i], padded[i], order) for i in (0, 1))).to(device)


def _side(lengths, padded, order):
    starts = (np.cumsum(lengths) - lengths)[order]
    ends = np.cumsum(padded[order])
    offsets = np.arange(ends[-1]) - np.repeat(ends - padded[order], padded[order])
    is_pad = offsets >= np.repeat(lengths[order], padded[order])
    padded_rows = np.repeat(starts, padded[order]) + np.where(is_pad, 0, offsets)
    packed_rows = np.empty(lengths.sum(), np.int64)
    packed_rows[padded_rows[~is_pad]] = np.flatnonzero(~is_pad)
    return Side(torch.from_numpy(padded_rows), torch.from_numpy(packed_rows))


def round_up(lengths):
    """Each length rounded up to 16, 24, 32, 48, 64, 96 …: few block shapes, at most half of one wasted."""
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 16))).astype(np.int64)
    return np.where((lengths <= power * 3 // 4) & (power > 16), power * 3 // 4, power)


class _Pad(torch.autograd.Function):
    """Packed rows to padded rows. What padding receives in backward is not the example's, so it is dropped."""

    @staticmethod
    def forward(ctx, packed, side):
        ctx.side = side
        return packed.index_select(0, side.padded_rows)

    @staticmethod
    def backward(ctx, grad_padded):
        return grad_padded.index_select(0, ctx.side.packed_rows), None


class _Unpad(torch.autograd.Function):
    """Padded rows to packed rows; in backward padding receives zero."""

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
    """What is added to the scores, in the form that the layout's attention reads. T5's layers share one a stack."""

    causal: bool
    blocks: tuple = ()  # plain twin: (B or 1, H or 1, T, S) for each block, -inf where a query must not look
    weight: torch.Tensor | None = None  # kernels: T5's table (buckets, H)
    buckets: torch.Tensor | None = None  # kernels: the bucket of each distance from -max_distance to max_distance
    table: torch.Tensor | None = None  # kernels: the bias (H, distances), read from `weight`


def attend(qkv, layout, bias, num_heads):
    """softmax(q k^T + bias) v for each example of `layout`, (N, H*K).

    `qkv`: the tensors whose columns, side by side, are those of q, k and v: one (N, 3*H*K), two (cross-attention) or
    three. Scores are not scaled: T5 folds 1/sqrt(K) into the initial weights of q
    (Raffel et al. 2020; mesh_tensorflow/transformer/attention.py).
    """
    if not isinstance(layout, Layout):
        from model.nn.kernels.attention import packed_attention  # a CPU build of torch comes without Triton

        return packed_attention(qkv, layout, bias.weight, bias.buckets, bias.table, bias.causal, num_heads)
    q, k, v = columns(qkv)
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
