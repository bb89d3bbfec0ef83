"""Closed form of the device memory that each phase of a run needs, from the architecture and the examples' lengths.

It counts the tensors that a family's network, model/nn/loss.py and the optimizer hold on a GPU. What counting
does not give (workspaces of libraries, rounding of the allocator) are the Constants in model/nn/memory_spec.py, which
bench/memory_fit.py fits to 12 cases on an H200.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from model.data.length_histogram import Lengths
from model.nn.embedding import adds_rows
from model.nn.flat_params import VOCABULARY_MULTIPLE
from model.nn.loss import computes_logits_again

WITHOUT_MATRICES = {"loss", "embedding"}  # moments of a step in which no product of a layer makes a matrix


@dataclass(frozen=True)
class Answers:
    """What an evaluation generates."""

    count: int = 32  # answers wanted together
    new_tokens: int = 128  # of one, at most


def fixed_bytes(spec):
    """{part: bytes} held from the first step to the last."""
    average = dict(average=spec.average_bytes) if spec.averages else {}
    teachers = dict(teachers=spec.teacher_bytes) if spec.teachers else {}
    own, has_copies = spec.own_part, spec.number_bytes == 2
    masters = own.numbers if own and has_copies else spec.trained  # without copies, all compute with the masters
    keeps = not spec.offloads or not has_copies
    return dict(
        weights=(4 * masters * spec.has_masters if keeps else 0) + spec.frozen_bytes,
        bf16_weights=2 * spec.trained if has_copies else 0,
        gradients=spec.gradient_bytes * spec.trained,
        optimizer=0 if spec.offloads else own.state_bytes if own else spec.state_bytes,
        **average,
        **teachers,
        workspaces=int(spec.constants.workspace_bytes) + spec.sum_bytes,
    )


@dataclass(frozen=True)
class ForwardCostBound:
    """Upper bound on the cost of one forward's examples as a function of its number of tokens.

    A fractional knapsack: it takes the examples with the highest cost per token first, and fractions of the last one,
    so no set of at most `share_pairs` examples costs more; where all have one length, there are no fractions. With
    `longest` it takes the longest targets first instead, which bounds only sets of the longest targets.
    """

    cost: np.ndarray = field(repr=False)  # (kinds,) of one example of each kind
    lengths: Lengths = field(repr=False)
    share_pairs: int
    longest: bool = False

    def __post_init__(self):
        totals = self.lengths.tokens.sum(axis=1)
        counts = np.minimum(self.lengths.counts, self.share_pairs)
        dense, large = np.argsort(-self.cost / totals), np.argsort(-self.cost)
        order = np.lexsort((-totals, -self.lengths.tokens[:, -1])) if self.longest else dense
        tokens, costs = (np.cumsum((counts * x)[order]) for x in (totals, self.cost))
        most = np.interp(self.share_pairs, np.cumsum(counts[large]), np.cumsum((counts * self.cost)[large]))
        object.__setattr__(self, "_curve", (np.append(0, tokens), np.append(0.0, costs), float(most)))

    def __call__(self, micro_batch_tokens):
        tokens, costs, most = self._curve
        whole = micro_batch_tokens // self.lengths.unit * self.lengths.unit
        return min(float(np.interp(whole, tokens, costs)), most)


class Estimate:
    """Predicts peak reserved bytes by phase for examples of these `lengths`, `share_pairs` pairs per rank and step.

    It assumes the costliest forwards possible, or with `longest` those with the longest targets.
    """

    def __init__(self, spec, lengths, share_pairs, answers=Answers(), longest=False):
        def bound(cost, pairs=share_pairs):
            return ForwardCostBound(cost, lengths, pairs, longest)

        self.spec, self.lengths, self.share_pairs = spec, lengths, share_pairs
        self.answers = answers
        self.fixed, self._bound, self._step = fixed_bytes(spec), bound, {}
        targets, all_pairs = lengths.tokens[:, -1].astype(np.float64), lengths.counts.sum()  # evaluation has no shares
        self._targets, self._evaluation_targets = bound(targets), bound(targets, all_pairs)
        self._evaluation = bound(spec.family.evaluation_moment(spec, lengths.tokens), all_pairs)

    @property
    def num_blocks(self):
        """Blocks of the network, each of which backward may compute again."""
        return self.spec.model_config.num_blocks

    @cached_property
    def of_longest_targets(self):
        """This Estimate for the forwards with the longest targets.

        Without kernels it is `self`: attention scores grow with the square of a length, so the costliest ones count.
        """
        if not self.spec.kernels:
            return self
        return Estimate(self.spec, self.lengths, self.share_pairs, self.answers, longest=True)

    def step_parts(self, micro_batch_tokens, chunk_tokens, checkpointing):
        """{moment: bytes} of a training step, on top of the fixed bytes; `checkpointing` counts blocks."""
        model_config = self.spec.model_config
        tokens = max(micro_batch_tokens, self.lengths.longest)
        moments = {name: forward(tokens) for name, forward in self._bounds(checkpointing).items()}
        for name in moments.keys() - WITHOUT_MATRICES:
            moments[name] += self.spec.product_bytes
        vocabulary = VOCABULARY_MULTIPLE * -(-model_config.vocab_size // VOCABULARY_MULTIPLE)
        # the second gradient of the embedding, which is also the output projection
        table = 4 * vocabulary * model_config.width if self.trains_tables else 0
        networks = 1 + len(self.spec.teachers)
        moments["loss"] += networks * self._chunk_bytes(self._targets(tokens), chunk_tokens)
        if not self.computes_logits_again(checkpointing):
            moments["loss"] += table
        elif self.spec.family.reads_one_stream:  # the gradient of the targets' rows comes after the last norm's output
            moments["loss"] -= model_config.width * self.spec.number_bytes * self._targets(tokens)
        if table and adds_rows(tokens, model_config.vocab_size, model_config.width):
            table = (4 if self.spec.has_masters else 8) * tokens * model_config.width  # sums, and rows that they change
        moments["embedding"] += table
        moments["update"] = self.spec.update_bytes
        return moments

    @property
    def trains_tables(self):
        """Whether the embedding and the output weight are trained."""
        return self.spec.part == "all" and self.spec.lora is None

    def computes_logits_again(self, checkpointing):
        """As model.nn.loss.computes_logits_again, of a step in which backward computes so many blocks again."""
        config = self.spec.model_config
        numbers = config.vocab_size * config.width * self.trains_tables
        return computes_logits_again(checkpointing, self.num_blocks, numbers)

    def _bounds(self, checkpointing):
        """{moment: ForwardCostBound} of a step in which backward computes so many blocks again."""
        if checkpointing not in self._step:
            costs = self.spec.family.step_moments(self.spec, self.lengths.tokens, checkpointing)
            if self.spec.teachers:
                costs |= self._with_teachers(costs["loss"])
            self._step[checkpointing] = {name: self._bound(cost) for name, cost in costs.items()}
        return self._step[checkpointing]

    def _with_teachers(self, loss):
        """The moments in which teachers hold something: each one's forward, and the loss, which needs their outputs."""
        spec, tokens = self.spec, self.lengths.tokens
        forwards = [spec.family.evaluation_moment(teacher, tokens) for teacher in spec.teachers]
        widths = sum(teacher.model_config.width for teacher in spec.teachers)
        outputs = widths * spec.number_bytes * tokens[:, -1]
        return dict(loss=loss + outputs, teachers=np.max(forwards, axis=0) + outputs)

    def peaks(self, micro_batch_tokens, chunk_tokens, checkpointing, answers=1):
        """{phase: peak reserved bytes on the device}, with so many `answers` generated together."""
        tokens = max(micro_batch_tokens, self.lengths.longest)
        step = max(self.step_parts(micro_batch_tokens, chunk_tokens, checkpointing).values())
        inputs, matrix = int(self.lengths.tokens[:, 0].max()), self.spec.product_bytes
        extra_bytes = dict(
            load=-self.fixed["optimizer"] - self.fixed.get("average", 0) - self._after_loading,
            first_step=step,
            step=step,
            evaluation=matrix
            + self._evaluation(tokens)
            + self._chunk_bytes(self._evaluation_targets(tokens), chunk_tokens),
            generation=matrix + self.spec.family.cache_bytes(self.spec, answers, inputs, self.answers.new_tokens),
            save=0,
        )
        held, constants = sum(self.fixed.values()), self.spec.constants
        holes = constants.holes if checkpointing and not self.spec.kernels else 1.0
        return {name: int((held + max(more, more * holes)) * constants.reserved) for name, more in extra_bytes.items()}

    @property
    def _after_loading(self):
        """Bytes that are taken after loading: gradients, where neither masters lie there first nor there are none."""
        lie_there = self.spec.own_part or self.spec.offloads or not self.spec.has_masters
        return 0 if lie_there else self.fixed["gradients"]

    def _chunk_bytes(self, targets, chunk_tokens):
        return min(chunk_tokens, targets) * self.spec.model_config.vocab_size * self.spec.number_bytes

    def host_bytes(self, micro_batch_tokens, chunk_tokens, checkpointing):
        """Bytes of page-locked host memory, which comes in powers of two, for the inputs of recomputed blocks."""
        tokens = min(max(micro_batch_tokens, self.lengths.longest), self.share_pairs * self.lengths.longest)
        stream = self.spec.number_bytes * self.spec.model_config.width * tokens
        return checkpointing * 2 ** math.ceil(math.log2(stream)) * self.spec.offloads_inputs

    def forwards(self, micro_batch_tokens):
        """Mean number of forwards per step, if the tokens per share are normally distributed."""
        mean = self.share_pairs * self.lengths.mean
        spread = max(math.sqrt(2 * self.share_pairs) * self.lengths.deviation, 1e-9)
        most = int((mean + 5 * spread) / micro_batch_tokens)
        # 0.5, because numbers of tokens are whole
        limits = ((k * micro_batch_tokens + 0.5 - mean) / spread for k in range(1, most + 1))
        return 1 + sum(math.erfc(limit) / 2 for limit in limits)

    def forward_bytes(self, micro_batch_tokens, chunk_tokens, checkpointing):
        """Bytes of a forward and backward of at most `micro_batch_tokens` tokens, on top of the fixed bytes."""
        moments = self.step_parts(micro_batch_tokens, chunk_tokens, checkpointing) | dict(update=0)
        return int(max(moments.values()) * self.spec.constants.reserved)

    def graph_bytes(self, *batching):
        """Bytes of the pool that the CUDA graphs of steps cut this way, and of their update, share."""
        update_bytes = int(self.spec.update_bytes * self.spec.constants.reserved)
        return max(self.forward_bytes(*batching), update_bytes)

    def step_peak(self, *batching):
        """Peak reserved bytes on the device of a training step cut this way."""
        return self.peaks(*batching)["step"]


def disk_bytes(spec, kept):
    """Bytes on disk of `kept` checkpoints plus one being written, and of best/ and last/ plus one being written."""
    weights = 4 * spec.saved
    return (kept + 1) * (weights * (2 if spec.averages else 1) + spec.state_bytes) + 3 * weights
