"""Generation with T5: the decoder attends to keys and values in a cache, one token for each slot at a time.

On a GPU the Triton kernel of model/nn/kernels/decode_attention.py attends; the plain path beside it is its reference.
Letters: S slots, L decoder layers, H heads, K head width, N generated tokens, D width.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from model.nn.attention import make_layout
from model.nn.dropout import NO_DROPOUT
from model.nn.embedding import embed
from model.nn.key_values import KeyValues, new_key_values, rounded
from model.nn.t5.position_bias import position_buckets

SLOTS_TOGETHER = 32  # on a CPU, slots whose inputs are read up to the longest of theirs


@dataclass(frozen=True)
class Cache:
    """What the decoder attends to."""

    own: KeyValues  # of the tokens decoded so far
    cross: KeyValues  # of the encoder's output
    bias: torch.Tensor  # (1 or L, H, N): position bias of each distance back

    @property
    def reads_all(self):
        """Whether a step reads all columns, not only those of the tokens there."""
        return self.own.reads_all

    def first(self, slots, input_tokens, new_tokens):
        """The cache of the first `slots` slots for so many tokens, sharing this one's memory."""
        own = self.own.first(slots, new_tokens)
        return Cache(own, self.cross.first(slots, input_tokens), self.bias[:, :, : own.last + 1])


def new_cache(model, slots, input_tokens, new_tokens):
    """An empty Cache on the model's device, in its compute dtype."""
    c, reads_all = model.config, not model.uses_kernels
    own, cross = (
        new_key_values(model, c.num_decoder_layers, slots, c.num_heads, tokens, c.d_kv, reads_all)
        for tokens in (new_tokens, input_tokens)
    )
    attentions = [block.layer[0].SelfAttention for block in model.decoder.block]
    tables = [one.relative_attention_bias.weight.detach() for one in attentions if one.has_position_bias]
    distances = -torch.arange(own.last + 1, device=model.device)
    buckets = position_buckets(distances, len(tables[0]), c.relative_attention_max_distance, bidirectional=False)
    return Cache(own, cross, torch.stack([table[buckets].T.to(model.compute_dtype) for table in tables]))


@torch.no_grad()
def prefill(model, inputs, cache, slots, first_id):
    """Encode `inputs` (arrays of ids) into `slots` (list of numbers), each of which decodes from `first_id` on anew."""
    model.flat.refresh()
    lengths = torch.tensor([len(ids) for ids in inputs])
    layout = make_layout(lengths.numpy(), lengths.numpy(), model.device, model.uses_kernels)
    ids = torch.cat([torch.as_tensor(ids) for ids in inputs]).to(model.device)
    encoded = model.encode(embed(ids, model.shared.weight), NO_DROPOUT, layout)
    slots = torch.tensor(slots, device=model.device)
    is_input = torch.arange(int(lengths.max())) < lengths[:, None]
    cache.cross.lengths[slots], cache.own.lengths[slots] = lengths.to(model.device), 0
    rows = slots.repeat_interleave(lengths.to(model.device))
    columns = is_input.nonzero()[:, 1].to(model.device)
    for layer, block in enumerate(model.decoder.block):
        both = block.layer[1].EncDecAttention.key_values(encoded, NO_DROPOUT).chunk(2, dim=1)
        cache.cross.fill(layer, both, rows, columns)
    return [first_id] * len(slots)


@torch.no_grad()
def decode_one(model, ids, cache):
    """Hidden states (S, D) for the token after `ids` (S,), the newest token of each slot.

    Shapes are fixed and nothing is read on the host, so that it can be captured as a CUDA graph.
    """
    layers = range(len(cache.own.kept))
    own, cross = (_plain_attentions if cache.reads_all else _kernel_attentions)(cache)
    own, cross = ([partial(attention, layer) for layer in layers] for attention in (own, cross))
    x = embed(ids, model.shared.weight)
    states = model.decoder(x, NO_DROPOUT, own, [(attention, None) for attention in cross], 0)
    cache.own.lengths.add_(1)  # also of slots that nobody uses: attention clamps them to the cache
    return states * model.output_scale


def _kernel_attentions(cache):
    """Attention of each slot's new token to its own tokens and to its input: functions of (layer, (qkv or q,))."""
    from model.nn.kernels.decode_attention import attend_one  # a CPU build of torch comes without Triton

    def own(layer, qkv):
        return attend_one(*qkv, cache.own.kept[layer], cache.own.lengths, cache.bias[min(layer, len(cache.bias) - 1)])

    def cross(layer, q):
        return attend_one(*q, cache.cross.kept[layer], cache.cross.lengths)

    return own, cross


def _plain_attentions(cache):
    """The same as _kernel_attentions, from the operations of PyTorch."""
    positions, heads = cache.own.lengths.clamp(max=cache.own.last), cache.own.kept.shape[3]
    back = positions[:, None] - torch.arange(cache.own.last + 1, device=positions.device)  # (S, N)
    own_bias = cache.bias[:, :, back.clamp(min=0)].transpose(1, 2).masked_fill(back[:, None] < 0, -torch.inf)
    is_pad = torch.arange(cache.cross.last + 1, device=positions.device) >= cache.cross.lengths[:, None]
    cross_bias = torch.zeros_like(is_pad, dtype=own_bias.dtype).masked_fill_(is_pad, -torch.inf)[:, None, None]
    groups = _groups(cache.cross.lengths, cross_bias.shape[3])

    def own(layer, qkv):
        q, *both = qkv[0].chunk(3, dim=1)
        cache.own.append(layer, both, positions)
        bias = own_bias[min(layer, len(own_bias) - 1), :, :, None]
        return _attend_one(q.unflatten(1, (heads, -1)), *cache.own.kept[layer], bias)

    def cross(layer, q):
        q, (keys, values) = q[0].unflatten(1, (heads, -1)), cache.cross.kept[layer]
        return torch.cat(
            [_attend_one(q[s], keys[s, :, :t], values[s, :, :t], cross_bias[s, ..., :t]) for s, t in groups]
        )

    return own, cross


def _groups(lengths, most):
    """(slots, tokens of their inputs that are read) of groups of slots."""
    if lengths.is_cuda:  # nothing is read on the host
        return [(slice(None), most)]
    longest = [rounded(max(int(own.max()), 1)) for own in lengths.split(SLOTS_TOGETHER)]
    return [(slice(n * SLOTS_TOGETHER, (n + 1) * SLOTS_TOGETHER), tokens) for n, tokens in enumerate(longest)]


def _attend_one(q, keys, values, bias):
    """Attention of a query for each slot, (S, H, K) to (S, H * K); a CPU is faster with two products than with SDPA."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, bias, scale=1.0).flatten(1)
    return ((q[:, :, None] @ keys.mT).add_(bias).softmax(3) @ values).flatten(1)
