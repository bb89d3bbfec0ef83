"""A family for tests: a decoder-only network in one stream, with grouped heads, biases and no position encoding."""

from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.nn.attention import attend, make_layout, score_mask
from model.nn.base import Family, LanguageModel
from model.nn.dropout import add_dropout, dropout, token_keys
from model.nn.embedding import embed
from model.nn.flat_params import linear
from model.nn.layers import Linear, ResidualNorm, make_embedding


@dataclass(frozen=True, kw_only=True)
class CausalConfig:
    width: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    num_layers: int = 2
    vocab_size: int = 0
    places: int = 0  # most tokens of a sequence; 0: any number

    parts, kernel_sizes = ("all",), (0,)  # no kernel
    num_blocks = property(lambda self: self.num_layers)
    max_tokens = property(lambda self: self.places or None)


@dataclass(frozen=True)
class Stream:
    """Sequences end to end; the state of row `rows[i]` predicts `labels[i]`."""

    ids: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    layout: object
    values: dict
    token_keys: torch.Tensor | None = None

    def to(self, device):
        values = {name: value.to(device) for name, value in self.values.items()}
        keys = None if self.token_keys is None else self.token_keys.to(device)
        return Stream(*(getattr(self, f.name).to(device) for f in fields(self)[:4]), values, keys)


def collate(sequences, packing):
    """The Stream of Sequences: each one's columns are joined, and the last column's tokens are its targets."""
    totals, last = sequences.lengths.sum(axis=1), sequences.lengths[:, -1]
    place = np.concatenate([np.arange(total) for total in totals])
    in_last = place >= np.repeat(totals - last, totals)
    ids = np.empty(len(place), np.int64)
    ids[in_last] = sequences.columns[-1]
    ids[~in_last] = np.concatenate(sequences.columns[:-1] or [ids[:0]])
    wanted = np.ones(in_last.sum(), bool) if sequences.is_target is None else sequences.is_target
    rows = np.flatnonzero(in_last)[wanted] - 1
    values = {name: value[wanted] for name, value in sequences.token_values.items()} | sequences.values
    tensors = (torch.from_numpy(x) for x in (ids, rows, ids[rows + 1]))
    values = {name: torch.from_numpy(x) for name, x in values.items()}
    keys = torch.from_numpy(token_keys(sequences.ids, totals, 0)) if packing.dropout else None
    return Stream(*tensors, make_layout(totals, totals), values, keys)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norms = nn.ModuleList([ResidualNorm(c.width, 1e-6), ResidualNorm(c.width, 1e-6)])
        self.width, self.heads = c.width // c.num_heads, (c.num_heads, c.num_kv_heads)
        self.q, self.o, self.up, self.down = (Linear(c.width, c.width, 0.1, has_bias=True) for _ in range(4))
        self.k, self.v = (Linear(c.width, self.width * c.num_kv_heads, 0.1, has_bias=True) for _ in range(2))

    def forward(self, x, masks, attention):
        normed = self.norms[0](x, None)[1]
        k, v = linear(normed, self.k.weight, self.v.weight, biases=(self.k.bias, self.v.bias)).chunk(2, dim=1)
        added = self.o(attention(self.q(normed) * self.width**-0.5, k, v))
        x, normed = self.norms[1](x, added, masks)
        return add_dropout(x, self.down(F.relu(self.up(normed))), masks.at(1))


class CausalModel(LanguageModel):
    def __init__(self, model_config, dropout=0.0, compute_dtype=torch.float32):
        super().__init__(model_config, dropout, compute_dtype)
        self.embedding = make_embedding(model_config.vocab_size, model_config.width)
        self.blocks = nn.ModuleList(Block(model_config) for _ in range(model_config.num_layers))
        self.norm = ResidualNorm(model_config.width, 1e-6)
        self.make_flat()

    tables = property(lambda self: [self.embedding.weight])

    def hidden(self, batch):
        self.flat.refresh()
        heads, mask = self.blocks[0].heads, score_mask(batch.layout, causal=True, dtype=self.compute_dtype)
        masks = self.masks(batch.token_keys)
        x = dropout(embed(batch.ids, self.embedding.weight), masks)
        for number, block in enumerate(self.blocks):
            args = (block, x, masks.at(1 + 2 * number), lambda *qkv: attend(qkv, batch.layout, mask, *heads))
            again = number < self.gradient_checkpointing and torch.is_grad_enabled()
            x = checkpoint(*args, use_reentrant=False) if again else args[0](*args[1:])
        return self.norm(x, None)[1][batch.rows], batch.labels

    @torch.no_grad()
    def initialise(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in (p for p in self.parameters() if p.dim() == 2):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        return self

    def new_cache(self, slots, input_tokens, new_tokens):
        ids, at = torch.zeros(slots, input_tokens + new_tokens + 8, dtype=torch.int64), np.zeros(slots, int)
        return SimpleNamespace(
            ids=ids, at=at, reads_all=True, first=lambda n, *_: SimpleNamespace(ids=ids[:n], at=at[:n])
        )

    def prefill(self, inputs, cache, slots, first_id):
        for slot, own in zip(slots, inputs, strict=True):
            cache.ids[slot, : len(own) - 1], cache.at[slot] = torch.as_tensor(own)[:-1], len(own) - 1
        return [int(own[-1]) for own in inputs]

    def decode_one(self, ids, cache):
        """Computes every slot from its first token on: slow, but the caller cannot tell."""
        cache.at[:] = np.minimum(cache.at, cache.ids.shape[1] - 1)  # a slot that nobody uses may have gone on further
        cache.ids[range(len(ids)), cache.at] = ids.cpu()
        cache.at += 1
        stream = torch.cat([row[:length] for row, length in zip(cache.ids, cache.at, strict=True)])
        rows = torch.from_numpy(np.cumsum(cache.at) - 1)
        batch = Stream(stream, rows, rows, make_layout(cache.at, cache.at), {}).to(self.device)
        return self.hidden(batch)[0]


def step_moments(spec, tokens, checkpointing):
    """A generous count: every tensor of every layer, and the attention scores."""
    c, total = spec.model_config, tokens.sum(axis=1).astype(np.float64)
    kept = spec.number_bytes * c.num_layers * (16 * c.width * total + 3 * c.num_heads * total**2)
    return dict(loss=kept, embedding=4 * c.width * total)


CAUSAL = Family(
    name="causal", config_class=CausalConfig, build=CausalModel, collate=collate,
    first_id=lambda _, tokenizer: tokenizer.pad_id,
    step_moments=step_moments, evaluation_moment=lambda spec, tokens: step_moments(spec, tokens, False)["loss"],
    cache_bytes=lambda spec, slots, inputs, new: slots * (inputs + new) * 8 * spec.model_config.width,
    aliases=(), check_config=lambda values, path: None,
    to_hf=lambda model, tokenizer: (asdict(model.config) | dict(model_type="causal"), {}),
    config_with=lambda model_config, tensors: model_config,
    config_of=lambda values, path: CausalConfig(**{f.name: values[f.name] for f in fields(CausalConfig)}),
    from_hf=lambda tensors, path: tensors,
    adapter_targets=lambda c: ("q", "k", "v", "o", "up", "down"), reads_one_stream=True,
)  # fmt: skip
