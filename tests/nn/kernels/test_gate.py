"""The gated activations in kernels against PyTorch in float64: in Triton's interpreter, on a GPU as they are."""

import pytest
import torch

from tests.nn.kernels.interpreted import interpreted_errors, relative_error

NAMES = "gelu", "silu", "relu"


def gate_errors(device, dtype, name, rows=37, width=24):
    """Relative errors of the gated activation and of its input's gradient, against float64."""
    from model.nn.activations import gate
    from model.nn.kernels.gate import gate_gradient_, gated

    both, grad = (2 * torch.randn(rows, columns, device=device).to(dtype) for columns in (2 * width, width))
    exact = both.double().requires_grad_()
    expected = gate(exact.cpu(), name)
    expected.backward(grad.double().cpu())
    ours = gated(both, name), gate_gradient_(both, grad, name)
    pairs = zip(ours, (expected.detach(), exact.grad), strict=True)
    return [relative_error(one.cpu(), other.cpu()) for one, other in pairs]


def interpreted():
    return [error for name in NAMES for error in gate_errors("cpu", torch.float32, name)]


def test_the_interpreted_gates_give_the_same_as_pytorch():
    errors = interpreted_errors()["tests.nn.kernels.test_gate"]
    assert len(errors) == 2 * len(NAMES)
    assert max(errors) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_gates_in_bf16_are_within_one_percent_of_float64(name):
    assert max(gate_errors("cuda", torch.bfloat16, name, rows=5000, width=1024)) < 1e-2
