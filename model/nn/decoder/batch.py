"""Micro-batches of a decoder: packed sequences as one stream without padding, with its attention layout."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from model.nn.attention import Layout, make_layout
from model.nn.dropout import token_keys
from model.nn.flat_batch import Flat, flatten, pad_to
from model.nn.packed_layout import PackedLayout, packed_tiles

TENSORS = "ids", "positions", "rows", "labels"


@dataclass(frozen=True)
class Stream:
    """Sequences end to end, without padding unless a bucket was given; row `rows[i]` predicts `labels[i]`."""

    ids: torch.Tensor  # (tokens,)
    positions: torch.Tensor  # (tokens,) from 0 in each sequence
    rows: torch.Tensor  # (targets,) the token before each target
    labels: torch.Tensor  # (targets,) negative for padding
    layout: Layout
    values: dict  # {name: tensor} of the Sequences' token_values (targets,) and values (sequences,)
    token_keys: torch.Tensor | None = None  # (tokens, 3) int32 of model/nn/dropout.py; with dropout only
    flat: Flat | None = None  # for the kernels: holds the tensors above

    def to(self, device):
        if self.flat is not None:
            return _of_flat(self.flat.to(device))
        values = {name: value.to(device) for name, value in self.values.items()}
        keys = None if self.token_keys is None else self.token_keys.to(device)
        return Stream(*(getattr(self, field.name).to(device) for field in fields(self)[:5]), values, keys)


def collate(sequences, packing):
    """The Stream of Sequences: the columns of each are joined, and the tokens of its last column are its targets.

    With Sequences of one column, every token but the first of each sequence is a target.
    """
    assert sequences.target_lengths is None, "a stream has one target: repeat its source for another"
    totals = sequences.lengths.sum(axis=1)
    positions = positions_of(totals)
    is_target = positions >= np.repeat(totals - sequences.lengths[:, -1], totals)
    ids = np.empty(len(positions), np.int64)
    ids[is_target] = sequences.columns[-1]
    if len(sequences.columns) > 1:
        ids[~is_target] = np.concatenate(sequences.columns[:-1])
    wanted = positions[is_target] > 0
    if sequences.is_target is not None:
        wanted &= sequences.is_target
    rows = np.flatnonzero(is_target)[wanted] - 1
    arrays = dict(ids=ids, positions=positions, rows=rows, labels=ids[rows + 1])
    values = {name: value[wanted] for name, value in sequences.token_values.items()}
    keys = dict(token_keys=token_keys(sequences.ids, totals, 0)) if packing.dropout else {}
    if packing.kernels:
        return _for_kernels(arrays, values | keys, sequences, packing)
    values = {name: torch.from_numpy(x) for name, x in (values | sequences.values).items()}
    keys = {name: torch.from_numpy(x) for name, x in keys.items()}
    return Stream(**{name: torch.from_numpy(x) for name, x in arrays.items()},
                  layout=make_layout(totals, totals), values=values, **keys)  # fmt: skip


def positions_of(lengths):
    """int64 (tokens,): the position of each token in its sequence; sequences have these lengths."""
    lengths = np.asarray(lengths)
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _for_kernels(arrays, token_arrays, sequences, packing):
    """The Stream in one flat tensor, padded to the bucket if there is one."""
    bucket, num_sequences = packing.bucket, packing.num_sequences
    tokens, targets = (bucket.tokens, bucket.columns[-1]) if bucket else (len(arrays["ids"]), len(arrays["rows"]))
    totals = sequences.lengths.sum(axis=1)
    tiles = packed_tiles(totals, totals, bucket and (tokens, tokens, num_sequences))
    flat = dict(queries=tiles[0], keys=tiles[1])
    flat |= {name: pad_to(arrays[name], tokens) for name in ("ids", "positions")}
    flat |= dict(rows=pad_to(arrays["rows"], targets), labels=pad_to(arrays["labels"], targets, -1))
    keys = token_arrays.pop("token_keys", None)
    if keys is not None:
        flat["token_keys"] = pad_to(keys.ravel(), 3 * tokens).reshape(-1, 3)
    flat |= {name: pad_to(x, targets) for name, x in token_arrays.items()}
    flat |= {name: pad_to(x, num_sequences if bucket else len(x)) for name, x in sequences.values.items()}
    return _of_flat(flatten(flat))


def _of_flat(flat):
    parts = flat.tensors()
    layout = PackedLayout(parts.pop("queries"), parts.pop("keys"))
    tensors, keys = (parts.pop(name) for name in TENSORS), parts.pop("token_keys", None)
    return Stream(*tensors, layout, parts, keys, flat)
