"""Bytes that T5 needs at each moment of a training step, counted tensor by tensor."""

import numpy as np

from model.nn.attention import round_up
from model.nn.memory_spec import blocks_bytes


def _attention(spec, queries, keys):
    """(bytes kept for backward, bytes of backward's temporaries) of an attention layer, for these numbers of tokens."""
    d, s, heads = spec.model_config.d_model, spec.number_bytes, spec.model_config.num_heads
    inner = heads * spec.model_config.d_kv
    if spec.kernels:  # q, k, v; per query and head the log-sum-exp and, in backward, one float32 more
        kept, temporaries = inner * s * (queries + 2 * keys) + 4 * heads * queries, 4 * heads * queries
    else:  # q, k, v of padded blocks; the attention weights of each query and key
        queries_padded, keys_padded = round_up(queries), round_up(keys)
        scores = heads * queries_padded * keys_padded
        kept = inner * s * (queries_padded + 2 * keys_padded) + scores * s
        temporaries = inner * s * (queries_padded + 2 * keys_padded) + 3 * scores * s
    # kept: outputs of norm and attention, a float32 of the norm; temporaries: their gradients
    kept = kept + (d * s + inner * s + 4) * queries
    return kept, temporaries + (4 * d + inner) * s * queries + inner * s * (queries + 2 * keys)


def _feed_forward(spec, queries):
    """Same as `_attention` for one feed-forward layer, which keeps the outputs of its norm and its activation.

    An activation other than ReLU keeps its input too, a gated one both; a kernel gives the gradient of both at once.
    """
    d, f, s = spec.model_config.d_model, spec.model_config.d_ff, spec.number_bytes
    inputs = dict(relu=0).get(spec.model_config.feed_forward_proj, 2 if spec.model_config.is_gated else 1)
    gradients = 4 if inputs == 1 else 2  # those of a gate's inputs are written over them
    if inputs == 0 and spec.kernels:
        gradients = 1  # that of ReLU's input is written over that of its output
    return ((d + f + inputs * f) * s + 4) * queries, (3 * d + gradients * f) * s * queries


def _outside_blocks(spec, queries):
    """Bytes kept outside a stack's blocks: token ids, output of the last norm, position bias in plain PyTorch.

    Dropout keeps no masks; it needs three int32 of keys for each token.
    """
    bias = 0 if spec.kernels else spec.model_config.num_heads * spec.number_bytes * round_up(queries) ** 2
    return (spec.model_config.d_model * spec.number_bytes + 24 + 12 * spec.dropout) * queries + bias


def step_moments(spec, tokens, checkpointing):
    """{moment: bytes per example (kinds,)} for each moment that may be the peak of a step; `tokens` (kinds, 2).

    `checkpointing` is the number of blocks, the encoder's first, that backward computes again.
    """
    model_config = spec.model_config
    prompt, response = tokens.T.astype(np.float64)
    encoder_layers = [_attention(spec, prompt, prompt), _feed_forward(spec, prompt)]
    decoder_layers = [
        _attention(spec, response, response),
        _attention(spec, response, prompt),
        _feed_forward(spec, response),
    ]
    stream, layers = model_config.d_model * spec.number_bytes, model_config.num_layers
    offloads = spec.offloads_inputs
    encoder, encoder_backward = blocks_bytes(encoder_layers, layers, stream * prompt, checkpointing, offloads)
    in_decoder = checkpointing - layers
    decoder, decoder_backward = blocks_bytes(
        decoder_layers, model_config.num_decoder_layers, stream * response, in_decoder, offloads
    )
    if spec.part == "decoder":
        encoder, encoder_backward = 0, 0  # the frozen encoder keeps nothing for a backward
    ends = _outside_blocks(spec, prompt) + _outside_blocks(spec, response)
    ends = ends + stream * prompt * (spec.dropout and spec.part != "decoder")  # the encoder's output before dropout
    return dict(
        loss=encoder + decoder + ends + 2 * stream * response,  # the loss's input and its gradient
        decoder=encoder + decoder_backward + ends + 2 * stream * prompt,  # gradient of cross-attention's input
        encoder=encoder_backward + _outside_blocks(spec, prompt),
        embedding=(stream + 4 * model_config.d_model) * (prompt + response),
    )


def evaluation_moment(spec, tokens):
    """Bytes per example (kinds,) of a forward pass without backward."""
    prompt, response = tokens.T.astype(np.float64)
    layers = (
        _attention(spec, prompt, prompt), _attention(spec, response, prompt), _feed_forward(spec, prompt),
        _feed_forward(spec, response),
    )  # fmt: skip
    stream = 2 * spec.model_config.d_model * spec.number_bytes * (prompt + response)
    hidden = spec.model_config.d_ff * spec.number_bytes * np.maximum(prompt, response)
    return stream + hidden + np.max([kept for kept, _ in layers], axis=0)


def cache_bytes(spec, slots, prompt_tokens, new_tokens):
    """Bytes of the generation of `slots` answers together: caches, the encoder's forward pass, logits."""
    c, s = spec.model_config, spec.number_bytes
    caches = 2 * c.num_decoder_layers * c.num_heads * c.d_kv * s * (prompt_tokens + new_tokens)
    encoder = evaluation_moment(spec, np.array([[prompt_tokens, 1]]))[0]
    choice = c.vocab_size * (2 * s + 1)  # logits, those without repeats, and which tokens would repeat
    return slots * (caches + encoder + choice + c.num_heads * s * (prompt_tokens + 3 * new_tokens))
