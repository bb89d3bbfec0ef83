"""Generation with a decoder: the network attends to keys and values in a cache, one token for each slot at a time.

Letters: S slots, D width.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from model.nn.attention import make_layout
from model.nn.decoder.batch import positions_of
from model.nn.dropout import NO_DROPOUT
from model.nn.flat_params import split_qkv


@torch.no_grad()
def prefill(model, inputs, cache, slots, first_id):
    """Read `inputs` (arrays of ids) but for their last tokens, which are returned, into `slots` (list of numbers)."""
    model.flat.refresh()
    lengths = np.array([len(ids) - 1 for ids in inputs])
    cache.lengths[torch.tensor(slots, device=model.device)] = torch.from_numpy(lengths).to(model.device)
    longer, last_ids = np.flatnonzero(lengths), [int(ids[-1]) for ids in inputs]
    if not len(longer):
        return last_ids
    lengths = lengths[longer]
    ids = torch.cat([torch.as_tensor(inputs[place])[:-1] for place in longer]).to(model.device)
    positions = torch.from_numpy(positions_of(lengths)).to(model.device)
    rows = torch.from_numpy(np.repeat(np.array(slots)[longer], lengths)).to(model.device)
    packed = model.packed_attention(make_layout(lengths, lengths, model.device, model.uses_kernels))
    heads = model.config.num_attention_heads, model.config.num_key_value_heads

    def attention(layer, qkv):
        cache.fill(layer, split_qkv(qkv, *heads)[1:], rows, positions)
        return packed(qkv)

    model.states(ids, positions, NO_DROPOUT, [partial(attention, layer) for layer in range(len(cache.kept))])
    return last_ids


@torch.no_grad()
def decode_one(model, ids, cache):
    """Hidden states (S, D) for the token after `ids` (S,), the newest token of each slot.

    Shapes are fixed and nothing is read on the host, so that it can be captured as a CUDA graph.
    """
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    positions = cache.lengths.clamp(max=cache.last)  # a slot that nobody uses may have gone on further
    is_later = torch.arange(cache.last + 1, device=ids.device) > positions[:, None]
    mask = torch.zeros(is_later.shape, device=ids.device, dtype=model.compute_dtype).masked_fill_(is_later, -torch.inf)

    def attention(layer, qkv):
        q, *both = split_qkv(qkv, *heads)
        cache.append(layer, both, positions)
        return _attend(q, cache.kept[layer], mask)

    attentions = [partial(attention, layer) for layer in range(len(cache.kept))]
    states = model.states(ids, positions, NO_DROPOUT, attentions)
    cache.lengths.add_(1)
    return states


def _attend(q, kept_2SGTK, mask):
    """Attention (S, heads * K) of one query per slot and head over the kept keys and values.

    The heads of q that share a head of keys stand where other networks have several queries: nothing is repeated.
    """
    keys, values = kept_2SGTK
    q_SGRK = q.reshape(len(q), keys.shape[1], -1, keys.shape[3])
    return F.scaled_dot_product_attention(q_SGRK, keys, values, mask[:, None, None], scale=1.0).reshape(q.shape)
