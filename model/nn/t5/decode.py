"""Generation with T5: the decoder's keys and values in static tensors, one token for each slot at a time.

On a GPU the Triton kernel of model/nn/kernels/decode_attention.py attends; the plain path beside it is its reference.
Letters: S slots, L decoder layers, H heads, K head width, T input tokens, N generated tokens, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model.nn.attention import make_layout
from model.nn.flat_params import linear
from model.nn.t5.position_bias import position_buckets

TOKENS_MULTIPLE = 8  # fast attention on GPUs reads its bias in rows of a multiple of 8 numbers
SLOTS_TOGETHER = 32  # on a CPU, slots whose inputs are read up to the longest of theirs


@dataclass(frozen=True)
class Cache:
    """Keys and values of S slots. A slot may be filled again while others go on."""

    own: torch.Tensor  # (L, 2, S, H, N, K) of the tokens decoded so far
    cross: torch.Tensor  # (L, 2, S, H, T, K) of the encoder's output
    lengths: torch.Tensor  # int64 (S,): tokens of a slot's input
    positions: torch.Tensor  # int64 (S,): tokens decoded so far; beyond the cache in slots that nobody uses
    bias: torch.Tensor  # (1 or L, H, N): position bias of each distance back
    reads_all: bool  # a step reads the whole of the cache that it gets, not only the tokens there

    def first(self, slots, input_tokens, new_tokens):
        """The cache of the first `slots` slots for so many tokens, sharing this one's memory."""
        inputs, new = _rounded(input_tokens), _rounded(new_tokens)
        return Cache(
            self.own[:, :, :slots, :, :new], self.cross[:, :, :slots, :, :inputs], self.lengths[:slots],
            self.positions[:slots], self.bias[:, :, :new], self.reads_all,
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
        *(torch.zeros(slots, dtype=torch.int64, device=model.device) for _ in range(2)),
        torch.stack([table[buckets].T.to(model.compute_dtype) for table in tables]),
        reads_all=not model.uses_kernels,
    )


def prefill(model, inputs, cache, slots):
    """Encode `inputs` (arrays of ids) into `slots` (list of numbers), whose decoded tokens are forgotten."""
    c, lengths = model.config, torch.tensor([len(ids) for ids in inputs])
    layout = make_layout(lengths.numpy(), lengths.numpy(), model.device, model.uses_kernels)
    ids = torch.cat([torch.as_tensor(ids) for ids in inputs]).to(model.device)
    encoded = model.encode(ids, layout)
    slots = torch.tensor(slots, device=model.device)
    is_input = torch.arange(int(lengths.max())) < lengths[:, None]
    cache.lengths[slots], cache.positions[slots] = lengths.to(model.device), 0
    rows = slots.repeat_interleave(lengths.to(model.device))
    columns = is_input.nonzero()[:, 1].to(model.device)
    for layer, block in enumerate(model.decoder.block):
        attention = block.layer[1].EncDecAttention
        both = linear(encoded, attention.k.weight, attention.v.weight).view(-1, 2, c.num_heads, c.d_kv)
        for which in (0, 1):
            cache.cross[layer, which].transpose(1, 2)[rows, columns] = both[:, which]


def decode_one(model, ids, cache):
    """Hidden states (S, D) for the token after `ids` (S,), the newest token of each slot.

    Shapes are fixed and nothing is read on the host, so that it can be recorded as a CUDA graph.
    """
    attend = _plain_attention(cache, model.config) if cache.reads_all else _kernel_attention(cache)
    x, added = F.embedding(ids, model.shared.weight.copy), None
    for layer, block in enumerate(model.decoder.block):
        x, normed = block.layer[0].layer_norm(x, added)
        own = block.layer[0].SelfAttention
        qkv = linear(normed, own.q.weight, own.k.weight, own.v.weight)
        added = linear(attend(qkv, layer, is_own=True), own.o.weight)
        x, normed = block.layer[1].layer_norm(x, added)
        cross = block.layer[1].EncDecAttention
        added = linear(attend(linear(normed, cross.q.weight), layer, is_own=False), cross.o.weight)
        x, added = block.layer[2](x, added)
    cache.positions.add_(1)  # also of slots that nobody uses: attention clamps them to the cache
    return model.decoder.final_layer_norm(x, added)[1] * model.output_scale


def _kernel_attention(cache):
    """(qkv, layer, is_own) -> attention of each slot's new token to its own tokens or its input, (S, H * K)."""
    from model.nn.kernels.decode_attention import attend_one  # a CPU build of torch comes without Triton

    def attend(qkv, layer, is_own):
        if is_own:
            return attend_one(qkv, cache.own[layer], cache.positions, cache.bias[min(layer, len(cache.bias) - 1)])
        return attend_one(qkv, cache.cross[layer], cache.lengths)

    return attend


def _plain_attention(cache, c):
    """The same as _kernel_attention, from the operations of PyTorch."""
    last = cache.bias.shape[2] - 1
    positions = cache.positions.clamp(max=last)
    column = positions.view(1, -1, 1, 1, 1).expand(2, -1, c.num_heads, 1, c.d_kv)
    back = positions[:, None] - torch.arange(last + 1, device=positions.device)  # (S, N)
    own_bias = cache.bias[:, :, back.clamp(min=0)].transpose(1, 2).masked_fill(back[:, None] < 0, -torch.inf)
    is_pad = torch.arange(cache.cross.shape[4], device=positions.device) >= cache.lengths[:, None]
    cross_bias = torch.zeros_like(is_pad, dtype=own_bias.dtype).masked_fill_(is_pad, -torch.inf)[:, None, None]
    groups = _groups(cache.lengths, cross_bias.shape[3])

    def attend(qkv, layer, is_own):
        q, *kv = qkv.view(len(qkv), -1, c.num_heads, c.d_kv).unbind(1)
        if is_own:
            cache.own[layer].scatter_(3, column, torch.stack(kv).unsqueeze(3))
            return _attend_one(q, *cache.own[layer], own_bias[min(layer, len(own_bias) - 1), :, :, None])
        keys, values = cache.cross[layer]
        return torch.cat(
            [_attend_one(q[s], keys[s, :, :t], values[s, :, :t], cross_bias[s, ..., :t]) for s, t in groups]
        )

    return attend


def _groups(lengths, most):
    """(slots, tokens of their inputs that are read) of groups of slots."""
    if lengths.is_cuda:  # nothing is read on the host
        return [(slice(None), most)]
    longest = [_rounded(max(int(own.max()), 1)) for own in lengths.split(SLOTS_TOGETHER)]
    return [(slice(n * SLOTS_TOGETHER, (n + 1) * SLOTS_TOGETHER), tokens) for n, tokens in enumerate(longest)]


def _attend_one(q, keys, values, bias):
    """Attention of a query for each slot, (S, H, K) to (S, H * K); a CPU is faster with two products than with SDPA."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, bias, scale=1.0).flatten(1)
    return ((q[:, :, None] @ keys.mT).add_(bias).softmax(3) @ values).flatten(1)
