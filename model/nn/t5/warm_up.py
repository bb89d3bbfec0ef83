"""Launches each kernel of a T5 once, on small tensors of the network's widths: it is compiled, or loaded, by then."""

from functools import partial

import numpy as np
import torch

from model.nn.activations import gate
from model.nn.attention import attend, make_layout, score_mask
from model.nn.dropout import NO_DROPOUT, Masks, dropout, relu_dropout, token_keys
from model.nn.flat_params import padded_rows
from model.nn.layers import ResidualNorm
from model.nn.t5.position_bias import score_bias

LENGTHS = np.array([24, 40])  # of two packed examples
TOKENS = int(LENGTHS.sum())


def kernel_works(model_config, device, probability):
    """Functions that launch a part of the kernels each, so that threads can compile them at the same time.

    `probability` is that of dropout.
    """
    parts = [partial(_attend, causal=causal, is_cross=False) for causal in (True, False)]
    parts += [partial(_attend, causal=False, is_cross=True), _norm, _decode, _loss]
    parts += [_gate] if model_config.is_gated else []
    works = [partial(part, model_config, device) for part in parts]
    return [*works, partial(_drop, model_config, device, probability)] if probability else works


def _attend(c, device, causal, is_cross):
    layout, inner = make_layout(LENGTHS, LENGTHS, device, kernels=True), c.num_heads * c.d_kv
    table = torch.zeros(c.relative_attention_num_buckets, c.num_heads, device=device, requires_grad=True)
    max_distance = c.relative_attention_max_distance
    bias = score_mask(layout) if is_cross else score_bias(layout, table, max_distance, causal, torch.bfloat16)
    qkv = [_rows(width, device) for width in ((inner, 2 * inner) if is_cross else (3 * inner,))]
    attend(qkv, layout, bias, c.num_heads).sum().backward()


def _norm(c, device, masks=NO_DROPOUT):
    norm, x = ResidualNorm(c.d_model, c.layer_norm_epsilon).to(device), _rows(c.d_model, device)
    for added in (None, _rows(c.d_model, device)):
        total, normed = norm(x, added, masks)
        (total + normed).sum().backward()


def _drop(c, device, probability):
    keys = torch.from_numpy(token_keys(np.arange(len(LENGTHS)), LENGTHS, 0)).to(device)
    masks = Masks(probability, torch.zeros(2, dtype=torch.int32, device=device), keys)
    _norm(c, device, masks)
    dropout(_rows(c.d_model, device), masks).sum().backward()
    relu_dropout(_rows(c.d_ff, device) * 1, masks).sum().backward()


def _gate(c, device):
    gate(_rows(2 * c.d_ff, device), c.feed_forward_proj.removeprefix("gated-")).sum().backward()


def _decode(c, device):
    from model.nn.kernels.decode_attention import attend_one  # a CPU build of torch comes without Triton

    cached = torch.zeros(2, TOKENS, c.num_heads, 16, c.d_kv, device=device, dtype=torch.bfloat16)
    lengths, inner = torch.ones(TOKENS, dtype=torch.int64, device=device), c.num_heads * c.d_kv
    bias = torch.zeros(c.num_heads, 16, device=device, dtype=torch.bfloat16)
    attend_one(_rows(3 * inner, device).detach(), cached, lengths, bias)
    attend_one(_rows(inner, device).detach(), cached, lengths)


def _loss(c, device):
    from model.nn.kernels.cross_entropy import cross_entropy_  # a CPU build of torch comes without Triton

    logits = torch.zeros(2, padded_rows(c.vocab_size), device=device, dtype=torch.bfloat16)
    cross_entropy_(logits, torch.zeros(2, dtype=torch.int32, device=device), c.vocab_size, 0.0)


def _rows(width, device):
    return torch.zeros(TOKENS, width, device=device, dtype=torch.bfloat16, requires_grad=True)
