"""Attention over packed examples with T5's relative position bias.

Packed: the tokens of all examples of a micro-batch stand one after the other, without padding, in one flat
tensor. Examples never see each other. This is the plain twin: examples of like lengths form dense blocks, so
its cost is the sum of squared lengths, never the square of the sum.

Letters: N tokens, B examples of one block, H heads, K head width, T queries, S keys.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's attention is left out: with a mask its gradients can be wrong (pytorch issues 196678 and 191612).
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Block:
    """Examples that are attended together, padded to T queries and S keys."""

    query_rows: torch.Tensor  # (B, T) rows in the flat queries
    key_rows: torch.Tensor  # (B, S) rows in the flat keys
    key_is_pad: torch.Tensor  # (B, 1, 1, S)


@dataclass(frozen=True)
class Layout:
    """Where each example's queries and keys stand, block by block."""

    blocks: tuple[Block, ...]
    output_rows: torch.Tensor  # (N,) where each query's output stands in the blocks laid end to end


def make_layout(query_lengths, key_lengths, device="cpu"):
    """Layout of packed examples; lengths are in tokens, one number an example, in the packed order."""
    query_lengths, key_lengths = np.asarray(query_lengths), np.asarray(key_lengths)
    query_starts, key_starts = _starts(query_lengths), _starts(key_lengths)
    padded = np.stack([_round_up(query_lengths), _round_up(key_lengths)])
    blocks, output_rows, done = [], np.empty(query_lengths.sum(), np.int64), 0
    for shape in np.unique(padded, axis=1).T:
        members = np.flatnonzero((padded == shape[:, None]).all(axis=0))
        query_rows, query_is_pad = _rows(query_starts[members], query_lengths[members], shape[0])
        key_rows, key_is_pad = _rows(key_starts[members], key_lengths[members], shape[1])
        output_rows[query_rows[~query_is_pad]] = done + np.flatnonzero(~query_is_pad)
        done += query_rows.size
        to_device = [torch.from_numpy(a).to(device) for a in (query_rows, key_rows, key_is_pad[:, None, None])]
        blocks.append(Block(*to_device))
    return Layout(tuple(blocks), torch.from_numpy(output_rows).to(device))


def _starts(lengths):
    return np.cumsum(lengths) - lengths


def _round_up(lengths):
    """Each length rounded up to 16, 24, 32, 48, 64, 96 …: few block shapes, at most half of one wasted."""
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 16))).astype(np.int64)
    return np.where((lengths <= power * 3 // 4) & (power > 16), power * 3 // 4, power)


def _rows(starts, lengths, padded_length):
    """Rows (B, padded_length) in the flat tensor, the first row repeated as padding, and which are padding."""
    offsets = np.arange(padded_length)
    is_pad = offsets >= lengths[:, None]
    return np.where(is_pad, starts[:, None], starts[:, None] + offsets), is_pad


def score_biases(layout, position_bias=None, causal=False, dtype=torch.float32, heads=1):
    """What each block adds to its scores (B, H, T, S): position bias, and -inf where a query must not look.

    `position_bias` (H, L, L) is the learned bias of the longest block. Computed once a stack: T5's layers share it.
    """
    return [_score_bias(block, position_bias, causal, dtype, heads) for block in layout.blocks]


def _score_bias(block, position_bias, causal, dtype, heads):
    (num_examples, num_queries), num_keys = block.query_rows.shape, block.key_rows.shape[1]
    hidden = block.key_is_pad
    if causal:
        hidden = hidden | torch.ones(num_queries, num_keys, dtype=torch.bool, device=hidden.device).triu(1)
    if position_bias is None:
        bias = torch.zeros((), dtype=dtype, device=hidden.device)
    else:
        bias = position_bias[:, :num_queries, :num_keys].to(dtype)
    return torch.where(hidden, -math.inf, bias).expand(num_examples, heads, num_queries, num_keys)


def attend(q_NHK, k_NHK, v_NHK, layout, biases, dropout=0.0):
    """softmax(q k^T + bias) v for each example of `layout`; queries (N, H, K), result (N, H*K).

    Scores are not scaled: T5 folds 1/sqrt(K) into the initial weights of q
    (Raffel et al. 2020; mesh_tensorflow/transformer/attention.py).
    """
    outputs = []
    for block, bias in zip(layout.blocks, biases, strict=True):
        q = q_NHK[block.query_rows].transpose(1, 2)
        k, v = (x[block.key_rows].transpose(1, 2) for x in (k_NHK, v_NHK))
        with sdpa_kernel(BACKENDS):
            out_BHTK = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        outputs.append(out_BHTK.transpose(1, 2).reshape(-1, q_NHK.shape[1] * q_NHK.shape[2]))
    return torch.cat(outputs).index_select(0, layout.output_rows)


def relative_position_bias(weight, max_length, max_distance, bidirectional):
    """Learned bias (H, L, L) for L = `max_length` from T5's bucket table `weight` (num_buckets, H)."""
    positions = torch.arange(max_length, device=weight.device)
    buckets = position_buckets(positions[None, :] - positions[:, None], weight.shape[0], max_distance, bidirectional)
    return F.embedding(buckets, weight).permute(2, 0, 1)


def position_buckets(distance, num_buckets, max_distance, bidirectional):
    """T5's bucket of each signed distance (key minus query): exact when near, logarithmic when far.

    The arithmetic of T5Attention._relative_position_bucket in transformers' modeling_t5.py.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    far = exact + (
        torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    ).to(torch.long)
    return offset + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))
