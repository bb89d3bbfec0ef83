"""Attention with T5's bias: parity of the kernels with the PyTorch reference, and milliseconds of several methods.

    python -m bench.kernels [--tokens 32768] [--heads 8] [--width 64] [--part parity,timing]

Prints one JSON line per case. A time is forward + backward of one layer, including the gradient of T5's bias table; the
work that the layers of a stack share (the bias tensor, the final sum of its gradient) is done once per LAYERS layers.
bf16 on a GPU; float32 on a CPU, where ours is the PyTorch reference.
"""

import argparse
import json
import math
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.clock import time_call
from model.nn.attention import attend, make_layout, score_mask
from model.nn.t5.position_bias import position_buckets, relative_position_bias, score_bias

LAYERS = 6  # layers in a stack of T5-small
NUM_BUCKETS, MAX_DISTANCE, ROW = 32, 128, 512
LENGTHS = (128, 256, 512)
MASKS = {"bias, full": (True, False), "bias, causal": (True, True), "no bias (cross)": (False, False)}


def main():
    parser = argparse.ArgumentParser(description="Attention kernels: parity with the PyTorch reference, milliseconds.")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--part", default="parity,timing")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if "parity" in options.part and device.type == "cuda":  # on a CPU both are the reference
        for mask in MASKS:
            print(json.dumps(dict(part="parity", mask=mask, **parity(mask, options.heads, options.width, device))))
    if "timing" in options.part:
        for length in (length for length in LENGTHS if options.tokens % max(length, ROW) == 0):
            for mask in MASKS:
                cell = dict(part="timing", rows=options.tokens // length, length=length, mask=mask)
                print(json.dumps(cell | timings(options, length, *MASKS[mask], device)), flush=True)


def parity(mask, heads, width, device):
    """Relative errors of the output and each gradient, in the device's dtype, against the reference in float32."""
    has_bias, causal = MASKS[mask]
    seed = int.from_bytes(np.random.bytes(4), "little")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    queries = rng.integers(1, ROW + 1, size=64)
    keys = queries if has_bias else rng.integers(1, ROW + 1, size=64)
    rows = (queries.sum(), keys.sum(), keys.sum(), queries.sum())
    *qkv, grad = (torch.randn(int(n), heads * width, generator=generator).mul(0.6).to(device) for n in rows)
    weight = torch.randn(NUM_BUCKETS, heads, generator=generator).to(device) if has_bias else None
    outcomes = []
    dtype = dtype_on(device)
    *qkv, grad = (x.to(dtype) for x in (*qkv, grad))
    for kernels, number in ((True, dtype), (False, torch.float32)):
        leaves = [x.to(number).detach().clone().requires_grad_() for x in qkv]
        leaves += [] if weight is None else [weight.clone().requires_grad_()]
        layout = make_layout(queries, keys, device, kernels)
        bias = bias_of(layout, leaves[3] if has_bias else None, causal, number)
        out = attend(leaves[:3], layout, bias, heads)
        outcomes.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(*outcomes, strict=True)]
    return dict(seed=seed, **dict(zip(("out", "grad_q", "grad_k", "grad_v", "grad_bias"), errors, strict=False)))


def bias_of(layout, table, causal, dtype):
    """ScoreBias of T5's table, or of the mask alone if it is None."""
    if table is None:
        return score_mask(layout, causal, dtype)
    return score_bias(layout, table, MAX_DISTANCE, causal, dtype)


def dtype_on(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def timings(options, length, has_bias, causal, device):
    """{method: milliseconds, or the error it raised}."""
    found = {}
    for name, way in WAYS.items():
        try:
            found[name] = time_way(way, options, length, has_bias, causal, device)
        except Exception as error:  # one failing method must not stop the others
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        torch.compiler.reset()
    return found


def time_way(way, options, length, has_bias, causal, device):
    """Milliseconds of one layer, forward + backward, with examples of `length` tokens."""
    shape = (options.tokens, options.heads * options.width)
    layers = [
        [torch.randn(shape, device=device).mul(0.3).to(dtype_on(device)) for _ in range(3)] for _ in range(LAYERS)
    ]
    leaves = [x.requires_grad_() for layer in layers for x in layer]
    table = torch.randn(NUM_BUCKETS, options.heads, device=device).requires_grad_() if has_bias else None
    prepare, attention = way(options.tokens, length, options.heads, causal, device)
    grads = [torch.randn(shape, device=device).to(dtype_on(device))] * LAYERS

    def call():
        bias = prepare(table)
        outs = [attention(*layer, bias) for layer in layers]
        torch.autograd.grad(outs, leaves if table is None else [*leaves, table], grads)

    call()
    call()
    return time_call(call, device) / LAYERS


def ours(tokens, length, heads, causal, device):
    """The attention that training uses: the Triton kernels, or the PyTorch reference on a CPU."""
    lengths = np.full(tokens // length, length)
    layout = make_layout(lengths, lengths, device, device.type == "cuda")
    return (
        lambda table: bias_of(layout, table, causal, dtype_on(device)),
        lambda q, k, v, bias: attend([q, k, v], layout, bias, heads),
    )


def rows_with_mask(tokens, length, heads, causal, device):
    """Memory-efficient SDPA over packed rows; bias and mask are one tensor, shared by the stack."""
    row = max(ROW, length)
    document = (torch.arange(row, device=device) // length).expand(tokens // row, row)
    hidden = hidden_pairs(document, causal)

    def prepare(table):
        if table is None:
            return torch.zeros_like(hidden, dtype=dtype_on(device)).masked_fill_(hidden, -math.inf)
        bias = relative_position_bias(table, row, MAX_DISTANCE, bidirectional=not causal)
        return torch.where(hidden, -math.inf, bias.to(dtype_on(device)).contiguous())

    return prepare, lambda q, k, v, bias: sdpa(q, k, v, row, heads, bias)


def hidden_pairs(document, causal):
    """(rows, 1, T, T), True where attention is masked; `document` (rows, T) is the document of each token."""
    hidden = document[:, None, :, None] != document[:, None, None, :]
    return hidden | torch.ones_like(hidden[:1, :1]).triu(1) if causal else hidden


def dense_by_length(tokens, length, heads, causal, device):
    """SDPA over examples of one length: memory-efficient if there is a bias, else the backend that torch chooses."""

    def prepare(table):
        if table is None:
            return None
        bias = relative_position_bias(table, length, MAX_DISTANCE, bidirectional=not causal).to(dtype_on(device))
        if causal:
            bias = bias.masked_fill(torch.ones(length, length, dtype=torch.bool, device=device).triu(1), -math.inf)
        return bias.contiguous()[None].expand(tokens // length, heads, length, length)

    return prepare, lambda q, k, v, bias: sdpa(q, k, v, length, heads, bias)


def sdpa(q, k, v, length, heads, bias):
    sides = (x.view(-1, length, heads, x.shape[1] // heads).transpose(1, 2) for x in (q, k, v))
    pinned = q.device.type == "cuda" and bias is not None  # cuDNN and flash do not support a gradient of the bias
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if pinned else nullcontext():
        out = F.scaled_dot_product_attention(*sides, attn_mask=bias, scale=1.0)
    return out.transpose(1, 2).reshape(q.shape)


def flex_over_flat(tokens, length, heads, causal, device):
    """FlexAttention over all tokens with a document mask; reads the bias from a table (heads, 2 * length - 1)."""

    def visible(_batch, _head, query, key):
        same = query // length == key // length
        return same & (query >= key) if causal else same

    mask = create_block_mask(visible, None, None, tokens, tokens, device=device.type)
    flex = torch.compile(flex_attention, dynamic=False)
    distances = torch.arange(1 - length, length, device=device)
    buckets = position_buckets(distances, NUM_BUCKETS, MAX_DISTANCE, bidirectional=not causal)

    def attention(q, k, v, bias):
        def with_bias(score, _batch, head, query, key):
            return score + bias[head, (key - query).clamp(1 - length, length - 1) + length - 1]

        sides = (x.view(1, tokens, heads, -1).transpose(1, 2) for x in (q, k, v))
        out = flex(*sides, score_mod=None if bias is None else with_bias, block_mask=mask, scale=1.0)
        return out.transpose(1, 2).reshape(q.shape)

    return lambda table: None if table is None else table[buckets].T.contiguous(), attention


WAYS = {
    "ours": ours,
    "efficient SDPA, packed rows, bias-and-mask tensor": rows_with_mask,
    "SDPA, grouped by length": dense_by_length,
    "FlexAttention, (H, 2L-1) table": flex_over_flat,
}


if __name__ == "__main__":
    main()
