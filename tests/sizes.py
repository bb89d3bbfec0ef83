"""Published sizes of networks, and lengths of pairs, for which memory is predicted and measured."""

from dataclasses import dataclass

import numpy as np

QWENS = {  # the published sizes of Qwen1.5-7B, Qwen3-4B and Qwen1.5-1.8B
    "qwen1.5-7b": dict(hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32),
    "qwen3-4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                     num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, model_type="qwen3"),
    "qwen1.5-1.8b": dict(hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16),
}  # fmt: skip
QWEN_VOCAB_SIZE, QWEN_RANK = 151_936, 32
VOCAB_SIZE = 29_298  # ChatLM-mini-Chinese's
# Quantiles of the tokens per side (EOS included). Source: the lengths in characters of the 3,000 pairs of ChatLM's
# sample file, divided by 1.54 (prompts) and 1.66 (responses) characters per token; its cut at 320 characters is
# smoothed into a tail. The means are 24 and 108. The two sides are independent there (correlation -0.05) and here.
SHARES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
PROMPT_TOKENS = (2, 4, 6, 7, 9, 15, 28, 48, 65, 122, 230)
RESPONSE_TOKENS = (2, 7, 13, 19, 46, 110, 156, 202, 222, 248, 256)


def draw_lengths(num_pairs, rng):
    """Tokens of prompts and responses, EOS included: (num_pairs, 2) uint16."""
    sides = [np.interp(rng.random(num_pairs), SHARES, side) for side in (PROMPT_TOKENS, RESPONSE_TOKENS)]
    return np.rint(np.stack(sides, axis=1)).astype(np.uint16)


@dataclass(frozen=True)
class HeavyTail:
    """A token store of short pairs; one in twenty has the maximum length."""

    longest: int
    pairs: int = 2048
    vocab_size: int = 40_960

    @property
    def lengths(self):
        draw = np.random.default_rng(0)
        lengths = np.minimum(draw.geometric(1 / 60, (self.pairs, 2)) + 1, self.longest).astype(np.uint16)
        lengths[::20] = self.longest
        return lengths

    @property
    def meta(self):
        return dict(source=dict(max_seq_len=self.longest))

    def __len__(self):
        return self.pairs

    def tokens(self, ids):
        draw, totals = np.random.default_rng(0), self.lengths[ids].sum(axis=0, dtype=np.int64)
        return tuple(draw.integers(3, self.vocab_size, total) for total in totals)
