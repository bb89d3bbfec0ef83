"""Milliseconds of attention with T5's bias and of the loss, forward and backward, beside other ways to compute them.

    python -m bench.kernels [--tokens 32768] [--heads 8] [--width 64] [--vocab 29298] [--part attention,loss]

Prints one JSON line per case. Attention's time is that of one layer, the gradient of T5's bias table included; the work
that the layers of a stack share (the bias tensor, the final sum of its gradient) is done once per LAYERS layers. loss:
linear_cross_entropy, with a teacher and against loops too, and the plain compiled loss, with peaks of memory; the last
line has the ratios of ours to the plain one. bf16 on a GPU; float32 on a CPU, where our attention is the PyTorch
reference. Parity is held by the tests marked gpu.
"""

import argparse
import json
import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.clock import memory_of_call, time_call
from config import CHOICES
from model.nn.attention import attend, make_layout, score_mask
from model.nn.flat_params import FlatParams, with_padding
from model.nn.guides import NO_GUIDES, Guides, TeacherOutput
from model.nn.loss import linear_cross_entropy
from model.nn.loss_terms import PLAIN, LossTerms
from model.nn.t5.position_bias import position_buckets, relative_position_bias, score_bias

LAYERS = 6  # layers in a stack of T5-small
NUM_BUCKETS, MAX_DISTANCE = 32, 128
LENGTHS = (128, 256, 512)
ANSWER_TOKENS = 80
MASKS = {"bias, full": (True, False), "bias, causal": (True, True), "no bias (cross)": (False, False)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=29_298)
    parser.add_argument("--part", default="attention,loss")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if "attention" in options.part:
        for length in (length for length in LENGTHS if options.tokens % length == 0):
            for mask in MASKS:
                cell = dict(part="attention", rows=options.tokens // length, length=length, mask=mask)
                print(json.dumps(cell | timings(options, length, *MASKS[mask], device)), flush=True)
    if "loss" in options.part:
        results = losses(options.tokens, options.heads * options.width, options.vocab, device)
        for name, result in results.items():
            print(json.dumps(dict(part="loss", name=name, **result)), flush=True)
        ours, plain = results["linear_cross_entropy"], results["plain, compiled"]
        ratios = dict(time=ours["ms"] / plain["ms"], memory=ours["peak_mib"] / max(plain["peak_mib"], 1e-9))
        print(json.dumps(dict(part="loss", name="ours over plain", **ratios)))


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
    "SDPA, grouped by length": dense_by_length,
    "FlexAttention, (H, 2L-1) table": flex_over_flat,
}


def plain_loss(hidden, weight, labels):
    """Cross-entropy summed over tokens, with all logits in memory."""
    return F.cross_entropy(F.linear(hidden, weight.to(hidden.dtype)).float(), labels, reduction="sum")


def losses(tokens, width, vocab, device):
    """{loss: dict(ms, peak_mib, loss)} of all losses on the same inputs."""
    dtype = dtype_on(device)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).mul(width**-0.5).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocab, width, device=device))
    flat = FlatParams([weight], [], [weight], dtype)  # like the model's: a copy in bf16 with padded rows
    labels = torch.randint(vocab, (tokens,), device=device)

    def chunked(hidden, weight, labels, terms=PLAIN, guides=NO_GUIDES):
        flat.refresh()
        copy = with_padding(weight.copy)
        return linear_cross_entropy(hidden, weight, labels, terms=terms, copy_WD=copy, guides=guides)[0]

    ways = {"linear_cross_entropy": chunked, "plain, compiled": torch.compile(plain_loss, dynamic=False)}
    teacher = TeacherOutput(torch.randn_like(hidden).detach(), with_padding(weight.copy), vocab)
    places = torch.arange(tokens, device=device) % ANSWER_TOKENS
    ways["with a teacher"] = partial(chunked, terms=LossTerms(distill_weight=0.5), guides=Guides((teacher,)))
    for kind in CHOICES["against_loops"][1:]:
        terms = LossTerms(against_loops=kind, loops_weight=1.0)
        ways[kind] = partial(chunked, terms=terms, guides=Guides(places_N=places))
    return {name: measured_loss(way, hidden, weight, labels, device) for name, way in ways.items()}


def measured_loss(way, hidden, weight, labels, device):
    def call():
        hidden.grad = weight.grad = None
        loss = way(hidden, weight, labels)
        loss.backward()
        return loss.detach()

    loss = call().item() / len(labels)  # compiles at the first call
    call()
    hidden.grad = weight.grad = None
    peak = memory_of_call(call, device)
    return dict(ms=time_call(call, device, seconds=1), peak_mib=peak / 2**20, loss=loss)


if __name__ == "__main__":
    main()
