"""Pairs of preferences and networks that bench.preferences measures, ours and TRL's on the same ones."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from bench.packed import TINY_QWEN
from config import MODELS
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.t5.sizes import T5ModelConfig
from tests.sizes import QWEN_VOCAB_SIZE, draw_lengths

QWEN3_1_7B = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
RANK, VOCAB_SIZE, STEP_PAIRS = 16, 29_298, dict(small=128, qwen=16)
WARM, TIMED = 4, 12  # steps


def lengths_of(part, steps, rehearse):
    """(pairs, 3) tokens of prompts, chosen and rejected responses."""
    draw, count = np.random.default_rng(0), steps * STEP_PAIRS[part] // (16 if rehearse else 1)
    if part == "small":
        prompts, chosen = draw_lengths(count, draw).T
        return np.stack([prompts, chosen, draw_lengths(count, draw)[:, 1]], axis=1).astype(np.int64)
    most = 1024 // (32 if rehearse else 1)
    totals = np.clip(draw.exponential(0.3 * most, (count, 2)), most // 16, most // 2).astype(np.int64)
    prompts = np.clip(draw.exponential(0.15 * most, count), most // 32, most // 2).astype(np.int64)
    return np.column_stack([prompts, totals])


@dataclass(frozen=True)
class Store:
    """A token store of random tokens with these lengths (rows, columns), the last ones being lengths of turns."""

    lengths: np.ndarray
    vocab_size: int
    values: dict
    num_turns: int = 0  # columns of turn lengths, each of one turn
    meta = dict(source=dict(max_seq_len=1024))

    def __len__(self):
        return len(self.lengths)

    def tokens(self, ids):
        draw, num_ids = np.random.default_rng(int(ids[0])), self.lengths.shape[1] - self.num_turns
        flat = [draw.integers(3, self.vocab_size, int(self.lengths[ids, c].sum())) for c in range(num_ids)]
        answers = self.lengths[ids, num_ids - self.num_turns : num_ids] if self.num_turns else []
        return (*flat, *(np.asarray(answers).T if self.num_turns else ()))


def model_config_of(part, rehearse):
    """The shape of the network of a part, a tiny one in a rehearsal."""
    if part == "qwen":
        sizes = (TINY_QWEN | dict(vocab_size=1000)) if rehearse else QWEN3_1_7B | dict(vocab_size=QWEN_VOCAB_SIZE)
        return DecoderModelConfig(**sizes)
    return T5ModelConfig(**MODELS["tiny" if rehearse else "small"], vocab_size=1000 if rehearse else VOCAB_SIZE)


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
