"""The fused kernels against plain PyTorch: on CPU through Triton's interpreter, on a GPU as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[3]


def relative_error(ours, plain):
    return ((ours.double() - plain.double()).norm() / plain.double().norm()).item()


def norm_errors(device, dtype, rows=37, width=24, has_added=True):
    """Relative errors of add_norm's two outputs and of the gradients of its inputs, against float64."""
    from model.nn.kernels.norm import add_norm

    x, added, grad_total, grad_normed = torch.randn(4, rows, width, device=device).to(dtype)
    weight = torch.rand(width, device=device) + 0.5
    weight[:2] = torch.tensor([0.0, -0.5])  # zero: the norm's output alone does not tell its input
    outcomes = []
    for exact in (False, True):
        inputs = [t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for t in (x, added, weight)]
        if exact:
            total = inputs[0] + inputs[1] if has_added else inputs[0]
            normed = F.rms_norm(total, (width,), inputs[2], 1e-6)
        else:
            total, normed = add_norm(inputs[0], inputs[1] if has_added else None, inputs[2], 1e-6)
        torch.autograd.backward([total, normed], [grad_total.to(total.dtype), grad_normed.to(normed.dtype)])
        outcomes.append([total.detach(), normed.detach(), *(t.grad for t in inputs if t.grad is not None)])
    return [relative_error(*pair) for pair in zip(*outcomes, strict=True)]


def cross_entropy_errors(device, dtype, rows=9, vocabulary=5003, padding=61, z_loss=1e-3):
    """Relative errors of the loss's parts and of its gradient, against float64; the padding's must be zero."""
    from model.nn.kernels.cross_entropy import cross_entropy_

    logits = (3 * torch.randn(rows, vocabulary + padding, device=device)).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device=device)
    exact = logits[:, :vocabulary].double().requires_grad_()
    plain = torch.stack([F.cross_entropy(exact, labels, reduction="none"), z_loss * exact.logsumexp(1).square()])
    plain.sum().backward()
    losses = cross_entropy_(logits, labels, vocabulary, z_loss)
    assert not logits[:, vocabulary:].any()
    parts = [relative_error(*pair) for pair in zip(losses, plain.detach(), strict=True)]
    return [*parts, relative_error(logits[:, :vocabulary], exact.grad)]


def update_errors(device, sizes=(5000, 16, 4096)):
    """Relative errors of ten updates of the weights and of both averages, against the optimizer's plain path."""
    from model.nn.flat_params import FlatParams
    from model.train.optim import RMSScaledAdamW

    starts, outcomes = [torch.randn(size) for size in sizes], []
    history = [torch.randn(sum(sizes)) for _ in range(10)]
    for kernel in (True, False):
        where = device if kernel else "cpu"
        params = [torch.nn.Parameter(start.clone().to(where)) for start in starts]
        rate = torch.tensor(0.01, device=where)
        optimizer = RMSScaledAdamW(FlatParams(params, [], None, torch.float32), rate, weight_decay=0.1)
        if kernel:
            optimizer.update_in_passes = optimizer.update_in_one_pass
        for step, gradients in enumerate(history):
            optimizer.gradients.copy_(gradients)
            optimizer.step(torch.tensor(0.5 if step else 0.0, device=where))
        outcomes.append([x.cpu() for x in (optimizer.weights, optimizer.averages, optimizer.squares)])
    return [relative_error(*pair) for pair in zip(*outcomes, strict=True)]


def interpreted():
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    errors = norm_errors("cpu", torch.float32) + norm_errors("cpu", torch.float32, rows=3, has_added=False)
    return errors + cross_entropy_errors("cpu", torch.float32) + update_errors("cpu")


def test_the_interpreted_kernels_give_what_plain_pytorch_gives():
    # A process of its own: Triton reads TRITON_INTERPRET when a kernel is defined.
    code = "from tests.nn.kernels.test_fused import *; print(*interpreted())"
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = [float(word) for word in done.stdout.split()]
    assert len(errors) == 5 + 4 + 3 + 3
    assert max(errors) < 1e-5


@pytest.mark.gpu
def test_the_kernels_in_bf16_are_within_a_hundredth_of_float64():
    assert max(norm_errors("cuda", torch.bfloat16, rows=5000, width=512)) < 1e-2
    assert max(norm_errors("cuda", torch.bfloat16, rows=333, width=768, has_added=False)) < 1e-2
    assert max(cross_entropy_errors("cuda", torch.bfloat16, rows=300, vocabulary=29_298, padding=14)) < 1e-2
    assert max(update_errors("cuda", sizes=(1_000_000, 16, 5000))) < 1e-4
