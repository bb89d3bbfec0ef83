"""TextToTextModel: T5 (v1.0, tied and scaled) over packed examples, under Hugging Face parameter names.

transformers' T5 cannot run packed examples, because it takes one mask for the encoder and for cross-attention. Weights
are float32; activations and matmuls use `compute_dtype`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.nn.attention import attend, has_kernels
from model.nn.dropout import Masks, add_dropout, dropout, relu_dropout, step_key
from model.nn.flat_params import FlatParams, embed, linear, runs_kernels, with_padding
from model.nn.loss import linear_cross_entropy
from model.nn.t5.position_bias import score_bias

BLOCK_SITES = 4  # places of dropout in a block, counted from its first: the inputs of its layers, and HIDDEN
SECOND, LAST, HIDDEN = 1, 2, 3  # input of the second and of the last layer; hidden numbers of the feed-forward layer
NORMED = 1  # counted from the end of the last block: output of the stack's last norm


class Linear(nn.Module):
    """The weight of a linear layer under its Hugging Face name; flat_params.linear applies it."""

    def __init__(self, num_in, num_out, init_std):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.init_std = init_std


def make_embedding(num_rows, width):
    """nn.Embedding without random weights, which on the meta device would import 900 modules in two seconds."""
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)


class ResidualNorm(nn.Module):
    """The residual sum and T5's layer norm of it, which subtracts no mean and has no bias."""

    def __init__(self, model_config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(model_config.d_model))
        self.epsilon = model_config.layer_norm_epsilon

    def forward(self, x, added, masks):
        """(x + dropout(added), norm of the sum), each (N, d_model); an `added` of None adds nothing.

        Statistics are in float32.
        """
        if runs_kernels(x):
            from model.nn.kernels.norm import add_norm  # a CPU build of torch comes without Triton

            return add_norm(x, added, self.weight, self.epsilon, masks)
        x = x if added is None else add_dropout(x, added, masks)
        return x, F.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, model_config, has_position_bias):
        super().__init__()
        inner = model_config.num_heads * model_config.d_kv
        # as T5PreTrainedModel._init_weights in transformers; q holds the 1/sqrt(d_kv) by which T5 does not scale scores
        self.q = Linear(model_config.d_model, inner, (model_config.d_model * model_config.d_kv) ** -0.5)
        self.k = Linear(model_config.d_model, inner, model_config.d_model**-0.5)
        self.v = Linear(model_config.d_model, inner, model_config.d_model**-0.5)
        self.o = Linear(inner, model_config.d_model, inner**-0.5)
        self.num_heads = model_config.num_heads
        if has_position_bias:
            self.relative_attention_bias = make_embedding(
                model_config.relative_attention_num_buckets, model_config.num_heads
            )

    def forward(self, x, memory, layout, bias):
        """Attention output (N, d_model); keys and values come from `memory` (M, d_model), or from x if it is None."""
        q, k, v = self.q.weight, self.k.weight, self.v.weight
        qkv = (linear(x, q, k, v),) if memory is None else (linear(x, q), linear(memory, k, v))
        return linear(attend(qkv, layout, bias, self.num_heads), self.o.weight)


class SelfAttentionLayer(nn.Module):
    def __init__(self, model_config, has_position_bias):
        super().__init__()
        self.SelfAttention = Attention(model_config, has_position_bias)
        self.layer_norm = ResidualNorm(model_config)

    def forward(self, x, added, masks, layout, bias):
        x, normed = self.layer_norm(x, added, masks)
        return x, self.SelfAttention(normed, None, layout, bias)


class CrossAttentionLayer(nn.Module):
    def __init__(self, model_config):
        super().__init__()
        self.EncDecAttention = Attention(model_config, has_position_bias=False)
        self.layer_norm = ResidualNorm(model_config)

    def forward(self, x, added, masks, memory, layout, bias):
        x, normed = self.layer_norm(x, added, masks)
        return x, self.EncDecAttention(normed, memory, layout, bias)


class DenseReluDense(nn.Module):
    def __init__(self, model_config):
        super().__init__()
        self.wi = Linear(model_config.d_model, model_config.d_ff, model_config.d_model**-0.5)
        self.wo = Linear(model_config.d_ff, model_config.d_model, model_config.d_ff**-0.5)

    def forward(self, x, masks):
        return linear(relu_dropout(linear(x, self.wi.weight), masks), self.wo.weight)


class FeedForwardLayer(nn.Module):
    def __init__(self, model_config):
        super().__init__()
        self.DenseReluDense = DenseReluDense(model_config)
        self.layer_norm = ResidualNorm(model_config)

    def forward(self, x, added, masks, hidden_masks):
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

    def forward(self, x, added, masks, self_attention, cross_attention):
        x, added = self.layer[0](x, added, masks, *self_attention)
        if cross_attention:
            x, added = self.layer[1](x, added, masks.at(SECOND), *cross_attention)
        return self.layer[-1](x, added, masks.at(LAST), masks.at(HIDDEN))


def _block_output(block, x, masks, *attention):
    """The residual stream after `block` as one tensor, the only one that gradient checkpointing keeps per block."""
    x, added = block(x, None, masks, *attention)
    return add_dropout(x, added, masks.at(BLOCK_SITES))


class Stack(nn.Module):
    """Encoder or decoder: blocks that share the position bias of the first one, then a norm."""

    def __init__(self, model_config, num_layers, is_decoder):
        super().__init__()
        self.block = nn.ModuleList(Block(model_config, is_decoder, has_position_bias=i == 0) for i in range(num_layers))
        self.final_layer_norm = ResidualNorm(model_config)
        self.is_decoder = is_decoder
        self.max_distance = model_config.relative_attention_max_distance

    def forward(self, x, masks, layout, cross_attention, checkpointing):
        x, added = dropout(x, masks), None
        attention = (layout, self._bias(layout, x.dtype)), cross_attention
        for block in self.block:
            if checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    _block_output, block, x, masks, *attention, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, added = block(x, added, masks, *attention)
            masks = masks.at(BLOCK_SITES)
        return dropout(self.final_layer_norm(x, added, masks)[1], masks.at(NORMED))

    def _bias(self, layout, dtype):
        attention = self.block[0].layer[0].SelfAttention
        weight = attention.relative_attention_bias.weight
        return score_bias(layout, weight, self.max_distance, self.is_decoder, dtype)


class TextToTextModel(nn.Module):
    """T5 that returns the cross-entropy of packed examples, summed over target tokens.

    `model_config` is a T5ModelConfig. `dropout` is the probability for the residual stream and the feed-forward layers,
    active in training mode only; `key_dropout` chooses its masks. The parameters and gradients are views of the flat
    tensors in `flat`.
    """

    def __init__(self, model_config, dropout=0.0, compute_dtype=torch.float32, gradient_checkpointing=False):
        super().__init__()
        self.config, self.dropout, self.compute_dtype = model_config, dropout, compute_dtype
        self.gradient_checkpointing = gradient_checkpointing
        self.shared = make_embedding(model_config.vocab_size, model_config.d_model)
        self.encoder = Stack(model_config, model_config.num_layers, is_decoder=False)
        self.decoder = Stack(model_config, model_config.num_decoder_layers, is_decoder=True)
        self._flatten()

    def _flatten(self):
        matrices = [module.weight for module in self.modules() if isinstance(module, Linear)]
        known = {id(p) for p in matrices}
        others = [p for p in self.parameters() if id(p) not in known]
        self.flat = FlatParams(others, matrices, self.shared.weight, self.compute_dtype)
        self.step_key = torch.zeros(2, dtype=torch.int32, device=self.flat.masters.device)

    def _apply(self, *args, **kwargs):
        """Rebuild the flat tensors, because Module.to replaces each weight by a tensor of its own."""
        super()._apply(*args, **kwargs)
        self._flatten()
        return self

    def zero_grad(self, set_to_none=False):
        """Zero the gradients and the loss parts in place."""
        self.flat.gradients_and_parts.zero_()

    def key_dropout(self, seed, step):
        """Draw the masks of this step from now on; recorded steps read the key too."""
        for word, value in zip(self.step_key.unbind(), step_key(seed, step), strict=True):
            word.fill_(value)  # unlike a copy from the host, it does not wait for the device

    @property
    def uses_kernels(self):
        """True if attention runs in Triton kernels, which need micro-batches made for them."""
        return has_kernels(self.shared.weight.device, self.compute_dtype, self.config)

    def forward(self, micro_batch, chunk_tokens=2048):
        """Cross-entropy in nats, summed over target tokens; a float32 scalar."""
        return self.loss_and_parts(micro_batch, chunk_tokens)[0]

    def loss_and_parts(self, micro_batch, chunk_tokens=2048, z_loss=0.0):
        """(loss, parts (2,)) as in linear_cross_entropy: cross-entropy and z-loss, summed over target tokens."""
        hidden, weight = self.decode(micro_batch), self.shared.weight
        return linear_cross_entropy(
            hidden, weight, micro_batch.labels, chunk_tokens, z_loss, with_padding(weight.copy)
        )  # fmt: skip

    def decode(self, micro_batch):
        """Decoder output (N, d_model), scaled for the tied embedding: the logits are output @ shared.weight.T."""
        self.flat.refresh()
        ids = (micro_batch.prompt_ids, micro_batch.decoder_ids)
        prompts, responses = embed(torch.cat(ids), self.shared.weight).split([len(side) for side in ids])
        prompt_masks, response_masks = map(self._masks, (micro_batch.prompt_keys, micro_batch.decoder_keys))
        checkpointing = self.gradient_checkpointing
        encoded = self.encoder(prompts, prompt_masks, micro_batch.encoder_layout, None, checkpointing)
        bias = score_bias(micro_batch.cross_layout, dtype=self.compute_dtype)
        cross = (encoded, micro_batch.cross_layout, bias)
        decoded = self.decoder(responses, response_masks, micro_batch.decoder_layout, cross, checkpointing)
        return decoded * self.config.d_model**-0.5

    def _masks(self, token_keys):
        """Masks of a stack's first site; in evaluation they drop nothing."""
        if not (self.training and self.dropout):
            return Masks(0.0)
        assert token_keys is not None, "dropout needs a micro-batch made with dropout keys"
        return Masks(self.dropout, self.step_key, token_keys)

    @torch.no_grad()
    def initialise(self, seed):
        """Draw random weights as transformers initialises T5; the same seed gives the same weights on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * module.init_std)
            elif isinstance(module, nn.Embedding):
                std = 1.0 if module is self.shared else self.config.d_model**-0.5
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * std)
        return self

    def freeze_all_but_decoder(self):
        """Freeze the encoder and the shared embedding, which is also the output projection."""
        self.shared.requires_grad_(False)
        self.encoder.requires_grad_(False)
        self._flatten()
        return self
