"""Bytes of a decoder, counted tensor by tensor; model/memory/estimate adds them up by phase.

`tokens` (kinds, columns) are the lengths of the columns of each kind of example, which lie in one stream.
"""

import numpy as np

from model.nn.attention import round_up
from model.nn.memory_spec import blocks_bytes


def _attention(spec, tokens):
    """(bytes kept for backward, bytes of backward's temporaries) of a self-attention layer over these tokens."""
    c, s = spec.model_config, spec.number_bytes
    d, q, k = c.hidden_size, c.query_width, c.key_width
    # outputs of the norm and of attention; q, k and v; q and k as they were before a norm
    kept = (d + 2 * q + 2 * k + (q + k) * c.has_head_norms) * s * tokens + 4 * tokens
    temporaries = (d + 2 * q + 2 * k) * s * tokens  # gradients of the stream, of attention's output, of q, k and v
    heads = c.num_attention_heads
    if spec.kernels:  # the log-sum-exp of each query and head; in backward one float32 more
        return kept + 4 * heads * tokens, temporaries + 4 * heads * tokens
    padded = round_up(tokens)  # q, k and v again, padded and with repeated heads; attention weights and their gradients
    return (
        kept + 3 * q * s * padded + heads * s * padded**2,
        temporaries + 3 * q * s * padded + 3 * heads * s * padded**2,
    )


def _feed_forward(spec, tokens):
    """Same as `_attention` for a feed-forward layer: its norm's output, the gate's inputs and its output are kept.

    The gate's output is kept only for the gradient of the product behind it. Backward holds the gradient of the stream
    and that output's; the gate's inputs become their own gradients.
    """
    d, f, s = spec.model_config.hidden_size, spec.model_config.intermediate_size, spec.number_bytes
    adapted = {target.rpartition(".")[2] for target in spec.lora.targets} if spec.lora else {"down_proj"}
    outputs = int("down_proj" in adapted)
    dropped = 2 * f * (spec.dropout and outputs)  # the gradient of what was dropped, before and after its mask
    return ((d + (2 + outputs) * f) * s + 4) * tokens, (2 * d + (2 - outputs) * f + dropped) * s * tokens


def step_moments(spec, tokens, checkpointing):
    """{moment: bytes per example (kinds,)} for each moment that may be the peak of a step.

    `checkpointing` is the number of blocks that backward computes again.
    """
    c, s = spec.model_config, spec.number_bytes
    stream_tokens, targets = tokens.sum(axis=1).astype(np.float64), tokens[:, -1].astype(np.float64)
    stream = c.hidden_size * s * stream_tokens
    layers = [_attention(spec, stream_tokens), _feed_forward(spec, stream_tokens)]
    kept, backward = blocks_bytes(layers, c.num_hidden_layers, stream, checkpointing, spec.offloads_inputs)
    # ids, positions, rows and labels; cosines and sines; keys of dropout's masks
    ends = (24 + 4 * c.head_dim + 12 * spec.dropout) * stream_tokens
    mask = 0 if spec.kernels else s * round_up(stream_tokens) ** 2
    return dict(
        loss=kept + ends + mask + stream + 2 * c.hidden_size * s * targets,  # the last norm's output, its targets' rows
        backward=backward + ends + mask,
        embedding=stream + 4 * c.hidden_size * stream_tokens,
    )


def evaluation_moment(spec, tokens):
    """Bytes per example (kinds,) of a forward pass without backward."""
    c, s = spec.model_config, spec.number_bytes
    stream_tokens = tokens.sum(axis=1).astype(np.float64)
    layers = np.max([_attention(spec, stream_tokens)[0], _feed_forward(spec, stream_tokens)[0]], axis=0)
    return layers + (3 * c.hidden_size * s + 24 + 4 * c.head_dim) * stream_tokens


def cache_bytes(spec, slots, input_tokens, new_tokens):
    """Bytes of the generation of `slots` answers together: the cache, the forward pass over the inputs, logits."""
    c, s = spec.model_config, spec.number_bytes
    cache = 2 * c.num_hidden_layers * c.key_width * s * (input_tokens + new_tokens)
    reading = evaluation_moment(spec, np.array([[input_tokens]]))[0]
    return slots * (cache + reading + 2 * c.vocab_size * s + 3 * s * (input_tokens + new_tokens))
