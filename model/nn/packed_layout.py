"""Where the examples of a packed micro-batch lie, for the attention kernels."""

from dataclasses import dataclass

import numpy as np
import torch

TILE = 64  # queries or keys per tile


@dataclass(frozen=True)
class PackedLayout:
    """Where the tiles of packed examples lie: one row per tile, int32.

    A row holds the tile's first row in its example, and the example's first query, number of queries, first key and
    number of keys. Rows of zeros are unused.
    """

    query_tiles: torch.Tensor  # (tiles, 5)
    key_tiles: torch.Tensor  # (tiles, 5)

    def to(self, device):
        return PackedLayout(self.query_tiles.to(device), self.key_tiles.to(device))


def packed_tiles(query_lengths, key_lengths, bucket=None):
    """(query tiles, key tiles) of PackedLayout as numpy arrays, for examples of these lengths in tokens.

    `bucket` (queries, keys, pairs) pads both to fixed sizes: to that many tokens, which attend to nothing, and to the
    most tiles that so many pairs can take.
    """
    queries, keys, pairs = bucket or (0, 0, 0)
    query_tiles = _tiles(query_lengths, key_lengths, queries, pairs)
    key_tiles = _tiles(key_lengths, query_lengths, keys, pairs)
    return query_tiles, key_tiles.take([0, 3, 4, 1, 2], axis=1)


def _tiles(own, other, bucket_tokens, bucket_pairs):
    """Tiles (tiles, 5) of queries or keys: (first row, own start, own length, other start, other length)."""
    starts, other_starts = np.cumsum(own) - own, np.cumsum(other) - other
    columns = [starts, own, other_starts, other]
    if bucket_tokens:
        num_tokens = int(own.sum())
        padding = (num_tokens, bucket_tokens - num_tokens, 0, 0)
        columns = [np.append(column, value) for column, value in zip(columns, padding, strict=True)]
    counts = -(-columns[1] // TILE)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([index * TILE, *(np.repeat(column, counts) for column in columns)], axis=1).astype(np.int32)
    num_tiles = bucket_tokens // TILE + bucket_pairs + 1 if bucket_tokens else len(tiles)
    return np.concatenate([tiles, np.zeros((num_tiles - len(tiles), 5), np.int32)])
