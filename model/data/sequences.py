"""What an objective hands to a network: token ids of one or two sides, which of them are targets, and plain values."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Sequences:
    """Sequences in order, without padding.

    The last side holds the targets. A network with an encoder reads the side before it; a decoder-only network reads
    all sides as one stream. `token_values` and `values` reach the objective's `losses` as tensors of the batch.
    """

    sides: tuple[np.ndarray, ...]  # int64 (tokens,) each: the ids of all sequences, one after the other
    lengths: np.ndarray  # int64 (sequences, sides) in tokens
    is_target: np.ndarray | None = None  # bool (tokens of the last side,); None: all of them are targets
    token_values: dict = field(default_factory=dict)  # {name: float32 or int32 (tokens of the last side,)}
    values: dict = field(default_factory=dict)  # {name: float32 or int32 (sequences,)}
    ids: np.ndarray | None = None  # int64 (sequences,): a number for each, by which dropout draws its masks
