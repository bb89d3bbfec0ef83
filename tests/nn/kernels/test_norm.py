"""The norm kernels against PyTorch in float64: on a CPU in Triton's interpreter, on a GPU as they are."""

import pytest
import torch
import torch.nn.functional as F

from tests.nn.kernels.interpreted import interpreted_errors, relative_error


def norm_errors(device, dtype, rows=37, width=24, has_added=True, uses_sum=True):
    """Relative errors of add_norm's two outputs and of the gradients of its inputs, against float64."""
    from model.nn.kernels.norm import add_norm

    x, added, grad_total, grad_normed = torch.randn(4, rows, width, device=device).to(dtype)
    weight = torch.rand(width, device=device) + 0.5
    weight[:2] = torch.tensor([0.0, -0.5])  # zero: the clamped case, in which backward divides by the weight
    outcomes = []
    for exact in (False, True):
        inputs = [t.detach().to(torch.float64 if exact else t.dtype).requires_grad_() for t in (x, added, weight)]
        if exact:
            total = inputs[0] + inputs[1] if has_added else inputs[0]
            normed = F.rms_norm(total, (width,), inputs[2], 1e-6)
        else:
            total, normed = add_norm(inputs[0], inputs[1] if has_added else None, inputs[2], 1e-6)
        grads = [grad_total.to(total.dtype), grad_normed.to(normed.dtype)]
        torch.autograd.backward([total, normed][not uses_sum :], grads[not uses_sum :])
        outcomes.append([total.detach(), normed.detach(), *(t.grad for t in inputs if t.grad is not None)])
    return [relative_error(*pair) for pair in zip(*outcomes, strict=True)]


def interpreted():
    cases = [dict(), *(dict(rows=3, has_added=False, uses_sum=uses) for uses in (True, False))]
    cases += [dict(rows=3, width=1500), dict(rows=3, width=2500)]
    return [error for case in cases for error in norm_errors("cpu", torch.float32, **case)]


def test_the_interpreted_norm_gives_the_same_as_pytorch():
    errors = interpreted_errors()["tests.nn.kernels.test_norm"]
    assert len(errors) == 5 + 4 + 4 + 5 + 5
    assert max(errors) < 1e-5


@pytest.mark.gpu
def test_the_norm_in_bf16_is_within_one_percent_of_float64():
    assert max(norm_errors("cuda", torch.bfloat16, rows=5000, width=512)) < 1e-2
    assert max(norm_errors("cuda", torch.bfloat16, rows=333, width=768, has_added=False)) < 1e-2
    assert max(norm_errors("cuda", torch.bfloat16, rows=5000, width=96, has_added=False, uses_sum=False)) < 1e-2
    assert max(norm_errors("cuda", torch.bfloat16, rows=333, width=4096)) < 1e-2
