"""Generation with T5: the decoder's keys and values in static tensors, one token for each slot at a time.

Letters: S slots, L decoder layers, H heads, K head width, T input tokens, N generated tokens, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.nn.attention import make_layout
from model.nn.flat_params import linear
from model.nn.t5.position_bias import position_buckets


@dataclass(frozen=True)
class Cache:
    """Keys and values of S slots. A slot may be filled again while others go on."""

    own: torch.Tensor  # (L, 2, S, H, N, K) of the tokens decoded so far
    cross: torch.Tensor  # (L, 2, S, H, T, K) of the encoder's output
    is_input: torch.Tensor  # bool (S, T): positions of the encoder that a slot has
    positions: torch.Tensor  # int64 (S,): tokens decoded so far
    bias: torch.Tensor  # (H, N): position bias of each distance back


def new_cache(model, slots, input_tokens, new_tokens):
    """An empty Cache on the model's device, in its compute dtype."""
    c, options = model.config, dict(device=model.device, dtype=model.compute_dtype)
    sizes = [(c.num_decoder_layers, 2, slots, c.num_heads, tokens, c.d_kv) for tokens in (new_tokens, input_tokens)]
    weight = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    distances = -torch.arange(new_tokens, device=model.device)
    buckets = position_buckets(distances, len(weight), c.relative_attention_max_distance, bidirectional=False)
    return Cache(
        *(torch.zeros(size, **options) for size in sizes),
        torch.zeros(slots, input_tokens, dtype=torch.bool, device=model.device),
        torch.zeros(slots, dtype=torch.int64, device=model.device),
        weight.detach()[buckets].T.to(model.compute_dtype).contiguous(),
    )


def prefill(model, inputs, cache, slots):
    """Encode `inputs` (arrays of ids) into `slots` (list of numbers), whose decoded tokens are forgotten."""
    c, lengths = model.config, torch.tensor([len(ids) for ids in inputs])
    layout = make_layout(lengths.numpy(), lengths.numpy(), model.device, model.uses_kernels)
    ids = torch.cat([torch.as_tensor(ids) for ids in inputs]).to(model.device)
    encoded = model.encode(ids, layout)
    slots = torch.tensor(slots, device=model.device)
    is_input = torch.arange(cache.is_input.shape[1]) < lengths[:, None]
    cache.is_input[slots] = is_input.to(model.device)
    cache.positions[slots] = 0
    rows = slots.repeat_interleave(lengths.to(model.device))
    columns = is_input.nonzero()[:, 1].to(model.device)
    for layer, block in enumerate(model.decoder.block):
        attention = block.layer[1].EncDecAttention
        both = linear(encoded, attention.k.weight, attention.v.weight).view(-1, 2, c.num_heads, c.d_kv)
        for which in (0, 1):
            cache.cross[layer, which].transpose(1, 2)[rows, columns] = both[:, which]


def decode_one(model, ids, cache):
    """Logits (S, vocabulary) of the token after `ids` (S,), the newest token of each slot.

    Shapes are fixed and nothing is read on the host, so that it can be recorded as a CUDA graph.
    """
    c, every = model.config, torch.arange(len(ids), device=ids.device)
    back = cache.positions[:, None] - torch.arange(cache.bias.shape[1], device=ids.device)  # (S, N)
    own_bias = cache.bias[:, back.clamp(min=0)].transpose(0, 1).masked_fill(back[:, None] < 0, -torch.inf)
    cross_bias = torch.zeros_like(cache.is_input, dtype=own_bias.dtype).masked_fill(~cache.is_input, -torch.inf)
    x, added = F.embedding(ids, model.shared.weight.copy), None
    for layer, block in enumerate(model.decoder.block):
        x, normed = block.layer[0].layer_norm(x, added)
        own = block.layer[0].SelfAttention
        qkv = linear(normed, own.q.weight, own.k.weight, own.v.weight).view(-1, 3, c.num_heads, c.d_kv)
        cache.own[layer, :, every, :, cache.positions] = qkv[:, 1:]  # (S, 2, H, K)
        added = _attend(own, qkv[:, 0], cache.own[layer], own_bias[:, :, None])
        x, normed = block.layer[1].layer_norm(x, added)
        cross = block.layer[1].EncDecAttention
        q = linear(normed, cross.q.weight).view(-1, c.num_heads, c.d_kv)
        added = _attend(cross, q, cache.cross[layer], cross_bias[:, None, None])
        x, added = block.layer[2](x, added)
    hidden = model.decoder.final_layer_norm(x, added)[1] * c.d_model**-0.5
    cache.positions.add_(1).clamp_(max=cache.bias.shape[1] - 1)
    return F.linear(hidden, model.shared.weight.copy)


def _attend(attention, q_SHK, cached, bias):
    """Attention of one query per slot over cached (2, S, H, tokens, K) keys and values, projected to (S, D)."""
    out = F.scaled_dot_product_attention(q_SHK[:, :, None], cached[0], cached[1], bias, scale=1.0)
    return linear(out.flatten(1), attention.o.weight)
