"""The rotary kernel against PyTorch: on a CPU in Triton's interpreter, on a GPU as it is."""

import pytest
import torch

from model.nn.decoder import rotary
from model.nn.decoder.sizes import DecoderModelConfig
from tests.nn.kernels.interpreted import interpreted_errors, relative_error


def rotary_errors(device, dtype, head_dim=12):
    """Relative errors of the kernel, in output and gradient, of 5 heads of which 3 are rotated and 2 scaled."""
    from model.nn.kernels import rotary as kernel

    sizes = dict(hidden_size=5 * head_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=5)
    model_config = DecoderModelConfig(**sizes, rope_theta=1e4)
    angles = rotary.rotary_at(torch.randint(0, 4000, (37,), device=device), model_config)
    x = torch.randn(37, 6 * head_dim, device=device).to(dtype)[:, : 5 * head_dim]
    ours = [kernel.rotated(x, angles.cos, sin, 3, 2) for sin in (angles.sin, -angles.sin)]
    double = rotary.Rotary(angles.cos.double(), angles.sin.double())
    y = x.detach().cpu().double().requires_grad_()
    on_cpu = rotary.Rotary(double.cos.cpu(), double.sin.cpu())
    out = rotary.apply_rotary(y, on_cpu, 3, 2)
    out.backward(x.cpu().double())
    return [relative_error(a.cpu(), b) for a, b in zip(ours, (out.detach(), y.grad), strict=True)]


def interpreted():
    return rotary_errors("cpu", torch.float32)


def test_the_interpreted_kernel_gives_the_same_as_pytorch():
    errors = interpreted_errors()[__name__]
    assert len(errors) == 2 and max(errors) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 80])
def test_the_kernel_in_bf16_is_within_one_percent_of_pytorch(head_dim):
    assert max(rotary_errors("cuda", torch.bfloat16, head_dim)) < 1e-2
