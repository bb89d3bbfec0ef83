"""Tiny real parts of a run: text pairs, a file of them, a model, a plan, a state. One torch thread, so bits repeat."""

import os
import random
from dataclasses import asdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from config import T5ModelConfig, load_config
from model.data.tokenizer import PROBE
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import MemoryPlan
from model.nn.t5.network import TextToTextModel
from model.run.train_state import TrainState
from model.runtime.distributed import Ranks

torch.set_num_threads(1)
ALONE = Ranks(0, 1, 0, torch.device("cpu"), "none", None)
PLAN = MemoryPlan(micro_batch_tokens=400, chunk_tokens=64, gradient_checkpointing=False, predicted_peak_bytes=0)
STATE = TrainState(
    step=500, pairs_seen=32_000, first_batch=64, best_loss=1.2345678901234567, best_step=400, seed=7, world_size=3,
    tokenizer_fingerprint="abc", num_pairs=1000, plan=asdict(PLAN), growth=asdict(PlanRecovery(PLAN, 7)),
    evaluated_step=400, recent_norms=(1.5, 0.25),
)  # fmt: skip
SHAPE = dict(d_model=32, d_ff=64, num_heads=2, d_kv=16, num_layers=2, num_decoder_layers=2)


def make_pairs(num_pairs, seed=0, longest=40):
    """Pairs of random text; each prompt and response has 2 to `longest` characters."""
    draw = random.Random(seed)
    sides = ["".join(draw.choices(PROBE, k=draw.randint(2, longest))) for _ in range(2 * num_pairs)]
    return list(zip(sides[::2], sides[1::2], strict=True))


def write_parquet(path, pairs):
    prompts, responses = zip(*pairs, strict=True)
    pq.write_table(pa.table(dict(prompt=prompts, response=responses)), path)
    return path


def random_lengths(num_examples, seed=0, longest=256):
    """Lengths like those of text: many short sides, few long ones."""
    draws = np.random.default_rng(seed).lognormal(3.5, 0.8, (num_examples, 2))
    return np.clip(draws, 2, longest).astype(np.int64)


def make_model(vocab_size, seed=1, shape=SHAPE, **options):
    return TextToTextModel(T5ModelConfig(**shape, vocab_size=vocab_size), **options).initialise(seed)


def make_config(**options):
    """A TrainConfig without gradient clipping and warm-up."""
    return load_config("pretrain", dict(max_grad_norm=0, warmup_steps=0) | options)


def examples_of(store, ids):
    """(prompt ids, response ids) of each example, as lists."""
    sides = []
    for flat, lengths in zip(store.tokens(ids), store.lengths[ids].astype(int).T, strict=True):
        sides.append([part.tolist() for part in torch.from_numpy(flat).split(lengths.tolist())])
    return list(zip(*sides, strict=True))


def padded(store, ids, pad_id):
    """Input of transformers' T5: input_ids, attention_mask and labels, padded with `pad_id`, 0 and -100."""
    prompts, responses = zip(*examples_of(store, ids), strict=True)
    input_ids, labels = (_pad(rows, fill) for rows, fill in ((prompts, pad_id), (responses, -100)))
    mask = _pad([[1] * len(prompt) for prompt in prompts], 0)
    return dict(input_ids=input_ids, attention_mask=mask, labels=labels)


def _pad(rows, fill):
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def stock_loss(stock, batch):
    """Cross-entropy of transformers' T5, summed over target tokens, in nats."""
    logits = stock(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def farthest(one, other):
    """Largest relative distance |one - other| / |other| between the tensors of two dicts with the same keys."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)) for name in one)
