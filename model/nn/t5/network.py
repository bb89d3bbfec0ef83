"""TextToTextModel: T5 in all its variants (v1.0, v1.1, mT5, UMT5) over packed examples, under Hugging Face names.

transformers' T5 cannot run packed examples, because it takes one mask for the encoder and for cross-attention. Weights
are float32; activations and matmuls use `compute_dtype`.
"""

from functools import partial
from itertools import repeat

import torch
from torch import nn

from model.nn.activations import activate, gate, relu_linear
from model.nn.attention import attend, score_mask
from model.nn.base import LanguageModel
from model.nn.dropout import NO_DROPOUT, add_dropout, dropout, relu_dropout
from model.nn.embedding import embed
from model.nn.flat_params import linear
from model.nn.layers import Linear, ResidualNorm, make_embedding
from model.nn.recomputation import recomputed
from model.nn.t5 import decode
from model.nn.t5.position_bias import score_bias

BLOCK_SITES = 4  # places of dropout in a block, counted from its first: the inputs of its layers, and HIDDEN
SECOND, LAST, HIDDEN = 1, 2, 3  # input of the second and of the last layer; hidden numbers of the feed-forward layer
NORMED = 1  # counted from the end of the last block: output of the stack's last norm


class Attention(nn.Module):
    def __init__(self, model_config, has_position_bias):
        super().__init__()
        inner = model_config.num_heads * model_config.d_kv
        # as T5PreTrainedModel._init_weights in transformers; q holds the 1/sqrt(d_kv) by which T5 does not scale scores
        self.q = Linear(model_config.d_model, inner, (model_config.d_model * model_config.d_kv) ** -0.5)
        self.k = Linear(model_config.d_model, inner, model_config.d_model**-0.5)
        self.v = Linear(model_config.d_model, inner, model_config.d_model**-0.5)
        self.o = Linear(inner, model_config.d_model, inner**-0.5)
        self.num_heads, self.has_position_bias = model_config.num_heads, has_position_bias
        if has_position_bias:
            self.relative_attention_bias = make_embedding(
                model_config.relative_attention_num_buckets, model_config.num_heads
            )

    def forward(self, x, masks, attention):
        """Self-attention's output (N, d_model); `attention` is a function of q, k and v, columns of tensors."""
        qkv = linear(x, self.q.weight, self.k.weight, self.v.weight, masks=masks)
        return self.o(attention((qkv,)), masks)

    def to_memory(self, x, masks, attention, memory):
        """Cross-attention's output (N, d_model); without a `memory`, `attention` has its keys and values."""
        q = linear(x, self.q.weight, masks=masks)
        return self.o(attention((q,) if memory is None else (q, self.key_values(*memory))), masks)

    def key_values(self, encoded, masks):
        """Keys and values (M, 2 * H * K) of the encoder's output (M, d_model)."""
        return linear(encoded, self.k.weight, self.v.weight, masks=masks)


class SelfAttentionLayer(nn.Module):
    def __init__(self, model_config, has_position_bias):
        super().__init__()
        self.SelfAttention = Attention(model_config, has_position_bias)
        self.layer_norm = ResidualNorm(model_config.d_model, model_config.layer_norm_epsilon)

    def forward(self, x, added, masks, attention):
        x, normed = self.layer_norm(x, added, masks)
        return x, self.SelfAttention(normed, masks, attention)


class CrossAttentionLayer(nn.Module):
    def __init__(self, model_config):
        super().__init__()
        self.EncDecAttention = Attention(model_config, has_position_bias=False)
        self.layer_norm = ResidualNorm(model_config.d_model, model_config.layer_norm_epsilon)

    def forward(self, x, added, masks, attention, memory):
        x, normed = self.layer_norm(x, added, masks)
        return x, self.EncDecAttention.to_memory(normed, masks, attention, memory)


class Dense(nn.Module):
    """The feed-forward of a layer; a gated one has two matrices, wi_0 and wi_1, in place of wi."""

    def __init__(self, model_config):
        super().__init__()
        c, self.is_gated = model_config, model_config.is_gated
        self.activation = c.feed_forward_proj.removeprefix("gated-")
        if self.is_gated:
            self.wi_0, self.wi_1 = (Linear(c.d_model, c.d_ff, c.d_model**-0.5) for _ in range(2))
        else:
            self.wi = Linear(c.d_model, c.d_ff, c.d_model**-0.5)
        self.wo = Linear(c.d_ff, c.d_model, c.d_ff**-0.5)

    def forward(self, x, masks):
        return self.wo(self._inner(x, masks), masks)

    def _inner(self, x, masks):
        if self.is_gated:
            both = linear(x, self.wi_0.weight, self.wi_1.weight, masks=masks)
            return dropout(gate(both, self.activation), masks)
        if self.activation == "relu" and not masks.probability:
            return relu_linear(x, self.wi.weight, masks)
        inner = self.wi(x, masks)
        if self.activation == "relu":
            return relu_dropout(inner, masks)
        return dropout(activate(inner, self.activation), masks)


class FeedForwardLayer(nn.Module):
    def __init__(self, model_config):
        super().__init__()
        self.DenseReluDense = Dense(model_config)
        self.layer_norm = ResidualNorm(model_config.d_model, model_config.layer_norm_epsilon)

    def forward(self, x, added, masks=NO_DROPOUT, hidden_masks=NO_DROPOUT):
        x, normed = self.layer_norm(x, added, masks)
        return x, self.DenseReluDense(normed, hidden_masks)


class Block(nn.Module):
    """Self-attention, cross-attention (decoder only) and feed-forward on a residual stream (N, d_model).

    Each layer takes the stream and the output of the layer before; its norm drops and adds that output in one pass.
    Returns (stream, output of the last layer), not yet added. `masks` are those of the block's first site.
    """

    def __init__(self, model_config, is_decoder, has_position_bias):
        super().__init__()
        cross = [CrossAttentionLayer(model_config)] if is_decoder else []
        self.layer = nn.ModuleList(
            [SelfAttentionLayer(model_config, has_position_bias), *cross, FeedForwardLayer(model_config)]
        )

    def forward(self, x, added, masks, attention, cross=None):
        """`cross` is (function of q, k and v, memory)."""
        x, added = self.layer[0](x, added, masks, attention)
        if cross:
            x, added = self.layer[1](x, added, masks.at(SECOND), *cross)
        return self.layer[-1](x, added, masks.at(LAST), masks.at(HIDDEN))


def _block_output(block, x, masks, attention, cross):
    """The residual stream after `block` as one tensor, the only one that activation checkpointing keeps per block."""
    x, added = block(x, None, masks, attention, cross)
    return add_dropout(x, added, masks.at(BLOCK_SITES))


class Stack(nn.Module):
    """Encoder or decoder: blocks, which share the first one's position bias unless each has its own, then a norm."""

    def __init__(self, model_config, num_layers, is_decoder):
        super().__init__()
        has_own_bias = model_config.model_type == "umt5"
        self.block = nn.ModuleList(
            Block(model_config, is_decoder, has_position_bias=has_own_bias or i == 0) for i in range(num_layers)
        )
        self.final_layer_norm = ResidualNorm(model_config.d_model, model_config.layer_norm_epsilon)
        self.is_decoder = is_decoder
        self.max_distance = model_config.relative_attention_max_distance

    def forward(self, x, masks, attentions, cross, num_recomputed, host=None):
        """Output of the last norm; backward computes the first `num_recomputed` blocks again (`recomputed`).

        `attentions` has the self-attention of each block, `cross` the cross-attention of each, None in an encoder.
        """
        x, added = dropout(x, masks), None
        for number, (block, *own) in enumerate(zip(self.block, attentions, cross)):  # noqa: B905 (cross may be endless)
            if number < num_recomputed and torch.is_grad_enabled():
                x = recomputed(_block_output, block, x, masks, *own, host=host)
            else:
                x, added = block(x, added, masks, *own)
            masks = masks.at(BLOCK_SITES)
        return dropout(self.final_layer_norm(x, added, masks)[1], masks.at(NORMED))

    def packed_attentions(self, layout, dtype):
        """Yield the self-attention of each block over packed tokens, a function of their q, k and v."""
        for block in self.block:
            attention = block.layer[0].SelfAttention
            if attention.has_position_bias:
                weight = attention.relative_attention_bias.weight
                bias = score_bias(layout, weight, self.max_distance, self.is_decoder, dtype)
            yield partial(attend, layout=layout, bias=bias, num_heads=attention.num_heads)


class TextToTextModel(LanguageModel):
    """T5 over packed examples. `model_config` is a T5ModelConfig; dropout acts on the residual stream and inside the
    feed-forward layers.
    """

    def __init__(self, model_config, dropout=0.0, compute_dtype=torch.float32):
        super().__init__(model_config, dropout, compute_dtype)
        self.shared = make_embedding(model_config.vocab_size, model_config.d_model)
        self.encoder = Stack(model_config, model_config.num_layers, is_decoder=False)
        self.decoder = Stack(model_config, model_config.num_decoder_layers, is_decoder=True)
        if not model_config.tie_word_embeddings:
            self.lm_head = make_embedding(model_config.vocab_size, model_config.d_model)
        self.output_scale = model_config.d_model**-0.5 if model_config.scale_decoder_outputs else 1.0
        self.make_flat()

    @property
    def tables(self):
        return [self.shared.weight] if self.config.tie_word_embeddings else [self.shared.weight, self.lm_head.weight]

    @property
    def all_blocks(self):
        return [*self.encoder.block, *self.decoder.block]

    new_cache = decode.new_cache
    prefill = decode.prefill
    decode_one = decode.decode_one

    def hidden(self, batch):
        """(Decoder output (N, d_model), scaled, labels (N,)) of a MicroBatch."""
        self.flat.refresh()
        ids = (batch.prompt_ids, batch.decoder_ids)
        prompts, responses = embed(torch.cat(ids), self.shared.weight).split([len(column) for column in ids])
        prompt_masks, response_masks = map(self.masks, (batch.prompt_token_keys, batch.decoder_token_keys))
        host = self.new_host_inputs()
        encoded = self.encode(prompts, prompt_masks, batch.encoder_layout, host)
        mask = score_mask(batch.cross_layout, dtype=self.compute_dtype)
        cross = partial(attend, layout=batch.cross_layout, bias=mask, num_heads=self.config.num_heads)
        attentions = self.decoder.packed_attentions(batch.decoder_layout, self.compute_dtype)
        again = self.gradient_checkpointing - len(self.encoder.block)
        memory = encoded, prompt_masks
        decoded = self.decoder(responses, response_masks, attentions, repeat((cross, memory)), again, host)
        return decoded * self.output_scale, batch.labels

    def encode(self, embedded, masks, layout, host=None):
        """Encoder output (N, d_model) of embedded packed tokens (N, d_model)."""
        attentions = self.encoder.packed_attentions(layout, self.compute_dtype)
        return self.encoder(embedded, masks, attentions, repeat(None), self.gradient_checkpointing, host)

    def init_std(self, module):
        """As transformers initialises T5; an output projection of its own starts small."""
        if isinstance(module, Linear):
            return module.init_std
        return 1.0 if module is self.shared else self.config.d_model**-0.5  # of biases, and of lm_head

    def freeze_all_but(self, part):
        """Freeze the encoder and the embedding, which may be the output projection too, if `part` is decoder."""
        if part == "decoder":
            self.shared.requires_grad_(False)
            self.encoder.requires_grad_(False)
            self.make_flat()
        return self


def inner_names(model_config):
    """Names of the matrices that enter a feed-forward layer."""
    return ("wi_0", "wi_1") if model_config.is_gated else ("wi",)
