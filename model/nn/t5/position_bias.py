"""T5's relative position bias, in the form that attention reads."""

import functools
import math

import torch
import torch.nn.functional as F

from model.nn.attention import Layout, ScoreBias


def score_bias(layout, weight=None, max_distance=128, causal=False, dtype=torch.float32):
    """ScoreBias of one stack from T5's learned table `weight` (buckets, H); without one only masks."""
    if not isinstance(layout, Layout):
        if weight is None:
            return ScoreBias(causal)
        buckets = _distance_buckets(len(weight), max_distance, not causal, weight.device)
        return ScoreBias(causal, (), weight, buckets, weight.detach().float()[buckets].T.contiguous())
    bias = None
    if weight is not None:
        bias = relative_position_bias(weight, layout.longest, max_distance, bidirectional=not causal)
    return ScoreBias(causal, tuple(_block_bias(block, bias, causal, dtype) for block in layout.blocks))


@functools.cache
def _distance_buckets(num_buckets, max_distance, bidirectional, device):
    """Buckets of the distances from -max_distance to max_distance; all further ones share the outermost."""
    distances = torch.arange(-max_distance, max_distance + 1, device=device)
    return position_buckets(distances, num_buckets, max_distance, bidirectional).to(torch.int32)


def _block_bias(block, position_bias, causal, dtype):
    _, num_queries, num_keys = block.shape
    hidden = block.key_is_pad
    if causal:
        hidden = hidden | torch.ones(num_queries, num_keys, dtype=torch.bool, device=hidden.device).triu(1)
    if position_bias is None:
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)
    return torch.where(hidden, -math.inf, position_bias[:, :num_queries, :num_keys].to(dtype))


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
