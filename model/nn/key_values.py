"""Keys and values of the tokens that each slot has read, in static tensors: what generation keeps between two tokens.

Letters: L layers, S slots, G heads of keys and values, T tokens of a slot, K head width.
"""

from dataclasses import dataclass

import torch

TOKENS_MULTIPLE = 8  # fast attention on GPUs reads its mask in rows of a multiple of 8 numbers


def rounded(tokens):
    """`tokens` rounded up to a size that a cache has."""
    return -(-tokens // TOKENS_MULTIPLE) * TOKENS_MULTIPLE


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of S slots. A slot may be filled again while others go on."""

    kept: torch.Tensor  # (L, 2, S, G, T, K)
    lengths: torch.Tensor  # int64 (S,): tokens there; beyond T in slots that nobody uses
    reads_all: bool = True  # a step reads all columns, not only those of the tokens there

    @property
    def last(self):
        """The last column."""
        return self.kept.shape[4] - 1

    def first(self, slots, input_tokens, new_tokens=0):
        """Those of the first `slots` slots for so many tokens, sharing this one's memory."""
        tokens = rounded(input_tokens + new_tokens)
        return KeyValues(self.kept[:, :, :slots, :, :tokens], self.lengths[:slots], self.reads_all)

    def fill(self, layer, both, slots, columns):
        """Write `both`, keys and values (N, G * K) of packed tokens, into these slots and columns (N,) of a layer."""
        for kept_SGTK, x in zip(self.kept[layer], both, strict=True):
            kept_SGTK.transpose(1, 2)[slots, columns] = x.view(len(x), -1, kept_SGTK.shape[3])

    def append(self, layer, both, columns):
        """Write `both`, keys and values (S, G * K) of one token for each slot, into the columns (S,) of a layer."""
        for kept_SGTK, x in zip(self.kept[layer], both, strict=True):
            heads, width = kept_SGTK.shape[1], kept_SGTK.shape[3]
            column = columns.view(-1, 1, 1, 1).expand(-1, heads, 1, width)
            kept_SGTK.scatter_(2, column, x.reshape(len(x), heads, 1, width))


def new_key_values(model, layers, slots, heads, tokens, head_width, reads_all=True):
    """Empty KeyValues on the model's device, in its compute dtype."""
    size = (layers, 2, slots, heads, rounded(tokens), head_width)
    kept = torch.zeros(size, device=model.device, dtype=model.compute_dtype)
    return KeyValues(kept, torch.zeros(slots, dtype=torch.int64, device=model.device), reads_all)
