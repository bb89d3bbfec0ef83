"""TextToTextModel: T5 (v1.0, tied and scaled) over packed examples, under Hugging Face parameter names.

The forward pass is our own because transformers' T5 takes one mask for the encoder and for cross-attention, so it
cannot run packed examples. Weights are float32; `compute_dtype` is what activations and products use.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.attention import attend, has_kernels, score_bias
from model.loss import linear_cross_entropy


class Linear(nn.Module):
    """x @ weight.T, computed in x's dtype from a float32 weight."""

    def __init__(self, num_in, num_out, init_std):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.init_std = init_std

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias; statistics in float32."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape, has_position_bias):
        super().__init__()
        inner = shape.num_heads * shape.d_kv
        # transformers' T5PreTrainedModel._init_weights; q carries the 1/sqrt(d_kv) that T5's scores lack
        self.q = Linear(shape.d_model, inner, (shape.d_model * shape.d_kv) ** -0.5)
        self.k = Linear(shape.d_model, inner, shape.d_model**-0.5)
        self.v = Linear(shape.d_model, inner, shape.d_model**-0.5)
        self.o = Linear(inner, shape.d_model, inner**-0.5)
        self.num_heads = shape.num_heads
        if has_position_bias:
            self.relative_attention_bias = nn.Embedding(shape.relative_attention_num_buckets, shape.num_heads)

    def forward(self, x, memory, layout, bias, dropout):
        q, k, v = self.q(x), self.k(memory), self.v(memory)
        return self.o(attend(q, k, v, layout, bias, self.num_heads, dropout))


class SelfAttentionLayer(nn.Module):
    def __init__(self, shape, has_position_bias):
        super().__init__()
        self.SelfAttention = Attention(shape, has_position_bias)
        self.layer_norm = RMSNorm(shape.d_model, shape.layer_norm_epsilon)

    def forward(self, x, layout, bias, dropout):
        normed = self.layer_norm(x)
        return x + F.dropout(self.SelfAttention(normed, normed, layout, bias, dropout), dropout)


class CrossAttentionLayer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.EncDecAttention = Attention(shape, has_position_bias=False)
        self.layer_norm = RMSNorm(shape.d_model, shape.layer_norm_epsilon)

    def forward(self, x, memory, layout, bias, dropout):
        return x + F.dropout(self.EncDecAttention(self.layer_norm(x), memory, layout, bias, dropout), dropout)


class DenseReluDense(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.wi = Linear(shape.d_model, shape.d_ff, shape.d_model**-0.5)
        self.wo = Linear(shape.d_ff, shape.d_model, shape.d_ff**-0.5)

    def forward(self, x, dropout):
        return self.wo(F.dropout(F.relu(self.wi(x)), dropout))


class FeedForwardLayer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.DenseReluDense = DenseReluDense(shape)
        self.layer_norm = RMSNorm(shape.d_model, shape.layer_norm_epsilon)

    def forward(self, x, dropout):
        return x + F.dropout(self.DenseReluDense(self.layer_norm(x), dropout), dropout)


class Block(nn.Module):
    """Self-attention, cross-attention in the decoder, feed-forward; each on a residual stream (N, d_model)."""

    def __init__(self, shape, is_decoder, has_position_bias):
        super().__init__()
        cross = [CrossAttentionLayer(shape)] if is_decoder else []
        self.layer = nn.ModuleList([SelfAttentionLayer(shape, has_position_bias), *cross, FeedForwardLayer(shape)])

    def forward(self, x, self_attention, cross_attention, dropout):
        x = self.layer[0](x, *self_attention, dropout)
        if cross_attention:
            x = self.layer[1](x, *cross_attention, dropout)
        return self.layer[-1](x, dropout)


class Stack(nn.Module):
    """Encoder or decoder: blocks that share the first one's position bias, then a norm."""

    def __init__(self, shape, num_layers, is_decoder):
        super().__init__()
        self.block = nn.ModuleList(Block(shape, is_decoder, has_position_bias=i == 0) for i in range(num_layers))
        self.final_layer_norm = RMSNorm(shape.d_model, shape.layer_norm_epsilon)
        self.is_decoder = is_decoder
        self.max_distance = shape.relative_attention_max_distance

    def forward(self, x, layout, cross_attention, dropout, checkpointing):
        x = F.dropout(x, dropout)
        self_attention = (layout, self._bias(layout, x.dtype))
        for block in self.block:
            if checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, self_attention, cross_attention, dropout, use_reentrant=False)
            else:
                x = block(x, self_attention, cross_attention, dropout)
        return F.dropout(self.final_layer_norm(x), dropout)

    def _bias(self, layout, dtype):
        attention = self.block[0].layer[0].SelfAttention
        weight = attention.relative_attention_bias.weight
        return score_bias(layout, weight, self.max_distance, self.is_decoder, dtype)


class TextToTextModel(nn.Module):
    """T5 that returns the sum of the loss over the target tokens of packed examples.

    `shape` is a T5ModelConfig; `dropout` a probability, active in training mode only.
    """

    def __init__(self, shape, dropout=0.0, compute_dtype=torch.float32, gradient_checkpointing=False):
        super().__init__()
        self.shape, self.dropout, self.compute_dtype = shape, dropout, compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.shared = nn.Embedding(shape.vocab_size, shape.d_model)
        self.encoder = Stack(shape, shape.num_layers, is_decoder=False)
        self.decoder = Stack(shape, shape.num_decoder_layers, is_decoder=True)

    @property
    def uses_kernels(self):
        """True when layouts are to be made for the attention kernels."""
        dropout = self.dropout if self.training else 0.0
        return has_kernels(self.shared.weight.device, self.compute_dtype, self.shape.d_kv, dropout)

    def forward(self, micro_batch, chunk_tokens=2048, z_loss=0.0):
        """Sum over target tokens of the cross-entropy in nats, plus `z_loss`; a float32 scalar."""
        hidden = self.decode(micro_batch)
        return linear_cross_entropy(hidden, self.shared.weight, micro_batch.labels, chunk_tokens, z_loss)

    def decode(self, micro_batch):
        """Decoder output (N, d_model) scaled for the tied head: its logits are hidden @ shared.weight.T."""
        dropout = self.dropout if self.training else 0.0
        encoded = self._stack(self.encoder, micro_batch.prompt_ids, micro_batch.encoder_layout, None, dropout)
        bias = score_bias(micro_batch.cross_layout, dtype=self.compute_dtype)
        cross = (encoded, micro_batch.cross_layout, bias)
        decoded = self._stack(self.decoder, micro_batch.decoder_ids, micro_batch.decoder_layout, cross, dropout)
        return decoded * self.shape.d_model**-0.5

    def _stack(self, stack, ids, layout, cross_attention, dropout):
        embedded = self.shared(ids).to(self.compute_dtype)
        return stack(embedded, layout, cross_attention, dropout, self.gradient_checkpointing)

    @torch.no_grad()
    def initialise(self, seed):
        """Random weights as transformers initialises T5, the same on every rank for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * module.init_std)
            elif isinstance(module, nn.Embedding):
                std = 1.0 if module is self.shared else self.shape.d_model**-0.5
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * std)
        return self

    def freeze_all_but_decoder(self):
        """Leave only the decoder's own weights trainable: the encoder and the shared embedding (so the head) stay."""
        self.shared.requires_grad_(False)
        self.encoder.requires_grad_(False)
        return self
