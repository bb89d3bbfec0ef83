"""What an objective hands to a network: token ids of source and target, or of targets alone, and plain values."""

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Sequences:
    """Sequences in order, without padding.

    The last column holds the targets. A network with an encoder reads the one before it, the source; a decoder-only
    network reads all columns as one stream. `token_values` and `values` reach the objective's `losses` as tensors of
    the batch. An encoder may read a source once for several targets, which lie end to end in the last column.
    """

    columns: tuple[np.ndarray, ...]  # int64 (tokens,) each: the ids of all sequences, one after the other
    lengths: np.ndarray  # int64 (sequences, columns) in tokens
    is_target: np.ndarray | None = None  # bool (tokens of the last column,); None: all of them are targets
    token_values: dict = field(default_factory=dict)  # {name: float32 or int32 (tokens of the last column,)}
    values: dict = field(default_factory=dict)  # {name: float32 or int32 (targets,)}
    ids: np.ndarray | None = None  # int64 (targets,): a number for each, by which dropout draws its masks
    target_lengths: np.ndarray | None = None  # int64 (sequences, targets of each) in tokens; None: one target each


def with_places(sequences):
    """The Sequences with `places` among their token_values: how many targets stand directly before each, in a row.

    The first token of a sequence without a source is no target: nothing predicts it.
    """
    last = sequences.lengths[:, -1]
    starts, rows = np.cumsum(last) - last, np.arange(last.sum())
    is_target = np.ones(len(rows), bool) if sequences.is_target is None else sequences.is_target.copy()
    is_target[starts[(sequences.lengths[:, :-1].sum(axis=1) == 0) & (last > 0)]] = False
    begins = np.where(is_target, 0, rows + 1)
    begins[starts[last > 0]] = np.maximum(begins[starts[last > 0]], starts[last > 0])
    places = np.maximum(rows - np.maximum.accumulate(begins), 0).astype(np.int32)
    return replace(sequences, token_values=sequences.token_values | dict(places=places))
