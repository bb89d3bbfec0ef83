"""Micro-batches for T5: packed examples as flat tensors without padding, with their attention layouts."""

import math
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch

from model.nn.attention import Layout, make_layout
from model.nn.dropout import token_keys

ALIGNED = 4  # int32 elements = 16 bytes: Triton recompiles a kernel for a tensor that is not aligned to them


@dataclass(frozen=True)
class MicroBatch:
    """The packed examples of one forward pass, without padding unless a bucket was given."""

    prompt_ids: torch.Tensor  # (encoder tokens,)
    decoder_ids: torch.Tensor  # (target tokens,) labels shifted right within each example
    labels: torch.Tensor  # (target tokens,) negative for padding
    encoder_layout: Layout
    decoder_layout: Layout
    cross_layout: Layout
    prompt_keys: torch.Tensor | None = None  # (encoder tokens, 3) int32 of model/nn/dropout.py; None without dropout
    decoder_keys: torch.Tensor | None = None  # (target tokens, 3)
    flat: torch.Tensor | None = None  # for the kernels: the int32 tensor of which the fields above are views
    sizes: tuple = ()  # numbers of elements of those views

    def to(self, device):
        if self.flat is not None:
            return unpack(self.flat.to(device, non_blocking=True), self.sizes)
        tensors = (getattr(self, field.name) for field in fields(self)[:8])
        return MicroBatch(*(None if x is None else x.to(device) for x in tensors))


def collate(store, ids, start_id, device="cpu", kernels=False, bucket=None, dropout=False):
    """MicroBatch of the examples `ids` of a TokenStore, for the Triton kernels if `kernels`.

    `start_id` is the first token of each decoder input. `bucket` is the padded size, with `kernels` only. Only with
    `dropout` the tokens get the keys of their masks.
    """
    prompt_ids, labels = store.tokens(ids)
    prompt_lengths, response_lengths = lengths = store.lengths[ids].astype(np.int64).T
    decoder_ids = np.roll(labels, 1)
    decoder_ids[np.cumsum(response_lengths) - response_lengths] = start_id
    keys = [token_keys(ids, of_side, side) for side, of_side in enumerate(lengths)] if dropout else []
    if kernels:
        return pack(prompt_ids, decoder_ids, labels, *lengths, bucket, keys).to(device)
    return MicroBatch(
        *map(torch.from_numpy, (prompt_ids, decoder_ids, labels)),
        make_layout(prompt_lengths, prompt_lengths),
        make_layout(response_lengths, response_lengths),
        make_layout(response_lengths, prompt_lengths),
        *map(torch.from_numpy, keys),
    ).to(device)


def pack(prompt_ids, decoder_ids, labels, prompt_lengths, response_lengths, bucket=None, keys=()):
    """MicroBatch for the kernels in one int32 tensor in pinned memory, so that one copy brings it to the GPU.

    Padded to the sizes of `bucket` if given. `keys` are the dropout keys of both sides' tokens, if there are any.
    """
    from model.nn.kernels.attention import packed_tiles  # a CPU build of torch comes without Triton

    prompts, responses, pairs = astuple(bucket) if bucket else (len(prompt_ids), len(labels), 0)
    sides = [(prompt_lengths, prompts), (response_lengths, responses)]
    layouts = [(sides[0], sides[0]), (sides[1], sides[1]), (sides[1], sides[0])]
    arrays = [_pad_to(prompt_ids, prompts, 0), _pad_to(decoder_ids, responses, 0), _pad_to(labels, responses, -1)]
    for (queries, num_queries), (others, num_others) in layouts:
        arrays += packed_tiles(queries, others, bucket and (num_queries, num_others, pairs))
    arrays += [_pad_to(side.ravel(), 3 * tokens, 0) for side, tokens in zip(keys, (prompts, responses), strict=False)]
    sizes = tuple(array.size for array in arrays)
    flat = torch.empty(sum(map(_aligned_size, sizes)), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    slots = [_pad_to(array.ravel(), _aligned_size(array.size), 0) for array in arrays]
    np.concatenate(slots, out=flat.numpy(), casting="same_kind")
    return unpack(flat, sizes)


def _pad_to(array, size, value):
    return np.concatenate([array, np.full(size - len(array), value, array.dtype)])


def _aligned_size(size):
    return math.ceil(size / ALIGNED) * ALIGNED


def unpack(flat, sizes):
    """MicroBatch of views of `flat`, which holds tensors of these `sizes` in order, each aligned to 16 bytes."""
    from model.nn.kernels.attention import PackedLayout  # a CPU build of torch comes without Triton

    slots = flat.split([_aligned_size(size) for size in sizes])
    parts = [slot[:size] for slot, size in zip(slots, sizes, strict=True)]
    ids, tiles, keys = parts[:3], [part.view(-1, 5) for part in parts[3:9]], [part.view(-1, 3) for part in parts[9:]]
    layouts = [PackedLayout(*tiles[first : first + 2]) for first in (0, 2, 4)]
    return MicroBatch(*ids, *layouts, *(keys or (None, None)), flat, sizes)
