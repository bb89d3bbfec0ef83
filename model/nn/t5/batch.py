"""Packed examples as T5 takes them: flat tensors without padding, and their layouts."""

import math
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch

from model.nn.attention import Layout, make_layout

ALIGNED = 4  # int32 numbers, 16 bytes: Triton compiles a kernel once more for a tensor that begins between them


@dataclass(frozen=True)
class MicroBatch:
    """Packed examples of one forward: flat tensors without padding."""

    prompt_ids: torch.Tensor  # (encoder tokens,)
    decoder_ids: torch.Tensor  # (target tokens,) labels shifted right within each example
    labels: torch.Tensor  # (target tokens,) negative where there is padding
    encoder_layout: Layout
    decoder_layout: Layout
    cross_layout: Layout
    flat: torch.Tensor | None = None  # for the kernels: the int32 tensor that all of these are views of
    sizes: tuple = ()  # of those views

    def to(self, device):
        if self.flat is not None:
            return unpack(self.flat.to(device, non_blocking=True), self.sizes)
        return MicroBatch(*(getattr(self, field.name).to(device) for field in fields(self)[:6]))


def collate(store, ids, start_id, device="cpu", kernels=False, bucket=None):
    """MicroBatch of the examples `ids`, for the attention kernels (padded to `room` if given) or the plain twin.

    `start_id` is the token that begins a decoder's input.
    """
    prompt_ids, labels = store.tokens(ids)
    prompt_lengths, response_lengths = lengths = store.lengths[ids].astype(np.int64).T
    decoder_ids = np.roll(labels, 1)
    decoder_ids[np.cumsum(response_lengths) - response_lengths] = start_id
    if kernels:
        return pack(prompt_ids, decoder_ids, labels, *lengths, bucket).to(device)
    return MicroBatch(
        *map(torch.from_numpy, (prompt_ids, decoder_ids, labels)),
        encoder_layout=make_layout(prompt_lengths, prompt_lengths),
        decoder_layout=make_layout(response_lengths, response_lengths),
        cross_layout=make_layout(response_lengths, prompt_lengths),
    ).to(device)


def pack(prompt_ids, decoder_ids, labels, prompt_lengths, response_lengths, bucket=None):
    """MicroBatch for the kernels, all of it in one int32 tensor: one copy to the device."""
    from model.nn.kernels.attention import packed_tiles  # a CPU build of torch comes without Triton

    prompts, responses, pairs = astuple(bucket) if bucket else (len(prompt_ids), len(labels), 0)
    sides = [(prompt_lengths, prompts), (response_lengths, responses)]
    layouts = [(sides[0], sides[0]), (sides[1], sides[1]), (sides[1], sides[0])]
    arrays = [_filled(prompt_ids, prompts, 0), _filled(decoder_ids, responses, 0), _filled(labels, responses, -1)]
    for (queries, num_queries), (keys, num_keys) in layouts:
        arrays += packed_tiles(queries, keys, bucket and (num_queries, num_keys, pairs))
    sizes = tuple(array.size for array in arrays)
    flat = torch.empty(sum(map(_aligned, sizes)), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    slots = [_filled(array.ravel(), _aligned(array.size), 0) for array in arrays]
    np.concatenate(slots, out=flat.numpy(), casting="same_kind")
    return unpack(flat, sizes)


def _filled(array, size, value):
    return np.concatenate([array, np.full(size - len(array), value, array.dtype)])


def _aligned(size):
    return math.ceil(size / ALIGNED) * ALIGNED


def unpack(flat, sizes):
    """The MicroBatch whose tensors of these `sizes` stand one after the other in `flat`, each on its own 16 bytes."""
    from model.nn.kernels.attention import PackedLayout  # a CPU build of torch comes without Triton

    slots = flat.split([_aligned(size) for size in sizes])
    parts = [slot[:size] for slot, size in zip(slots, sizes, strict=True)]
    ids, tiles = parts[:3], [part.view(-1, 5) for part in parts[3:]]
    layouts = [PackedLayout(*tiles[first : first + 2]) for first in (0, 2, 4)]
    return MicroBatch(*ids, *layouts, flat, sizes)
