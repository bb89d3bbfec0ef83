"""Bytes that T5 takes at each moment of a step, counted tensor by tensor."""

from dataclasses import dataclass

import numpy as np

from config import T5ModelConfig
from model.nn.attention import round_up


@dataclass(frozen=True)
class Constants:
    """What counting does not give."""

    reserved: float = 1.02  # what the allocator holds over what is asked of it
    holes: float = 1.13  # over that, where the plain twin computes blocks again, whose many sizes leave holes
    workspace_bytes: float = 96 * 2**20  # cuBLAS, layouts, rounding


@dataclass(frozen=True)
class MemorySpec:
    """What fixes the bytes of a run, beside the lengths of its examples and its plan."""

    model_config: T5ModelConfig
    number_bytes: int  # s: 2 in bf16, 4 in float32
    kernels: bool  # attention by the Triton kernels, else by the plain twin
    optimizer: str = "adamw_rms"
    dropout: bool = False
    decoder_only: bool = False  # the decoder alone is trained
    launch_tokens: int = 5000  # that the GPU computes while a forward and backward are launched
    constants: Constants = Constants()

    @property
    def inner(self):
        return self.model_config.num_heads * self.model_config.d_kv


def count_parameters(model_config, decoder_only=False):
    """Number of weights of a T5 of this shape; of the decoder alone under `decoder_only`."""
    attention = 4 * model_config.d_model * model_config.num_heads * model_config.d_kv
    feed_forward = 2 * model_config.d_model * model_config.d_ff
    bias = model_config.relative_attention_num_buckets * model_config.num_heads
    encoder = (
        model_config.num_layers * (attention + feed_forward + 2 * model_config.d_model) + bias + model_config.d_model
    )
    decoder = (
        model_config.num_decoder_layers * (2 * attention + feed_forward + 3 * model_config.d_model)
        + bias
        + model_config.d_model
    )
    return decoder if decoder_only else encoder + decoder + model_config.vocab_size * model_config.d_model


def count_matrix_numbers(model_config, decoder_only=False):
    """Number of weights in the matrices of the layers."""
    encoder_layers, decoder_layers = 0 if decoder_only else model_config.num_layers, model_config.num_decoder_layers
    attention = (
        4 * model_config.d_model * model_config.num_heads * model_config.d_kv * (encoder_layers + 2 * decoder_layers)
    )
    return attention + 2 * model_config.d_model * model_config.d_ff * (encoder_layers + decoder_layers)


def _attention(spec, queries, keys):
    """(kept for backward, temporaries of backward) of one attention layer; bytes for these numbers of tokens."""
    d, s, inner, heads = spec.model_config.d_model, spec.number_bytes, spec.inner, spec.model_config.num_heads
    if spec.kernels:  # q, k, v, and a log-sum-exp and its like in backward for each query and head
        kept, work = inner * s * (queries + 2 * keys) + 4 * heads * queries, 4 * heads * queries
    else:  # q, k, v of padded blocks, and the weights of each query and key
        queries_padded, keys_padded = round_up(queries), round_up(keys)
        scores = heads * queries_padded * keys_padded
        kept = inner * s * (queries_padded + 2 * keys_padded) + scores * s
        work = inner * s * (queries_padded + 2 * keys_padded) + 3 * scores * s
    # the norm's output, the attention's output, a number for the norm; their gradients
    kept = kept + (d * s + inner * s + spec.dropout * d + 4) * queries
    return kept, work + (4 * d + inner) * s * queries + inner * s * (queries + 2 * keys)


def _feed_forward(spec, queries):
    """As `_attention`, for one feed-forward layer: the norm's output, what the ReLU gives."""
    d, f, s = spec.model_config.d_model, spec.model_config.d_ff, spec.number_bytes
    dropped = (d + f + f * s) * spec.dropout  # two masks, and what dropout left of the ReLU's output
    return ((d + f) * s + dropped + 4) * queries, (3 * d + 2 * f) * s * queries


def _ends(spec, queries):
    """Bytes kept by a stack's ends: token ids, the last norm's output, the plain twin's position bias."""
    bias = 0 if spec.kernels else spec.model_config.num_heads * spec.number_bytes * round_up(queries) ** 2
    return (spec.model_config.d_model * spec.number_bytes + 24) * queries + bias


def _stack(spec, layers, num_blocks, queries, checkpointing):
    """(bytes kept by a stack's blocks, the most that the backward of its last block holds).

    `layers` are the (kept, temporaries) of the layers of one block. With checkpointing a block keeps the stream that it
    reads, and its backward computes the rest again.
    """
    kept_by_layer = [kept for kept, _ in layers]
    block = spec.model_config.d_model * spec.number_bytes * queries if checkpointing else sum(kept_by_layer)
    kept, moments = num_blocks * block, []
    for i, (_, work) in enumerate(layers):
        rest = sum(kept_by_layer[: i + 1]) if checkpointing else -sum(kept_by_layer[i + 1 :])
        moments.append(kept + rest + work)
    return kept, np.max(moments, axis=0)


def step_moments(spec, tokens, checkpointing):
    """Bytes of each example at each moment of a training step that may be its peak; `tokens` (kinds, 2)."""
    model_config = spec.model_config
    prompt, response = tokens.T.astype(np.float64)
    encoder_layers = [_attention(spec, prompt, prompt), _feed_forward(spec, prompt)]
    decoder_layers = [
        _attention(spec, response, response),
        _attention(spec, response, prompt),
        _feed_forward(spec, response),
    ]
    encoder, encoder_backward = _stack(spec, encoder_layers, model_config.num_layers, prompt, checkpointing)
    decoder, decoder_backward = _stack(spec, decoder_layers, model_config.num_decoder_layers, response, checkpointing)
    if spec.decoder_only:
        encoder, encoder_backward = 0, 0  # nothing of it waits for a backward
    ends = _ends(spec, prompt) + _ends(spec, response)
    stream = model_config.d_model * spec.number_bytes
    return dict(
        loss=encoder + decoder + ends + 2 * stream * response,  # what the loss reads, and its gradient
        decoder=encoder + decoder_backward + ends + 2 * stream * prompt,  # the gradient of what cross-attention reads
        encoder=encoder_backward + _ends(spec, prompt),
        embedding=(stream + 4 * model_config.d_model) * (prompt + response),
    )


def evaluation_moment(spec, tokens):
    """Bytes of each example in a forward that keeps nothing for a backward."""
    prompt, response = tokens.T.astype(np.float64)
    layers = (
        _attention(spec, prompt, prompt), _attention(spec, response, prompt), _feed_forward(spec, prompt),
        _feed_forward(spec, response),
    )  # fmt: skip
    stream = 2 * spec.model_config.d_model * spec.number_bytes * (prompt + response)
    inside = spec.model_config.d_ff * spec.number_bytes * np.maximum(prompt, response)
    return stream + inside + np.max([kept for kept, _ in layers], axis=0)


def generation_bytes(spec, answers, prompt_tokens, new_tokens):
    """Bytes of transformers' greedy generation: keys and values, growing by copying; logits; the encoder's scores."""
    model_config, s = spec.model_config, spec.number_bytes
    cache = 2 * model_config.num_decoder_layers * spec.inner * s * (prompt_tokens + 2 * new_tokens)
    encoder = 3 * 4 * model_config.num_heads * prompt_tokens**2 + prompt_tokens * (
        4 * 3 * model_config.d_model + s * model_config.d_ff * 2
    )
    weights = 2 * count_parameters(model_config) if s == 2 else 0  # autocast's copies
    return weights + answers * (cache + encoder + 12 * model_config.vocab_size)
