"""Generation with T5: the decoder's keys and values in static tensors, one token for each slot at a time.

Letters: S slots, L decoder layers, H heads, K head width, T input tokens, N generated tokens, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.nn.attention import make_layout
from model.nn.flat_params import linear
from model.nn.t5.position_bias import position_buckets

TOKENS_MULTIPLE = 8  # fast attention on GPUs reads its bias in rows of a multiple of 8 numbers


@dataclass(frozen=True)
class Cache:
    """Keys and values of S slots. A slot may be filled again while others go on."""

    own: torch.Tensor  # (L, 2, S, H, N, K) of the tokens decoded so far
    cross: torch.Tensor  # (L, 2, S, H, T, K) of the encoder's output
    is_input: torch.Tensor  # bool (S, T): positions of the encoder that a slot has
    positions: torch.Tensor  # int64 (S,): tokens decoded so far
    bias: torch.Tensor  # (1 or L, H, N): position bias of each distance back

    def first(self, slots, input_tokens, new_tokens):
        """The cache of the first `slots` slots for so many tokens, sharing this one's memory."""
        inputs, new = _rounded(input_tokens), _rounded(new_tokens)
        return Cache(
            self.own[:, :, :slots, :, :new], self.cross[:, :, :slots, :, :inputs], self.is_input[:slots, :inputs],
            self.positions[:slots], self.bias[:, :, :new],
        )  # fmt: skip


def _rounded(tokens):
    return -(-tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE


def new_cache(model, slots, input_tokens, new_tokens):
    """An empty Cache on the model's device, in its compute dtype."""
    c, options = model.config, dict(device=model.device, dtype=model.compute_dtype)
    input_tokens, new_tokens = _rounded(input_tokens), _rounded(new_tokens)
    sizes = [(c.num_decoder_layers, 2, slots, c.num_heads, tokens, c.d_kv) for tokens in (new_tokens, input_tokens)]
    attentions = [block.layer[0].SelfAttention for block in model.decoder.block]
    tables = [one.relative_attention_bias.weight.detach() for one in attentions if one.has_position_bias]
    distances = -torch.arange(new_tokens, device=model.device)
    buckets = position_buckets(distances, len(tables[0]), c.relative_attention_max_distance, bidirectional=False)
    return Cache(
        *(torch.zeros(size, **options) for size in sizes),
        torch.zeros(slots, input_tokens, dtype=torch.bool, device=model.device),
        torch.zeros(slots, dtype=torch.int64, device=model.device),
        torch.stack([table[buckets].T.to(model.compute_dtype) for table in tables]),
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
    c = model.config
    last = cache.bias.shape[2] - 1
    positions = cache.positions.clamp(max=last)  # a slot that nobody uses may have gone on further
    column = positions.view(1, -1, 1, 1, 1).expand(2, -1, c.num_heads, 1, c.d_kv)
    back = positions[:, None] - torch.arange(last + 1, device=ids.device)  # (S, N)
    own_bias = cache.bias[:, :, back.clamp(min=0)].transpose(1, 2).masked_fill(back[:, None] < 0, -torch.inf)
    cross_bias = torch.zeros_like(cache.is_input, dtype=own_bias.dtype).masked_fill(~cache.is_input, -torch.inf)
    x, added = F.embedding(ids, model.shared.weight.copy), None
    for layer, block in enumerate(model.decoder.block):
        x, normed = block.layer[0].layer_norm(x, added)
        own = block.layer[0].SelfAttention
        qkv = linear(normed, own.q.weight, own.k.weight, own.v.weight).view(-1, 3, c.num_heads, c.d_kv)
        cache.own[layer].scatter_(3, column, qkv[:, 1:].transpose(0, 1).unsqueeze(3))
        added = _attend(own, qkv[:, 0], cache.own[layer], own_bias[min(layer, len(own_bias) - 1), :, :, None])
        x, normed = block.layer[1].layer_norm(x, added)
        cross = block.layer[1].EncDecAttention
        q = linear(normed, cross.q.weight).view(-1, c.num_heads, c.d_kv)
        added = _attend(cross, q, cache.cross[layer], cross_bias[:, None, None])
        x, added = block.layer[2](x, added)
    hidden = model.decoder.final_layer_norm(x, added)[1] * model.output_scale
    cache.positions.copy_(positions + 1)  # beyond `last` too: the next step may have a larger part of the cache
    return F.linear(hidden, model.output_weight.copy)


def _attend(attention, q_SHK, cached, bias):
    """Attention of one query per slot over cached (2, S, H, tokens, K) keys and values, projected to (S, D)."""
    out = F.scaled_dot_product_attention(q_SHK[:, :, None], cached[0], cached[1], bias, scale=1.0)
    return linear(out.flatten(1), attention.o.weight)
