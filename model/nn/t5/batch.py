"""Micro-batches for T5: packed examples as flat tensors without padding, with their attention layouts."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from model.nn.attention import Layout, make_layout
from model.nn.dropout import token_keys
from model.nn.flat_batch import Flat, flatten, pad_to
from model.nn.packed_layout import PackedLayout, packed_tiles

TOKEN_KEYS = "prompt_token_keys", "decoder_token_keys"


@dataclass(frozen=True)
class MicroBatch:
    """The packed examples of one forward pass, without padding unless a bucket was given."""

    prompt_ids: torch.Tensor  # (encoder tokens,)
    decoder_ids: torch.Tensor  # (target tokens,) labels shifted right within each example
    labels: torch.Tensor  # (target tokens,) negative for padding
    encoder_layout: Layout
    decoder_layout: Layout
    cross_layout: Layout
    values: dict  # {name: tensor} of the Sequences' token_values (target tokens,) and values (targets,)
    prompt_token_keys: torch.Tensor | None = None  # (encoder tokens, 3) int32 of model/nn/dropout.py; with dropout only
    decoder_token_keys: torch.Tensor | None = None  # (target tokens, 3)
    flat: Flat | None = None  # for the kernels: holds the tensors above

    def to(self, device):
        if self.flat is not None:
            return _of_flat(self.flat.to(device))
        values = {name: value.to(device) for name, value in self.values.items()}
        keys = {name: x.to(device) for name in TOKEN_KEYS if (x := getattr(self, name)) is not None}
        return MicroBatch(*(getattr(self, field.name).to(device) for field in fields(self)[:6]), values, **keys)


def collate(sequences, packing):
    """MicroBatch of Sequences of two columns: the encoder reads the first, the decoder predicts the second.

    The targets of one sequence each see only themselves, and all of its source: in cross-attention, which knows no
    positions, they are one run of queries.
    """
    prompt_ids, labels = sequences.columns
    lengths = _lengths_of(sequences)
    decoder_ids = np.roll(labels, 1)
    decoder_ids[np.cumsum(lengths["decoder"][0]) - lengths["decoder"][0]] = packing.first_id
    if sequences.is_target is not None:
        labels = np.where(sequences.is_target, labels, -1)
    keys = {}
    if packing.dropout:
        num_targets = 1 if sequences.target_lengths is None else sequences.target_lengths.shape[1]
        ids = sequences.ids[::num_targets], sequences.ids  # a source has the number of its first target
        for column, name in enumerate(TOKEN_KEYS):
            keys[name] = token_keys(ids[column], lengths[("encoder", "decoder")[column]][0], column)
    if packing.kernels:
        return _for_kernels((prompt_ids, decoder_ids, labels), sequences, keys, packing)
    values = {name: torch.from_numpy(x) for name, x in (sequences.token_values | sequences.values).items()}
    return MicroBatch(
        *map(torch.from_numpy, (prompt_ids, decoder_ids, labels)),
        **{f"{name}_layout": make_layout(*own) for name, own in lengths.items()},
        values=values,
        **{name: torch.from_numpy(x) for name, x in keys.items()},
    )


def _lengths_of(sequences):
    """{kind of attention: (lengths of its queries, lengths of its keys)}, in tokens, of each run that attends."""
    prompts, responses = sequences.lengths.T
    targets = responses if sequences.target_lengths is None else sequences.target_lengths.ravel()
    return dict(encoder=(prompts, prompts), decoder=(targets, targets), cross=(responses, prompts))


def _for_kernels(ids, sequences, dropout_keys, packing):
    """MicroBatch of (encoder ids, decoder ids, labels) in one flat tensor, padded to the bucket if there is one."""
    bucket, num_sequences = packing.bucket, packing.num_sequences
    prompts, responses = bucket.columns if bucket else (len(ids[0]), len(ids[1]))
    arrays = dict(
        prompt_ids=pad_to(ids[0], prompts), decoder_ids=pad_to(ids[1], responses), labels=pad_to(ids[2], responses, -1)
    )
    sizes = dict(encoder=(prompts, prompts), decoder=(responses, responses), cross=(responses, prompts))
    for name, own in _lengths_of(sequences).items():
        tiles = packed_tiles(*own, bucket and (*sizes[name], num_sequences))
        arrays |= {f"{name}_queries": tiles[0], f"{name}_keys": tiles[1]}
    arrays |= {name: pad_to(x, responses) for name, x in sequences.token_values.items()}
    arrays |= {name: pad_to(x, num_sequences if bucket else len(x)) for name, x in sequences.values.items()}
    for (name, x), tokens in zip(dropout_keys.items(), (prompts, responses), strict=False):
        arrays[name] = pad_to(x.ravel(), 3 * tokens).reshape(-1, 3)
    return _of_flat(flatten(arrays))


def _of_flat(flat):
    parts = flat.tensors()
    ids = [parts.pop(name) for name in ("prompt_ids", "decoder_ids", "labels")]
    layouts = [
        PackedLayout(parts.pop(f"{name}_queries"), parts.pop(f"{name}_keys"))
        for name in ("encoder", "decoder", "cross")
    ]
    keys = [parts.pop(name, None) for name in TOKEN_KEYS]
    return MicroBatch(*ids, *layouts, parts, *keys, flat)
