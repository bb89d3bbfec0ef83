"""Closed form of the device memory that each phase of a run needs, from the architecture and the examples' lengths.

Counted tensor by tensor from model/nn/t5/network.py, model/nn/attention.py, model/nn/loss.py and model/train/optim.py
as they work on a GPU; what no count gives (libraries' workspaces, the allocator's rounding) are the constants below:
those that bench/memory_fit.py fits to 12 cases on an H200, rounded.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from config import T5ModelConfig
from model.data.length_histogram import Lengths
from model.nn.attention import round_up
from model.nn.flat_params import ROWS
from model.train.optim import BATCH_NUMBERS

ANSWERS_A_BATCH = 32  # prompts that are answered together


@dataclass(frozen=True)
class Constants:
    """What counting does not give."""

    reserved: float = 1.02  # what the allocator holds over what is asked of it
    holes: float = 1.13  # over that, where the plain twin computes blocks again, whose many sizes leave holes
    workspace_bytes: float = 96 * 2**20  # cuBLAS, layouts, rounding


@dataclass(frozen=True)
class Setting:
    """What fixes the bytes of a run, beside the lengths of its examples and its plan."""

    shape: T5ModelConfig
    number_bytes: int  # s: 2 in bf16, 4 in float32
    kernels: bool  # attention by the Triton kernels, else by the plain twin
    optimizer: str = "adamw_rms"
    dropout: bool = False
    decoder_only: bool = False  # the decoder alone is trained
    launch_tokens: int = 5000  # that the GPU computes while a forward and backward are launched
    constants: Constants = Constants()

    @property
    def inner(self):
        return self.shape.num_heads * self.shape.d_kv


def count_parameters(shape, decoder_only=False):
    """Number of weights of a T5 of this shape; of the decoder alone under `decoder_only`."""
    attention = 4 * shape.d_model * shape.num_heads * shape.d_kv
    feed_forward = 2 * shape.d_model * shape.d_ff
    bias = shape.relative_attention_num_buckets * shape.num_heads
    encoder = shape.num_layers * (attention + feed_forward + 2 * shape.d_model) + bias + shape.d_model
    decoder = shape.num_decoder_layers * (2 * attention + feed_forward + 3 * shape.d_model) + bias + shape.d_model
    return decoder if decoder_only else encoder + decoder + shape.vocab_size * shape.d_model


def count_matrix_numbers(shape, decoder_only=False):
    """Number of weights in the matrices of the layers."""
    encoder_layers, decoder_layers = 0 if decoder_only else shape.num_layers, shape.num_decoder_layers
    attention = 4 * shape.d_model * shape.num_heads * shape.d_kv * (encoder_layers + 2 * decoder_layers)
    return attention + 2 * shape.d_model * shape.d_ff * (encoder_layers + decoder_layers)


def optimizer_bytes(setting):
    """(state, temporaries of an update) of the optimizer."""
    trained = count_parameters(setting.shape, setting.decoder_only)
    matrices = count_matrix_numbers(setting.shape, setting.decoder_only)
    return dict(
        adamw_rms=(8 * trained, 0),
        adamw=(8 * trained, 0),
        adafactor=(0, 0),  # but rows and columns
        muon=(8 * trained - 4 * matrices, 8 * min(matrices, BATCH_NUMBERS)),
    )[setting.optimizer]


def fixed_bytes(setting):
    """Bytes held from the first step to the last, by part."""
    parameters, trained = count_parameters(setting.shape), count_parameters(setting.shape, setting.decoder_only)
    return dict(
        weights=4 * parameters,
        bf16_weights=2 * parameters if setting.number_bytes == 2 else 0,
        gradients=4 * trained,
        optimizer=optimizer_bytes(setting)[0],
        workspaces=int(setting.constants.workspace_bytes),
    )


def _attention(setting, queries, keys):
    """(kept for backward, temporaries of backward) of one attention layer; bytes for these numbers of tokens."""
    d, s, inner, heads = setting.shape.d_model, setting.number_bytes, setting.inner, setting.shape.num_heads
    if setting.kernels:  # q, k, v, and a log-sum-exp and its like in backward for each query and head
        kept, work = inner * s * (queries + 2 * keys) + 4 * heads * queries, 4 * heads * queries
    else:  # q, k, v of padded blocks, and the weights of each query and key
        queries_padded, keys_padded = round_up(queries), round_up(keys)
        scores = heads * queries_padded * keys_padded
        kept = inner * s * (queries_padded + 2 * keys_padded) + scores * s
        work = inner * s * (queries_padded + 2 * keys_padded) + 3 * scores * s
    # the norm's output, the attention's output, a number for the norm; their gradients
    kept = kept + (d * s + inner * s + setting.dropout * d + 4) * queries
    return kept, work + (4 * d + inner) * s * queries + inner * s * (queries + 2 * keys)


def _feed_forward(setting, queries):
    """As `_attention`, for one feed-forward layer: the norm's output, what the ReLU gives."""
    d, f, s = setting.shape.d_model, setting.shape.d_ff, setting.number_bytes
    dropped = (d + f + f * s) * setting.dropout  # two masks, and what dropout left of the ReLU's output
    return ((d + f) * s + dropped + 4) * queries, (3 * d + 2 * f) * s * queries


def _ends(setting, queries):
    """Bytes kept by a stack's ends: token ids, the last norm's output, the plain twin's position bias."""
    bias = 0 if setting.kernels else setting.shape.num_heads * setting.number_bytes * round_up(queries) ** 2
    return (setting.shape.d_model * setting.number_bytes + 24) * queries + bias


def _stack(setting, layers, num_blocks, queries, checkpointing):
    """(bytes kept by a stack's blocks, the most that the backward of its last block holds).

    `layers` are the (kept, temporaries) of the layers of one block. With checkpointing a block keeps the stream that it
    reads, and its backward computes the rest again.
    """
    kept_by_layer = [kept for kept, _ in layers]
    block = setting.shape.d_model * setting.number_bytes * queries if checkpointing else sum(kept_by_layer)
    kept, moments = num_blocks * block, []
    for i, (_, work) in enumerate(layers):
        rest = sum(kept_by_layer[: i + 1]) if checkpointing else -sum(kept_by_layer[i + 1 :])
        moments.append(kept + rest + work)
    return kept, np.max(moments, axis=0)


def step_moments(setting, tokens, checkpointing):
    """Bytes of each example at each moment of a training step that may be its peak; `tokens` (kinds, 2)."""
    shape = setting.shape
    prompt, response = tokens.T.astype(np.float64)
    encoder_layers = [_attention(setting, prompt, prompt), _feed_forward(setting, prompt)]
    decoder_layers = [
        _attention(setting, response, response),
        _attention(setting, response, prompt),
        _feed_forward(setting, response),
    ]
    encoder, encoder_backward = _stack(setting, encoder_layers, shape.num_layers, prompt, checkpointing)
    decoder, decoder_backward = _stack(setting, decoder_layers, shape.num_decoder_layers, response, checkpointing)
    if setting.decoder_only:
        encoder, encoder_backward = 0, 0  # nothing of it waits for a backward
    ends = _ends(setting, prompt) + _ends(setting, response)
    stream = shape.d_model * setting.number_bytes
    return dict(
        loss=encoder + decoder + ends + 2 * stream * response,  # what the loss reads, and its gradient
        decoder=encoder + decoder_backward + ends + 2 * stream * prompt,  # the gradient of what cross-attention reads
        encoder=encoder_backward + _ends(setting, prompt),
        embedding=(stream + 4 * shape.d_model) * (prompt + response),
    )


def evaluation_moment(setting, tokens):
    """Bytes of each example in a forward that keeps nothing for a backward."""
    prompt, response = tokens.T.astype(np.float64)
    layers = (
        _attention(setting, prompt, prompt), _attention(setting, response, prompt), _feed_forward(setting, prompt),
        _feed_forward(setting, response),
    )  # fmt: skip
    stream = 2 * setting.shape.d_model * setting.number_bytes * (prompt + response)
    inside = setting.shape.d_ff * setting.number_bytes * np.maximum(prompt, response)
    return stream + inside + np.max([kept for kept, _ in layers], axis=0)


def generation_bytes(setting, answers, prompt_tokens, new_tokens):
    """Bytes of transformers' greedy generation: keys and values, growing by copying; logits; the encoder's scores."""
    shape, s = setting.shape, setting.number_bytes
    cache = 2 * shape.num_decoder_layers * setting.inner * s * (prompt_tokens + 2 * new_tokens)
    encoder = 3 * 4 * shape.num_heads * prompt_tokens**2 + prompt_tokens * (4 * 3 * shape.d_model + s * shape.d_ff * 2)
    weights = 2 * count_parameters(shape) if s == 2 else 0  # autocast's copies
    return weights + answers * (cache + encoder + 12 * shape.vocab_size)


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

    def __init__(self, setting, lengths, share_pairs, max_new_tokens=128, longest=False):
        def filled(cost, pairs=share_pairs):
            return FilledForward(cost, lengths, pairs, longest)

        self.setting, self.lengths, self.share_pairs = setting, lengths, share_pairs
        self.max_new_tokens = max_new_tokens
        self.fixed = fixed_bytes(setting)
        self._step = {
            checkpointing: {name: filled(c) for name, c in step_moments(setting, lengths.tokens, checkpointing).items()}
            for checkpointing in (False, True)
        }
        targets, all_pairs = lengths.tokens[:, 1].astype(np.float64), lengths.counts.sum()  # no shares in evaluation
        self._targets, self._evaluation_targets = filled(targets), filled(targets, all_pairs)
        self._evaluation = filled(evaluation_moment(setting, lengths.tokens), all_pairs)

    @cached_property
    def of_longest_responses(self):
        """The same, of forwards with the longest responses; of the plain twin's, whose scores grow with the square of a
        length, the costliest all the same.
        """
        if not self.setting.kernels:
            return self
        return Estimate(self.setting, self.lengths, self.share_pairs, self.max_new_tokens, longest=True)

    def step_parts(self, micro_batch_tokens, chunk_tokens, checkpointing):
        """Bytes at each moment of a training step, over what is held all the time."""
        shape = self.setting.shape
        tokens = max(micro_batch_tokens, self.lengths.longest)
        moments = {name: forward(tokens) for name, forward in self._step[checkpointing].items()}
        vocabulary = ROWS * -(-shape.vocab_size // ROWS)
        table = 0 if self.setting.decoder_only else 4 * vocabulary * shape.d_model  # its gradient once more
        moments["loss"] += self._chunk_bytes(self._targets(tokens), chunk_tokens) + table
        moments["embedding"] += table
        moments["update"] = optimizer_bytes(self.setting)[1]
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
            generation=generation_bytes(self.setting, answers, prompt, self.max_new_tokens),
            save=0,
        )
        held, constants = sum(self.fixed.values()), self.setting.constants
        holes = constants.holes if checkpointing and not self.setting.kernels else 1.0
        return {name: int((held + max(more, more * holes)) * constants.reserved) for name, more in beyond.items()}

    def _chunk_bytes(self, targets, chunk_tokens):
        return min(chunk_tokens, targets) * self.setting.shape.vocab_size * self.setting.number_bytes

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
        return int(max(moments.values()) * self.setting.constants.reserved)

    def step_peak(self, *cutting):
        """Peak reserved bytes on the device of a training step."""
        return self.peaks(*cutting)["step"]
