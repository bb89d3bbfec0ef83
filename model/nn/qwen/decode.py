"""Generation with Qwen: keys and values in static tensors, one token for each slot at a time.

Letters: S slots, L layers, G heads of keys and values, K head width, T tokens of a slot, D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from model.nn.attention import attend, make_layout, score_mask
from model.nn.flat_params import embed, split_qkv
from model.nn.qwen.batch import positions_of

TOKENS_MULTIPLE = 8  # fast attention on GPUs reads its mask in rows of a multiple of 8 numbers


@dataclass(frozen=True)
class Cache:
    """Keys and values of S slots. A slot may be filled again while others go on."""

    kept: torch.Tensor  # (L, 2, S, G, T, K) of the tokens read and decoded so far
    positions: torch.Tensor  # int64 (S,): their number
    reads_all: bool = True  # a step reads the whole of the cache that it gets

    def first(self, slots, input_tokens, new_tokens):
        """The cache of the first `slots` slots for so many tokens, sharing this one's memory."""
        return Cache(self.kept[:, :, :slots, :, : _rounded(input_tokens + new_tokens)], self.positions[:slots])


def _rounded(tokens):
    return -(-tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE


def new_cache(model, slots, input_tokens, new_tokens):
    """An empty Cache on the model's device, in its compute dtype."""
    c, tokens = model.config, _rounded(input_tokens + new_tokens)
    size = (c.num_hidden_layers, 2, slots, c.num_key_value_heads, tokens, c.head_dim)
    kept = torch.zeros(size, device=model.device, dtype=model.compute_dtype)
    return Cache(kept, torch.zeros(slots, dtype=torch.int64, device=model.device))


def prefill(model, inputs, cache, slots):
    """Read `inputs` (arrays of ids) but for their last tokens into `slots` (list of numbers)."""
    model.flat.refresh()
    lengths = np.array([len(ids) - 1 for ids in inputs])
    cache.positions[torch.tensor(slots, device=model.device)] = torch.from_numpy(lengths).to(model.device)
    longer = np.flatnonzero(lengths)
    if not len(longer):
        return
    lengths = lengths[longer]
    ids = torch.cat([torch.as_tensor(inputs[place])[:-1] for place in longer]).to(model.device)
    positions = torch.from_numpy(positions_of(lengths)).to(model.device)
    rows = torch.from_numpy(np.repeat(np.array(slots)[longer], lengths)).to(model.device)
    layout = make_layout(lengths, lengths, model.device, model.uses_kernels)
    _read(model, ids, positions, layout, lambda layer, both: _keep(cache.kept[layer], both, rows, positions))


def _read(model, ids, positions, layout, keep):
    """Run packed ids through the network, and `keep(layer, (k, v))` their keys and values (N, G*K) in each layer."""
    heads, turns = model.model.layers[0].self_attn.heads, model.turns(positions)
    mask = score_mask(layout, True, model.compute_dtype)
    x, added = embed(ids, model.model.embed_tokens.weight), None
    for layer, block in enumerate(model.model.layers):
        x, normed = block.input_layernorm(x, added)
        qkv = block.self_attn.qkv(normed, None, turns)
        keep(layer, split_qkv(qkv, *heads)[1:])
        if layer + 1 == len(model.model.layers):
            return
        added = block.self_attn.o_proj(attend(qkv, layout, mask, *heads))
        x, normed = block.post_attention_layernorm(x, added)
        added = block.mlp(normed)


def _keep(kept_2SGTK, both, slots, positions):
    for kept_SGTK, x in zip(kept_2SGTK, both, strict=True):
        kept_SGTK.transpose(1, 2)[slots, positions] = x.view(len(x), -1, kept_SGTK.shape[-1])


def decode_one(model, ids, cache):
    """Hidden states (S, D) for the token after `ids` (S,), the newest token of each slot.

    Shapes are fixed and nothing is read on the host, so that it can be recorded as a CUDA graph.
    """
    c, last = model.config, cache.kept.shape[4] - 1
    positions = cache.positions.clamp(max=last)  # a slot that nobody uses may have gone on further
    column = positions.view(-1, 1, 1, 1).expand(-1, c.num_key_value_heads, 1, c.head_dim)
    is_later = torch.arange(last + 1, device=ids.device) > positions[:, None]
    mask = torch.zeros(is_later.shape, device=ids.device, dtype=model.compute_dtype).masked_fill_(is_later, -torch.inf)
    turns = model.turns(positions)
    x, added = F.embedding(ids, model.model.embed_tokens.weight.copy), None
    for layer, block in enumerate(model.model.layers):
        x, normed = block.input_layernorm(x, added)
        q, *both = split_qkv(block.self_attn.qkv(normed, None, turns), *block.self_attn.heads)
        for kept_SGTK, new in zip(cache.kept[layer], both, strict=True):
            kept_SGTK.scatter_(2, column, new.reshape(len(new), -1, 1, c.head_dim))
        added = block.self_attn.o_proj(_attend(q, cache.kept[layer], mask))
        x, normed = block.post_attention_layernorm(x, added)
        added = block.mlp(normed)
    cache.positions.copy_((positions + 1).clamp_(max=last))
    return model.model.norm(x, added)[1]


def _attend(q, kept_2SGTK, mask):
    """Attention (S, heads * K) of one query per slot and head over the kept keys and values.

    The heads of q that share a head of keys stand where other networks have several queries: nothing is repeated.
    """
    keys, values = kept_2SGTK
    q_SGRK = q.reshape(len(q), keys.shape[1], -1, keys.shape[3])
    return F.scaled_dot_product_attention(q_SGRK, keys, values, mask[:, None, None], scale=1.0).reshape(q.shape)
