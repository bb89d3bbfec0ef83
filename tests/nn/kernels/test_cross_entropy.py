"""The cross-entropy kernel against PyTorch in float64: on a CPU in Triton's interpreter, on a GPU as it is."""

import pytest
import torch
import torch.nn.functional as F

from tests.nn.kernels.interpreted import interpreted_errors, relative_error


def cross_entropy_errors(device, dtype, rows=9, vocabulary=5003, padding=61, z_loss=1e-3, smoothing=0.1):
    """Relative errors of the loss's parts and of its gradient, against float64; those of padding must be zero."""
    from model.nn.kernels.cross_entropy import cross_entropy_

    logits = (3 * torch.randn(rows, vocabulary + padding, device=device)).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device=device)
    labels[[0, rows // 2]] = -1  # no target
    exact = logits[:, :vocabulary].double().requires_grad_()
    cross_entropy, smooth = (
        F.cross_entropy(exact, labels, ignore_index=-1, reduction="none", label_smoothing=x) for x in (0.0, smoothing)
    )
    z_losses = z_loss * exact.logsumexp(1).square() * (labels >= 0)
    plain = torch.stack([cross_entropy, z_losses, *([smooth - cross_entropy] if smoothing else [])])
    plain.sum().backward()
    losses = cross_entropy_(logits, labels, vocabulary, z_loss, smoothing)
    assert not logits[:, vocabulary:].any() and not logits[labels < 0].any() and not losses[:, labels < 0].any()
    assert smoothing or not losses[2].any()
    parts = [relative_error(*pair) for pair in zip(losses[: len(plain)], plain.detach(), strict=True)]
    return [*parts, relative_error(logits[:, :vocabulary], exact.grad)]


def interpreted():
    return [*cross_entropy_errors("cpu", torch.float32), *cross_entropy_errors("cpu", torch.float32, smoothing=0.0)]


def test_the_interpreted_cross_entropy_gives_the_same_as_pytorch():
    errors = interpreted_errors()["tests.nn.kernels.test_cross_entropy"]
    assert len(errors) == 4 + 3
    assert max(errors) < 1e-5


@pytest.mark.gpu
def test_the_cross_entropy_in_bf16_is_within_one_percent_of_float64():
    for smoothing in (0.0, 0.1):
        sizes = dict(rows=300, vocabulary=29_298, padding=14, smoothing=smoothing)
        assert max(cross_entropy_errors("cuda", torch.bfloat16, **sizes)) < 1e-2
