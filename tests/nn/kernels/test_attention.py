"""The attention kernels against PyTorch: on a CPU in Triton's interpreter, on a GPU as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SELF = [(5, 5), (70, 70), (64, 64), (1, 1), (130, 130)]
CROSS = [(9, 70), (3, 4), (100, 2), (65, 128)]
CASES = {
    "encoder": (SELF, False, True), "decoder": (SELF, True, True), "cross": (CROSS, False, False),
    "grouped": (SELF, True, False),
}  # fmt: skip


def outcome(lengths, causal, has_bias, heads, width, dtype, device, seed, kernels, padding=0):
    """Output and gradients of q, k, v and the bias table, by the kernels in `dtype` or by PyTorch in float32.

    `heads` are those of q; without a bias, in self-attention, half as many heads of k and v serve them.
    Adds `padding` rows after the examples, whose output and gradients must be zero.
    """
    from model.nn.attention import attend, make_layout, score_mask
    from model.nn.t5.position_bias import score_bias

    generator = torch.Generator().manual_seed(seed)
    queries, keys = np.sum(lengths, axis=0)
    kv_heads = heads if has_bias or lengths[0][0] != lengths[0][1] else heads // 2
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    shapes = [(n, own * width) for n, own in sizes]
    *qkv, grad = (torch.randn(shape, generator=generator).mul(0.6).to(device, dtype) for shape in shapes)
    inputs = [x.to(dtype if kernels else torch.float32).clone().requires_grad_() for x in qkv]
    weight = torch.randn(32, heads, generator=generator).to(device).requires_grad_() if has_bias else None
    layout = make_layout(*np.array(lengths).T, device, kernels)
    if padding:
        inputs = [torch.cat([x.detach(), x.new_ones(padding, x.shape[1])]).requires_grad_() for x in inputs]
        grad = torch.cat([grad, grad.new_ones(padding, grad.shape[1])])
        layout = padded_layout(lengths, padding, device)
    bias = score_mask(layout, causal) if weight is None else score_bias(layout, weight, 128, causal)
    out = attend(inputs, layout, bias, heads, kv_heads)
    out.backward(grad.to(out.dtype))
    if padding:
        assert not any(x[-padding:].any() for x in (out, *(x.grad for x in inputs)))
    real = [x if not padding or x is weight else x[:-padding] for x in (out.detach(), *(x.grad for x in inputs))]
    return real if weight is None else [*real, weight.grad]


def padded_layout(lengths, padding, device):
    from model.nn.packed_layout import PackedLayout, packed_tiles

    queries, keys = np.array(lengths).T
    bucket = (queries.sum() + padding, keys.sum() + padding, len(lengths))
    return PackedLayout(*(torch.from_numpy(tiles).to(device) for tiles in packed_tiles(queries, keys, bucket)))


def relative_errors(*case, padding=0):
    ours, reference = outcome(*case, kernels=True, padding=padding), outcome(*case, kernels=False)
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(ours, reference, strict=True)]


def test_the_interpreted_kernels_give_the_same_as_pytorch():
    # A child process, because Triton reads TRITON_INTERPRET when a kernel is defined.
    code = "import json; from tests.nn.kernels.test_attention import *; print(json.dumps(all_interpreted()))"
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for most, found in zip((1e-5, 1e-2), json.loads(done.stdout), strict=True):
        assert found.keys() == CASES.keys()
        for name, errors in found.items():
            assert len(errors) == 2 * (5 if CASES[name][2] else 4)
            assert max(errors) < most, (name, most)


def all_interpreted():
    """Relative errors of each of CASES, in float32 and in bfloat16."""
    in_float32 = {name: interpreted(name, torch.float32) for name in CASES}
    compute_bf16_as_a_gpu_does()
    return in_float32, {name: interpreted(name, torch.bfloat16) for name in CASES}


def interpreted(name, dtype):
    lengths, causal, has_bias = CASES[name]
    width = 24 if causal else 16  # a power of two, or padded to one
    if dtype == torch.bfloat16:
        width *= 4
        lengths = [pair for pair in lengths if min(pair) > 4]  # with one key the true gradient of q is zero
    case = (lengths, causal, has_bias, 2, width, dtype, "cpu", int.from_bytes(os.urandom(4), "little"))
    return relative_errors(*case) + relative_errors(*case, padding=77)


def compute_bf16_as_a_gpu_does():
    """Patch the interpreter, which keeps bf16 as 16-bit integers, to multiply the numbers and round to nearest."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, truncate = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self, handle, dtype):
        if dtype.scalar != tl.bfloat16:
            return truncate(self, handle, dtype)
        numbers = torch.from_numpy(np.ascontiguousarray(handle.data)).bfloat16()
        return TensorHandle(numbers.view(torch.int16).numpy().view(np.uint16), dtype.scalar)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    InterpreterBuilder.create_fp_trunc = rounded


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_in_bf16_are_within_one_percent_of_pytorch(name, width):
    lengths, causal, has_bias = CASES[name]
    rng = np.random.default_rng()
    many = [(int(n), int(n) if name != "cross" else int(m)) for n, m in rng.integers(1, 513, size=(200, 2))]
    for case in (lengths, many):
        seed, padding = (int(number) for number in rng.integers([2**31, 1000]))
        errors = relative_errors(case, causal, has_bias, 8, width, torch.bfloat16, "cuda", seed, padding=padding)
        assert max(errors) <= 1e-2, errors


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "width"), [("decoder", 64), ("grouped", 96)])
def test_the_kernels_give_the_same_bits_in_every_run(name, width):
    runs = [outcome(*CASES[name], 8, width, torch.bfloat16, "cuda", 1, kernels=True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
