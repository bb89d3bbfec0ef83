"""Which examples form step s, which rank takes which, and how they are packed into micro-batches.

A step is a set of examples, a pure function of (seed, position in pairs, global batch): never of the number of
ranks, of the micro-batch or of memory.
"""

import hashlib
import math
from dataclasses import astuple, dataclass, fields
from itertools import product

import numpy as np
import torch

from model.nn.attention import Layout, make_layout

FEISTEL_ROUNDS = 6
# Standard deviations around the mean number of tokens of a side: few sizes, little padding. What fits none has no room.
ROOM_LEVELS = ((0.3, 2.5), (-0.6, 0.2, 1.0, 2.5))  # of prompts, of responses
ROOM_FILL = 2 / 3  # at least: an epoch's small last step is not worth the padding
ROOM_MULTIPLE = 64  # tokens
MOST_TRIED = 2**20  # examples times micro-batches, between which a better cut is looked for: milliseconds
ALIGNED = 4  # int32 numbers, 16 bytes: Triton compiles a kernel once more for a tensor that begins between them


@dataclass(frozen=True)
class Step:
    """The examples of one optimizer step."""

    ids: np.ndarray  # rows of the token store, over all ranks
    epoch: int  # from 1


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


@dataclass(frozen=True)
class Room:
    """What a micro-batch is padded to, so that a recorded step can take it."""

    prompt_tokens: int
    response_tokens: int
    pairs: int

    @property
    def tokens(self):
        """Of both sides."""
        return self.prompt_tokens + self.response_tokens

    def holds(self, lengths):
        """True if pairs of these `lengths` (pairs, 2) fit, and fill most of it."""
        prompts, responses = lengths.sum(axis=0, dtype=np.int64)
        fits = prompts <= self.prompt_tokens and responses <= self.response_tokens and len(lengths) <= self.pairs
        return fits and prompts + responses >= ROOM_FILL * self.tokens


def rooms_for(lengths, pairs, counts=None):
    """Rooms, the smallest first, of which one holds nearly every micro-batch of `pairs` pairs drawn from `lengths`.

    `lengths` (examples, 2), or (kinds, 2) and how many examples have each in `counts`.
    """
    mean = np.average(lengths, axis=0, weights=counts)
    means, spreads = pairs * mean, np.sqrt(pairs * np.average((lengths - mean) ** 2, axis=0, weights=counts))
    prompts, responses = (
        {_round_up(mean + level * spread) for level in levels if mean > -level * spread}
        for mean, spread, levels in zip(means, spreads, ROOM_LEVELS, strict=True)
    )
    rooms = (Room(*tokens, pairs) for tokens in product(prompts, responses))
    return sorted(rooms, key=lambda room: room.tokens)


def _round_up(tokens):
    return math.ceil(tokens / ROOM_MULTIPLE) * ROOM_MULTIPLE


def step_at(pairs_seen, num_pairs, global_batch, seed):
    """The step that begins after `pairs_seen` pairs; an epoch is a permutation, and its last step may be smaller."""
    epoch, offset = divmod(pairs_seen, num_pairs)
    positions = np.arange(offset, min(offset + global_batch, num_pairs))
    return Step(permute(positions, num_pairs, f"{seed}/{epoch}"), epoch + 1)


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
    """`ids` cut into as few micro-batches as fit `micro_batch_tokens` tokens of both sides, as far as first fit finds.

    Each of like lengths, unless that takes more. One example alone may exceed the limit: planning has seen to it that
    it fits.
    """
    order = np.lexsort((ids, lengths[:, 0], lengths[:, 1]))
    tokens = lengths[order].sum(axis=1, dtype=np.int64)
    parts = _cut_in_order(tokens, micro_batch_tokens)
    if len(parts) > math.ceil(tokens.sum() / micro_batch_tokens) and len(parts) * len(tokens) <= MOST_TRIED:
        parts = _first_fit(tokens, micro_batch_tokens, len(parts) - 1) or parts
    return [ids[order[part]] for part in parts]


def _cut_in_order(tokens, limit):
    """Places of `tokens` in parts of neighbours, each filled up to `limit`."""
    ends, parts, start = np.cumsum(tokens), [], 0
    while start < len(tokens):
        tokens_before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, tokens_before + limit, side="right")), start + 1)
        parts.append(np.arange(start, end))
        start = end
    return parts


def _first_fit(tokens, limit, most_parts):
    """As `_cut_in_order`: the largest first, each into the first part that has room (Johnson 1974, "Fast algorithms
    for bin packing"). None where more than `most_parts` would be needed.
    """
    room, part_of, taken = np.full(most_parts, limit), np.empty(len(tokens), np.int64), np.minimum(tokens, limit)
    for place in np.argsort(-taken, kind="stable"):
        with_room = np.flatnonzero(room >= taken[place])
        if not len(with_room):
            return None
        part_of[place] = with_room[0]
        room[with_room[0]] -= taken[place]
    return [np.flatnonzero(part_of == part) for part in range(part_of.max() + 1)]


def collate(store, ids, start_id, device="cpu", kernels=False, room=None):
    """MicroBatch of the examples `ids`, for the attention kernels (padded to `room` if given) or the plain twin.

    `start_id` is the token that begins a decoder's input.
    """
    prompt_ids, labels = store.tokens(ids)
    prompt_lengths, response_lengths = lengths = store.lengths[ids].astype(np.int64).T
    decoder_ids = np.roll(labels, 1)
    decoder_ids[np.cumsum(response_lengths) - response_lengths] = start_id
    if kernels:
        return pack(prompt_ids, decoder_ids, labels, *lengths, room).to(device)
    return MicroBatch(
        *map(torch.from_numpy, (prompt_ids, decoder_ids, labels)),
        encoder_layout=make_layout(prompt_lengths, prompt_lengths),
        decoder_layout=make_layout(response_lengths, response_lengths),
        cross_layout=make_layout(response_lengths, prompt_lengths),
    ).to(device)


def pack(prompt_ids, decoder_ids, labels, prompt_lengths, response_lengths, room=None):
    """MicroBatch for the kernels, all of it in one int32 tensor: one copy to the device."""
    from model.nn.kernels.attention import packed_tiles  # a CPU build of torch comes without Triton

    prompts, responses, pairs = astuple(room) if room else (len(prompt_ids), len(labels), 0)
    sides = [(prompt_lengths, prompts), (response_lengths, responses)]
    layouts = [(sides[0], sides[0]), (sides[1], sides[1]), (sides[1], sides[0])]
    arrays = [_filled(prompt_ids, prompts, 0), _filled(decoder_ids, responses, 0), _filled(labels, responses, -1)]
    for (queries, num_queries), (keys, num_keys) in layouts:
        arrays += packed_tiles(queries, keys, room and (num_queries, num_keys, pairs))
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
