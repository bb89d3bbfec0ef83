"""The rotary kernels against PyTorch in float64: on a CPU in Triton's interpreter, on a GPU as they are."""

import pytest
import torch
import torch.nn.functional as F

from model.nn.decoder import rotary
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.layers import ResidualNorm
from tests.nn.kernels.interpreted import interpreted_errors, relative_error


def rotary_errors(device, dtype, head_dim=12, rows=37, num_rotated=3, has_norm=False):
    """Relative errors of the kernels in output and gradients, of 5 heads of which 2 are scaled, against float64."""
    from model.nn.kernels import rotary as kernels

    sizes = dict(hidden_size=5 * head_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=5)
    angles = rotary.rotary_at(
        torch.randint(0, 4000, (rows,), device=device), DecoderModelConfig(**sizes, rope_theta=1e4)
    )
    x, grad = torch.randn(2, rows, 5 * head_dim, device=device).to(dtype)
    norm = ResidualNorm(head_dim, 1e-6).to(device)
    norm.weight.data = torch.randn(head_dim, device=device)
    norm.weight.data[:2] = torch.tensor([0.0, 1e-8])
    leaf = x.clone().requires_grad_()
    out = kernels.rotate_heads(leaf.clone(), angles, num_rotated, 2, norm if has_norm else None)
    out.backward(grad.clone())
    exact, weight = x.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = exact_heads(exact, angles, num_rotated, 2, weight if has_norm else None)
    expected.backward(grad.double())
    with torch.no_grad():
        alone = kernels.rotate_heads(x.clone(), angles, num_rotated, 2, norm if has_norm else None)
    pairs = [(out, expected), (alone, expected), (leaf.grad, exact.grad)]
    pairs += [(norm.weight.grad, weight.grad)] * has_norm
    return [relative_error(ours.detach(), theirs.detach()) for ours, theirs in pairs]


def exact_heads(x, angles, num_rotated, num_scaled, weight):
    """As rotary.rotate_heads, in the words of transformers and in float64."""
    heads = x.view(len(x), 5, -1)
    first, others = heads[:, :num_rotated], heads[:, num_rotated:]
    if weight is not None:
        first = F.rms_norm(first, weight.shape, weight, 1e-6)
    cos, sin = (torch.cat((angle, angle), dim=1)[:, None].double() for angle in (angles.cos, angles.sin))
    x, y = first.chunk(2, dim=2)
    rotated = torch.cat((first * cos + torch.cat((-y, x), dim=2) * sin, others), dim=1)
    scales = torch.ones(5, 1, dtype=torch.float64, device=x.device)
    scales[:num_scaled] = heads.shape[2] ** -0.5
    return (rotated * scales).flatten(1)


def interpreted():
    from model.nn.kernels import rotary as kernels

    kernels.BACKWARD_PROGRAMS = 4  # fewer than there are tiles
    errors = rotary_errors("cpu", torch.float32)
    for head_dim in (64, 96, 128):
        for num_rotated in (3, 5):  # some heads, and all of them
            errors += rotary_errors("cpu", torch.float32, head_dim, num_rotated=num_rotated, has_norm=True)
    return errors


def test_the_interpreted_kernels_give_the_same_as_pytorch():
    errors = interpreted_errors()[__name__]
    assert len(errors) == 3 + 6 * 4 and max(errors) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 80])
def test_the_kernels_in_bf16_are_within_one_percent_of_pytorch(head_dim):
    for case in (dict(), dict(has_norm=True), dict(has_norm=True, num_rotated=5)):
        assert max(rotary_errors("cuda", torch.bfloat16, head_dim, rows=4001, **case)) < 1e-2
