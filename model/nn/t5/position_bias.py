"""T5's relative position bias and the attention masks, as a ScoreBias."""

import functools
import math

import torch
import torch.nn.functional as F

from model.nn.attention import Layout, ScoreBias, is_masked


def score_bias(layout, weight, max_distance=128, causal=False, dtype=torch.float32):
    """ScoreBias of one stack from T5's learned table `weight` (buckets, H)."""
    if not isinstance(layout, Layout):
        buckets = _distance_buckets(len(weight), max_distance, not causal, weight.device)
        table = weight.detach().float()[buckets].T.contiguous()
        if causal:
            table[:, max_distance + 1 :] = -math.inf
        return ScoreBias(causal, (), weight, buckets, table)
    bias = relative_position_bias(weight, layout.longest, max_distance, bidirectional=not causal)
    return ScoreBias(causal, tuple(_block_bias(block, bias, causal, dtype) for block in layout.blocks))


@functools.cache
@torch.inference_mode(False)  # what an answer makes first, training uses too
def _distance_buckets(num_buckets, max_distance, bidirectional, device):
    """Buckets of the distances -max_distance to max_distance, int32; larger distances share the outermost bucket."""
    distances = torch.arange(-max_distance, max_distance + 1, device=device)
    return position_buckets(distances, num_buckets, max_distance, bidirectional).to(torch.int32)


def _block_bias(block, position_bias, causal, dtype):
    _, num_queries, num_keys = block.shape
    return torch.where(is_masked(block, causal), -math.inf, position_bias[:, :num_queries, :num_keys].to(dtype))


def relative_position_bias(weight, max_length, max_distance, bidirectional):
    """Bias (H, L, L) with L = `max_length`, gathered from T5's learned table `weight` (num_buckets, H)."""
    positions = torch.arange(max_length, device=weight.device)
    buckets = position_buckets(positions[None, :] - positions[:, None], weight.shape[0], max_distance, bidirectional)
    return F.embedding(buckets, weight).permute(2, 0, 1)


def position_buckets(distance, num_buckets, max_distance, bidirectional):
    """T5's bucket of each signed distance (key minus query): exact for small distances, logarithmic for large ones.

    Same arithmetic as T5Attention._relative_position_bucket in transformers' modeling_t5.py.
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
