"""Which examples form step s, which rank takes which, and how they are packed into micro-batches.

A step is a set of examples, a pure function of (seed, position in pairs, global batch): never of the number of
ranks, of the micro-batch or of memory.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from model.attention import Layout, make_layout

FEISTEL_ROUNDS = 6


@dataclass(frozen=True)
class Step:
    """The examples of one optimizer step."""

    ids: np.ndarray  # rows of the token store, over all ranks
    epoch: int  # from 1
    pairs_before: int  # pairs seen before this step, over all epochs


@dataclass(frozen=True)
class MicroBatch:
    """Packed examples of one forward: flat tensors without padding, on the device."""

    prompt_ids: torch.Tensor  # (encoder tokens,)
    decoder_ids: torch.Tensor  # (target tokens,) labels shifted right within each example
    labels: torch.Tensor  # (target tokens,)
    encoder_layout: Layout
    decoder_layout: Layout
    cross_layout: Layout


def step_at(pairs_seen, num_pairs, global_batch, seed):
    """The step that begins after `pairs_seen` pairs; an epoch is a permutation, and its last step may be smaller."""
    epoch, offset = divmod(pairs_seen, num_pairs)
    positions = np.arange(offset, min(offset + global_batch, num_pairs))
    return Step(permute(positions, num_pairs, f"{seed}/{epoch}"), epoch + 1, pairs_seen)


def permute(positions, num_items, key):
    """Where a keyed permutation of range(num_items) sends each position: random order at any position in O(1).

    A Feistel network on the next even number of bits; results outside the range walk on until they are inside
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    half_bits = np.uint64(max((max(num_items - 1, 1)).bit_length() + 1, 2) // 2)
    round_keys = np.frombuffer(hashlib.sha512(key.encode()).digest(), dtype=np.uint64)[:FEISTEL_ROUNDS]
    values = _feistel(np.asarray(positions, dtype=np.uint64), half_bits, round_keys)
    while (outside := values >= num_items).any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
    return values.astype(np.int64)


def _feistel(values, half_bits, round_keys):
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


def _mix(values):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def share_of(ids, lengths, rank, world_size):
    """The examples of `ids` that `rank` takes: as many and as long as every other rank's, to within one.

    `lengths` (len(ids), 2) in tokens. Dealt from the longest to the shortest, forth and back.
    """
    order = np.lexsort((ids, lengths.sum(axis=1, dtype=np.int64)))[::-1]
    place = np.arange(len(ids)) % (2 * world_size)
    owner = np.minimum(place, 2 * world_size - 1 - place)
    return ids[order[owner == rank]]


def cut(ids, lengths, micro_batch_tokens):
    """`ids` cut into as few micro-batches as fit `micro_batch_tokens` tokens of both sides, each of like lengths.

    One example alone may exceed the limit: planning has seen to it that it fits.
    """
    order = np.lexsort((ids, lengths[:, 0], lengths[:, 1]))
    ends = np.cumsum(lengths[order].sum(axis=1, dtype=np.int64))
    parts, start = [], 0
    while start < len(order):
        tokens_before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, tokens_before + micro_batch_tokens, side="right")), start + 1)
        parts.append(ids[order[start:end]])
        start = end
    return parts


def collate(store, ids, start_id, device, kernels=False):
    """MicroBatch of the examples `ids`, for the attention kernels or the plain twin.

    `start_id` is the token that begins a decoder's input.
    """
    prompt_ids, labels = store.tokens(ids)
    prompt_lengths, response_lengths = store.lengths[ids].astype(np.int64).T
    decoder_ids = np.roll(labels, 1)
    decoder_ids[np.cumsum(response_lengths) - response_lengths] = start_id
    flat = [torch.from_numpy(array).to(device, non_blocking=True) for array in (prompt_ids, decoder_ids, labels)]
    return MicroBatch(
        *flat,
        encoder_layout=make_layout(prompt_lengths, prompt_lengths, device, kernels),
        decoder_layout=make_layout(response_lengths, response_lengths, device, kernels),
        cross_layout=make_layout(response_lengths, prompt_lengths, device, kernels),
    )
