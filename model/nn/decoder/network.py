"""DecoderModel: the network of Qwen and Llama over packed sequences, under Hugging Face parameter names.

The sequences of a micro-batch lie end to end in one stream; each token attends to those before it in its sequence.
Weights are float32; activations and matmuls use `compute_dtype`.
"""

from functools import partial
from itertools import repeat

import torch
from torch import nn

from model.nn.activations import gate
from model.nn.attention import attend, score_mask
from model.nn.base import LanguageModel
from model.nn.decoder import decode
from model.nn.decoder.rotary import rotary_at, rotate_heads
from model.nn.embedding import embed
from model.nn.flat_params import linears
from model.nn.key_values import new_key_values
from model.nn.layers import Linear, ResidualNorm, make_embedding
from model.nn.recomputation import recomputed


class Attention(nn.Module):
    def __init__(self, model_config):
        super().__init__()
        c, std = model_config, model_config.initializer_range
        self.q_proj = Linear(c.hidden_size, c.query_width, std, c.has_biases)
        self.k_proj = Linear(c.hidden_size, c.key_width, std, c.has_biases)
        self.v_proj = Linear(c.hidden_size, c.key_width, std, c.has_biases)
        self.o_proj = Linear(c.query_width, c.hidden_size, std)
        self.q_norm, self.k_norm = (
            ResidualNorm(c.head_dim, c.rms_norm_eps) if c.has_head_norms else None for _ in range(2)
        )
        self.heads = c.num_attention_heads, c.num_key_value_heads

    def forward(self, x, masks, rotary, attention):
        """Attention output (N, hidden_size); `attention` is a function of what `qkv` gives, (N, query_width)."""
        return self.o_proj(attention(self.qkv(x, masks, rotary)), masks)

    def qkv(self, x, masks, rotary):
        """Tensors whose concatenated columns are q, scaled and rotated, k, rotated, and v; `masks` are for adapters."""
        num_heads, num_kv_heads = self.heads
        if num_heads == num_kv_heads and self.q_norm is None:  # of one shape, so the three weights are adjacent
            (qkv,) = _products(x, masks, (self.q_proj, self.k_proj, self.v_proj))
            return (rotate_heads(qkv, rotary, 2 * num_heads, num_heads),)
        q, kv = _products(x, masks, (self.q_proj,), (self.k_proj, self.v_proj))
        q = rotate_heads(q, rotary, num_heads, num_heads, self.q_norm)
        return q, rotate_heads(kv, rotary, num_kv_heads, norm=self.k_norm)


def _products(x, masks, *groups):
    """The outputs of each group of adjacent linear layers of one shape, beside each other: a product for each group."""
    weights = [[layer.weight for layer in layers] for layers in groups]
    biases = [[layer.bias for layer in layers if layer.bias is not None] for layers in groups]
    return linears(x, list(zip(weights, biases, strict=True)), masks)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, model_config):
        super().__init__()
        c, std = model_config, model_config.initializer_range
        self.gate_proj, self.up_proj = (Linear(c.hidden_size, c.intermediate_size, std) for _ in range(2))
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, std)

    def forward(self, x, masks=None):
        (both,) = _products(x, masks, (self.gate_proj, self.up_proj))
        return self.down_proj(gate(both, "silu"), masks)


class Block(nn.Module):
    """Self-attention and feed-forward on a residual stream (N, hidden_size).

    Takes the stream and the output of the block before, which is not yet added; rerotary the same.
    """

    def __init__(self, model_config):
        super().__init__()
        self.self_attn, self.mlp = Attention(model_config), FeedForward(model_config)
        width, epsilon = model_config.hidden_size, model_config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (ResidualNorm(width, epsilon) for _ in range(2))

    def forward(self, x, added, masks, rotary, attention):
        x, normed = self.input_layernorm(x, added)
        x, normed = self.post_attention_layernorm(x, self.self_attn(normed, masks, rotary, attention))
        return x, self.mlp(normed, masks)


def _block_output(block, x, masks, rotary, attention):
    """The residual stream after `block` as one tensor, the only one that activation checkpointing keeps per block."""
    x, added = block(x, None, masks, rotary, attention)
    return x + added


class Decoder(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, model_config):
        super().__init__()
        self.embed_tokens = make_embedding(model_config.vocab_size, model_config.hidden_size)
        self.layers = nn.ModuleList(Block(model_config) for _ in range(model_config.num_hidden_layers))
        self.norm = ResidualNorm(model_config.hidden_size, model_config.rms_norm_eps)


class DecoderModel(LanguageModel):
    """A Qwen or a Llama over packed sequences. `model_config` is a DecoderModelConfig; only adapters have dropout."""

    def __init__(self, model_config, dropout=0.0, compute_dtype=torch.float32):
        super().__init__(model_config, dropout, compute_dtype)
        if dropout:
            raise ValueError(f"--dropout={dropout}: a decoder-only network has none: leave it out")
        self.model = Decoder(model_config)
        if not model_config.tie_word_embeddings:
            self.lm_head = make_embedding(model_config.vocab_size, model_config.hidden_size)
        self.make_flat()

    @property
    def tables(self):
        embedding = self.model.embed_tokens.weight
        return [embedding] if self.config.tie_word_embeddings else [embedding, self.lm_head.weight]

    @property
    def all_blocks(self):
        return list(self.model.layers)

    def hidden(self, batch):
        """(hidden states (targets, hidden_size), labels (targets,)) of a Stream."""
        self.flat.refresh()
        attentions = repeat(self.packed_attention(batch.layout))
        states = self.states(batch.ids, batch.positions, self.masks(batch.token_keys), attentions)
        return states.index_select(0, batch.rows), batch.labels

    def packed_attention(self, layout):
        """The attention of every block over packed tokens, a function of their q, k and v."""
        num_heads, num_kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        mask = score_mask(layout, True, self.compute_dtype)
        return partial(attend, layout=layout, bias=mask, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def states(self, ids, positions, masks, attentions):
        """Output of the last norm (N, hidden_size) at each token; `attentions` has one for each block."""
        rotary = rotary_at(positions, self.config)
        x, added, host = embed(ids, self.model.embed_tokens.weight), None, self.new_host_inputs()
        for number, (block, attention) in enumerate(zip(self.model.layers, attentions)):  # noqa: B905 (may be endless)
            shared = masks, rotary, attention
            if number < self.gradient_checkpointing and torch.is_grad_enabled():
                x = recomputed(_block_output, block, x, *shared, host=host)
            else:
                x, added = block(x, added, *shared)
        return self.model.norm(x, added)[1]

    prefill = decode.prefill
    decode_one = decode.decode_one

    def new_cache(self, slots, input_tokens, new_tokens):
        c, tokens = self.config, input_tokens + new_tokens
        return new_key_values(self, c.num_hidden_layers, slots, c.num_key_value_heads, tokens, c.head_dim)

    def init_std(self, module):
        """As transformers initialises Qwen and Llama."""
        return self.config.initializer_range
