"""Milliseconds of the kernels of a step by tile sizes, warps, stages and registers, on the lengths of bench.corpus.

    python -m bench.tiles [--pairs 256] [--parts attention,norm,rotary,cross_entropy]

Prints one JSON line per part and choice: the milliseconds of each kernel of the part in one forward and backward. On a
CPU, with TRITON_INTERPRET=1, it shows only that the choices run.
"""

import argparse
import json
from collections import defaultdict
from unittest import mock

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.corpus import VOCAB_SIZE, draw_lengths
from model.nn.attention import make_layout, score_mask
from model.nn.decoder.rotary import rotary_at
from model.nn.kernels import attention, cross_entropy, norm, rotary
from model.nn.layers import ResidualNorm
from model.nn.registry import load_model_config
from model.nn.t5.position_bias import score_bias

HEADS, HEAD_WIDTH, CALLS = 8, 64, 20
# Warps, stages, and the most registers of a thread (0: any).
ATTENTION_CHOICES = ((4, 1, 0), (4, 2, 0), (4, 3, 0), (8, 1, 0), (4, 1, 168), (4, 2, 168), (4, 1, 128), (8, 1, 128))
DEVICE, DTYPE, CHUNK_TOKENS = ("cuda", torch.bfloat16, 2048) if torch.cuda.is_available() else ("cpu", torch.float32, 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--parts", default="attention,norm,rotary,cross_entropy")
    given = parser.parse_args()
    lengths = draw_lengths(given.pairs, np.random.default_rng(0)).astype(np.int64)
    parts = dict(
        attention=attention_choices, norm=norm_choices, rotary=rotary_choices, cross_entropy=cross_entropy_choices
    )
    for part in given.parts.split(","):
        for choice, call, patches in parts[part](lengths):
            line = dict(bench="tiles", part=part, pairs=given.pairs, choice=choice)
            print(json.dumps(line | milliseconds(call, patches)), flush=True)


def milliseconds(call, patches):
    """{kernel: milliseconds} of a call with these patches, or the error it raised."""
    with mock.patch.multiple(patches.pop("module"), **patches):
        try:
            call()
            call()
            if DEVICE == "cpu":
                return {}
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
                for _ in range(CALLS):
                    call()
                torch.cuda.synchronize()
        except Exception as error:  # a choice that the GPU has no room for
            return dict(error=f"{type(error).__name__}: {str(error)[:200]}")
    times = defaultdict(float)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and "elementwise" not in event.name:
            times[event.name[:40]] += event.time_range.elapsed_us() / 1e3 / CALLS
    return {name: round(ms, 4) for name, ms in times.items()}


def attention_choices(lengths):
    """Each kind of attention of a T5 by itself: the encoder's, the decoder's, and the decoder's over inputs."""
    inputs, outputs = lengths.T
    for kind, own, other in (("encoder", inputs, inputs), ("decoder", outputs, outputs), ("cross", outputs, inputs)):
        call = attention_call(own, other, kind)
        yield f"{kind}, as in training", call, dict(module=attention, launch_options=attention.launch_options)
        for warps, stages, registers in ATTENTION_CHOICES:
            options = dict(num_warps=warps, num_stages=stages) | (dict(maxnreg=registers) if registers else {})
            patch = dict(launch_options=lambda *args, options=options: options)
            yield f"{kind} {options}", call, dict(module=attention) | patch


def attention_call(own, other, kind):
    """A function that computes attention of one kind, forward and backward."""
    layout, width = make_layout(own, other, DEVICE, kernels=True), HEADS * HEAD_WIDTH
    if kind == "cross":
        qkv, bias = random_rows((own.sum(), width), (other.sum(), 2 * width)), score_mask(layout)
    else:
        weight = torch.randn(32, HEADS, device=DEVICE, requires_grad=True)
        qkv, bias = random_rows((own.sum(), 3 * width)), score_bias(layout, weight, causal=kind == "decoder")

    def call():
        out = attention.packed_attention(qkv, layout, bias, HEADS, HEADS)
        out.backward(out.detach())

    return call


def norm_choices(lengths):
    rows = int(lengths[:, 1].sum())
    (x, added), weight = random_rows((rows, 512), (rows, 512)), torch.ones(512, device=DEVICE, requires_grad=True)

    def call():
        total, normed = norm.add_norm(x, added, weight, 1e-6)
        torch.autograd.backward([total, normed], [total.detach(), normed.detach()])

    now = norm.NORM_PROGRAMS, norm.ROWS_AT_ONCE
    for programs, at_once in (now, (264, 4), (1024, 4), (512, 2), (1024, 2), (512, 8)):
        choice = dict(NORM_PROGRAMS=programs, ROWS_AT_ONCE=at_once)
        yield str(choice), call, dict(module=norm) | choice


def rotary_choices(lengths):
    """8 heads of q and 4 of k, of 96 numbers, with the heads of v behind them, normed and rotated as in model=mini."""
    rows, model_config = int(lengths.sum()), load_model_config("mini")
    q, kv = random_rows((rows, 768), (rows, 768))
    angles = rotary_at(torch.arange(rows, device=DEVICE) % 512, model_config)
    head_norm = ResidualNorm(96, 1e-6).to(DEVICE)

    def call():
        for x, heads, scaled in ((q, 8, 8), (kv, 4, 0)):
            out = rotary.rotate_heads(x.clone(), angles, heads, scaled, head_norm)
            out.backward(out.detach().clone())

    now = rotary.PAIRS_AT_ONCE, rotary.BACKWARD_PROGRAMS
    for pairs, programs in (now, (512, 512), (2048, 512), (1024, 264), (1024, 1056), (512, 1056)):
        choice = dict(PAIRS_AT_ONCE=pairs, BACKWARD_PROGRAMS=programs)
        yield str(choice), call, dict(module=rotary) | choice


def cross_entropy_choices(lengths):
    width = -(-VOCAB_SIZE // 64) * 64
    logits, labels = (
        random_rows((CHUNK_TOKENS, width))[0].detach(),
        torch.zeros(CHUNK_TOKENS, dtype=torch.long, device=DEVICE),
    )
    launch = cross_entropy.cross_entropy

    def call():
        cross_entropy.cross_entropy_(logits, labels, VOCAB_SIZE, 0.0)

    now = cross_entropy.COLUMNS, cross_entropy.WARPS
    for columns, warps in (now, (8192, 16), (4096, 8), (4096, 4), (2048, 8), (1024, 2)):
        choice = dict(COLUMNS=columns, num_warps=warps)
        yield str(choice), call, dict(module=cross_entropy, cross_entropy=Launch(launch, choice))


class Launch:
    """A kernel that is launched with other options than its caller's."""

    def __init__(self, kernel, options):
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **options | self.options)


def random_rows(*shapes):
    return [torch.randn(*map(int, s), device=DEVICE, dtype=DTYPE).mul_(0.1).requires_grad_() for s in shapes]


if __name__ == "__main__":
    main()
