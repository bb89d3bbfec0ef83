"""Closed form of the device memory that each phase of a run needs, from the architecture and the examples' lengths.

Counted tensor by tensor from model/nn/t5/network.py, model/nn/attention.py, model/nn/loss.py and model/train/optim.py
as they work on a GPU; what no count gives (libraries' workspaces, the allocator's rounding) are the constants below:
those that bench/memory_fit.py fits to 12 cases on an H200, rounded.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from model.data.length_histogram import Lengths
from model.nn.flat_params import ROWS
from model.nn.t5.footprint import (
    count_matrix_numbers,
    count_parameters,
    evaluation_moment,
    generation_bytes,
    step_moments,
)

BATCH_NUMBERS = 2**25  # of matrices that Muon works on together: its temporaries take 8 bytes a number

ANSWERS_A_BATCH = 32  # prompts that are answered together


def optimizer_bytes(spec):
    """(state, temporaries of an update) of the optimizer."""
    trained = count_parameters(spec.model_config, spec.decoder_only)
    matrices = count_matrix_numbers(spec.model_config, spec.decoder_only)
    return dict(
        adamw_rms=(8 * trained, 0),
        adamw=(8 * trained, 0),
        adafactor=(0, 0),  # but rows and columns
        muon=(8 * trained - 4 * matrices, 8 * min(matrices, BATCH_NUMBERS)),
    )[spec.optimizer]


def fixed_bytes(spec):
    """Bytes held from the first step to the last, by part."""
    parameters, trained = count_parameters(spec.model_config), count_parameters(spec.model_config, spec.decoder_only)
    return dict(
        weights=4 * parameters,
        bf16_weights=2 * parameters if spec.number_bytes == 2 else 0,
        gradients=4 * trained,
        optimizer=optimizer_bytes(spec)[0],
        workspaces=int(spec.constants.workspace_bytes),
    )


@dataclass(frozen=True)
class FilledForward:
    """What the examples of one forward cost together, for any limit of its tokens; never over the costliest share's.

    They are taken from the costliest a token on, in fractions too, so no set of at most `share_pairs` examples costs
    more; with `longest` from the longest response on.
    """

    cost: np.ndarray = field(repr=False)  # (kinds,) of one example
    lengths: Lengths = field(repr=False)
    share_pairs: int
    longest: bool = False

    def __post_init__(self):
        totals = self.lengths.tokens.sum(axis=1)
        counts = np.minimum(self.lengths.counts, self.share_pairs)
        dense, large = np.argsort(-self.cost / totals), np.argsort(-self.cost)
        order = np.lexsort((-totals, -self.lengths.tokens[:, 1])) if self.longest else dense
        tokens, costs = (np.cumsum((counts * x)[order]) for x in (totals, self.cost))
        most = np.interp(self.share_pairs, np.cumsum(counts[large]), np.cumsum((counts * self.cost)[large]))
        object.__setattr__(self, "_curve", (np.append(0, tokens), np.append(0.0, costs), float(most)))

    def __call__(self, micro_batch_tokens):
        tokens, costs, most = self._curve
        return min(float(np.interp(micro_batch_tokens, tokens, costs)), most)


class Estimate:
    """Peak reserved bytes by phase of a run on examples of these `lengths`, `share_pairs` a rank and step.

    Of the costliest forwards that there could be, or of those with the `longest` responses.
    """

    def __init__(self, spec, lengths, share_pairs, max_new_tokens=128, longest=False):
        def filled(cost, pairs=share_pairs):
            return FilledForward(cost, lengths, pairs, longest)

        self.spec, self.lengths, self.share_pairs = spec, lengths, share_pairs
        self.max_new_tokens = max_new_tokens
        self.fixed = fixed_bytes(spec)
        self._step = {
            checkpointing: {name: filled(c) for name, c in step_moments(spec, lengths.tokens, checkpointing).items()}
            for checkpointing in (False, True)
        }
        targets, all_pairs = lengths.tokens[:, 1].astype(np.float64), lengths.counts.sum()  # no shares in evaluation
        self._targets, self._evaluation_targets = filled(targets), filled(targets, all_pairs)
        self._evaluation = filled(evaluation_moment(spec, lengths.tokens), all_pairs)

    @cached_property
    def of_longest_responses(self):
        """The same, of forwards with the longest responses; of the plain twin's, whose scores grow with the square of a
        length, the costliest all the same.
        """
        if not self.spec.kernels:
            return self
        return Estimate(self.spec, self.lengths, self.share_pairs, self.max_new_tokens, longest=True)

    def step_parts(self, micro_batch_tokens, chunk_tokens, checkpointing):
        """Bytes at each moment of a training step, over what is held all the time."""
        model_config = self.spec.model_config
        tokens = max(micro_batch_tokens, self.lengths.longest)
        moments = {name: forward(tokens) for name, forward in self._step[checkpointing].items()}
        vocabulary = ROWS * -(-model_config.vocab_size // ROWS)
        table = 0 if self.spec.decoder_only else 4 * vocabulary * model_config.d_model  # its gradient once more
        moments["loss"] += self._chunk_bytes(self._targets(tokens), chunk_tokens) + table
        moments["embedding"] += table
        moments["update"] = optimizer_bytes(self.spec)[1]
        return moments

    def peaks(self, micro_batch_tokens, chunk_tokens, checkpointing, answers=ANSWERS_A_BATCH):
        """Peak reserved bytes on the device by phase."""
        tokens = max(micro_batch_tokens, self.lengths.longest)
        step = max(self.step_parts(micro_batch_tokens, chunk_tokens, checkpointing).values())
        prompt = int(self.lengths.tokens[:, 0].max())
        beyond = dict(
            load=-self.fixed["gradients"] - self.fixed["optimizer"],
            first_step=step,
            step=step,
            evaluation=self._evaluation(tokens) + self._chunk_bytes(self._evaluation_targets(tokens), chunk_tokens),
            generation=generation_bytes(self.spec, answers, prompt, self.max_new_tokens),
            save=0,
        )
        held, constants = sum(self.fixed.values()), self.spec.constants
        holes = constants.holes if checkpointing and not self.spec.kernels else 1.0
        return {name: int((held + max(more, more * holes)) * constants.reserved) for name, more in beyond.items()}

    def _chunk_bytes(self, targets, chunk_tokens):
        return min(chunk_tokens, targets) * self.spec.model_config.vocab_size * self.spec.number_bytes

    def forwards(self, micro_batch_tokens):
        """Forwards of a step on average, were the tokens of shares normally distributed."""
        mean = self.share_pairs * self.lengths.mean
        spread = max(math.sqrt(2 * self.share_pairs) * self.lengths.deviation, 1e-9)
        most = int((mean + 5 * spread) / micro_batch_tokens)
        limits = ((k * micro_batch_tokens + 0.5 - mean) / spread for k in range(1, most + 1))  # whole tokens
        return 1 + sum(math.erfc(limit) / 2 for limit in limits)

    def recording_bytes(self, micro_batch_tokens, chunk_tokens, checkpointing):
        """Bytes that recorded steps of at most so many tokens keep for themselves."""
        moments = self.step_parts(micro_batch_tokens, chunk_tokens, checkpointing) | dict(update=0)
        return int(max(moments.values()) * self.spec.constants.reserved)

    def step_peak(self, *cutting):
        """Peak reserved bytes on the device of a training step."""
        return self.peaks(*cutting)["step"]


def disk_bytes(spec, kept):
    """Bytes on disk of `kept` checkpoints, one being written, best/, last/ and one of them being written."""
    weights = 4 * count_parameters(spec.model_config)
    return (kept + 1) * (weights + optimizer_bytes(spec)[0]) + 3 * weights
