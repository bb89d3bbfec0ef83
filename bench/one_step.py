"""Steps of a network with random weights on pairs of one length: predicted and measured peak of the reserved bytes."""

import gc
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.runs import context_of, schedule_of
from config import TrainConfig
from model.commands.adapter import lora_of
from model.data.length_histogram import Lengths
from model.memory.estimate import Estimate
from model.memory.plan import MemoryPlan
from model.nn.lora import attach
from model.nn.memory_spec import Constants
from model.nn.registry import family_of
from model.runtime.device_memory import peak_memory, release_memory, reset_peak
from model.runtime.distributed import Ranks
from model.train.dry_run import dry_run_update
from model.train.optim import make_optimizer
from model.train.step import Position, train_steps
from tests.parts import make_spec

CHUNK_TOKENS, WARM_STEPS = 2048, 8


@dataclass(frozen=True)
class OneLength:
    """A token store of `pairs` examples with `token_count` tokens per side."""

    pairs: int
    token_count: int
    vocab_size: int

    @property
    def lengths(self):
        return np.full((self.pairs, 2), self.token_count, np.uint16)

    @property
    def meta(self):
        return dict(source=dict(max_seq_len=self.token_count))

    def __len__(self):
        return self.pairs

    def tokens(self, ids):
        draw = np.random.default_rng(0)
        return tuple(draw.integers(3, self.vocab_size, len(ids) * self.token_count) for _ in range(2))


@dataclass(frozen=True)
class Setting:
    """A network with random weights, and pairs of one length that it is trained on; in a rehearsal on the CPU."""

    config: TrainConfig
    model_config: object
    rehearse: bool
    pairs: int
    tokens: int  # of each side
    compute_dtype: torch.dtype = torch.bfloat16

    @property
    def device(self):
        return torch.device("cpu" if self.rehearse else "cuda:0")

    @property
    def dtype(self):
        return torch.float32 if self.rehearse else self.compute_dtype

    @property
    def estimate(self):
        return self.estimate_with(Constants())

    def estimate_with(self, constants):
        spec = replace(make_spec(self.config, self.model_config, self.dtype, self.device.type), constants=constants)
        lengths = Lengths(np.array([[self.tokens, self.tokens]]), np.array([self.pairs]))
        return Estimate(spec, lengths, self.pairs)

    def whole_step(self, checkpointing):
        """The plan of a step in one forward, with all blocks computed again or none."""
        blocks = checkpointing * self.model_config.num_blocks
        return MemoryPlan(2 * self.pairs * self.tokens, CHUNK_TOKENS, blocks, 0)

    def model(self):
        with torch.device("meta"):
            model = family_of(self.model_config).build(self.model_config, 0.0, self.dtype)
            if lora := lora_of(self.config, self.model_config):
                attach(model, lora)
        spec = self.estimate.spec
        model.place(self.device, spec.offloads)
        model.offloads_inputs = spec.offloads_inputs
        for flat in model.flat.weights:
            flat.normal_(std=0.02) if flat.is_floating_point() else flat.random_(0, 256)
        return model

    def run(self, plan, steps=1):
        """(peak reserved bytes, seconds of a step); the bytes are 0 on a CPU, None if a step did not fit.

        Of many steps the first WARM_STEPS, which compile the kernels, are not timed.
        """
        release_memory()
        gc.collect()
        model, pairs = self.model(), self.pairs
        ranks, store = Ranks(0, 1, 0, self.device, "none", None), OneLength(pairs, self.tokens, model.config.vocab_size)
        optimizer, schedule = make_optimizer(model, self.config), schedule_of(self.config, steps * pairs, pairs)
        dry_run_update(ranks, model, optimizer)
        release_memory()
        reset_peak(self.device)
        context, fits, started = context_of(ranks, model, optimizer, store, self.config, schedule), True, time.time()
        warm = min(WARM_STEPS, steps - 1)
        for result in train_steps(context, Position(plan)):
            forwards = -(-2 * pairs * self.tokens // plan.micro_batch_tokens)
            fits = fits and not result.events and result.micro_batches == forwards
            started = self._clock() if result.step == warm else started
        return peak_memory(self.device)[1] if fits else None, (self._clock() - started) / (steps - warm)

    def _clock(self):
        if not self.rehearse:
            torch.cuda.synchronize(self.device)
        return time.time()


def errors(predicted, measured):
    error = round(predicted / measured - 1, 4) if measured else None
    gib = round(measured / 2**30, 2) if measured else None
    return dict(predicted_bytes=predicted, measured_bytes=measured, measured_gib=gib, error=error)
