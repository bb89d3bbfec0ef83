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

from model.commands.adapter import lora_of
from model.commands.machine import Machine
from model.commands.objective import objectives_for
from model.commands.option_values import load_config
from model.commands.recipe import answers_wanted, memory_spec
from model.data.token_store import Source, open_store
from model.data.tokenizer import PROBE
from model.memory.estimate import Estimate
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import MemoryPlan
from model.nn.registry import family_of
from model.nn.t5.family import T5
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.run.train_state import TrainState
from model.runtime.distributed import ALONE
from model.train.evaluate import Evaluation
from model.train.examples import Examples
from model.train.loader import Loader, Schedule
from model.train.lr_schedule import LearnRate
from model.train.objectives.pairs import Pairs
from model.train.step import Position, StepContext, train_steps

torch.set_num_threads(1)
PLAN = MemoryPlan(micro_batch_tokens=400, chunk_tokens=64, gradient_checkpointing=0, predicted_peak_bytes=0)
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
    """A TrainConfig without gradient clipping, warm-up and dropout."""
    return load_config("pretrain", dict(max_grad_norm=0, warmup_steps=0, dropout=0) | options)


def open_pairs(path, tokenizer, max_seq_len, root, columns=("", ""), **options):
    """The TokenStore of a file of pairs."""
    return open_store(Source((path,), Pairs(), tokenizer, max_seq_len, columns), root, **options)


def examples_in(store, first_id=0, objective=None, **options):
    """The Examples of a TokenStore for a T5."""
    return Examples(store, objective or Pairs(), T5, first_id, **options)


def batch_of(store, ids, first_id=0, bucket=None, **options):
    """MicroBatch of the examples `ids` for a T5, in host memory."""
    return examples_in(store, first_id, **options).batch(ids, 1, bucket)


def make_spec(config, model_config, dtype, device_type="cuda", launch_tokens=0):
    """MemorySpec of a run of one process."""
    machine = Machine(device_type=device_type, launch_tokens=launch_tokens)
    return memory_spec(config, model_config, dtype, machine, lora_of(config, model_config))


def make_estimate(config, model_config, dtype, lengths, share_pairs, launch_tokens=0):
    """Estimate of a run on a GPU."""
    spec = make_spec(config, model_config, dtype, launch_tokens=launch_tokens)
    answers = answers_wanted(config.bleu_pairs, config.max_new_tokens, Machine(device_type="cuda"))
    return Estimate(spec, lengths, share_pairs, answers)


def evaluation_of(model, store, tokenizer, num_answers=0, max_new_tokens=60):
    return Evaluation(ALONE, model, examples_in(store, tokenizer.pad_id), tokenizer, num_answers, max_new_tokens)


def context_of(model, optimizer, store, config, **schedule):
    """StepContext of one process on the CPU; for `schedule` see `schedule_of`."""
    family = family_of(model.config)
    (objective,), kernels = objectives_for(config).values(), model.uses_kernels
    examples = Examples(store, objective, family, 0, config.seed, kernels, model.dropout > 0)
    return StepContext(ALONE, model, optimizer, Loader(ALONE, examples, schedule_of(config, **schedule)), config)


def schedule_of(config, total_pairs, global_batch, warmup_pairs=0):
    rate = LearnRate(config.learn_rate, config.lr_schedule, warmup_pairs, total_pairs)
    return Schedule(total_pairs, global_batch, config.seed, rate)


def steps_of(model, optimizer, store, plan, config, **schedule):
    """The generator of a model's training steps, from the start of a run."""
    return train_steps(context_of(model, optimizer, store, config, **schedule), Position(plan))


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
