"""A product with adapters, of many tokens and of few, is that with W + s B A; on a GPU it takes few launches."""

from collections import Counter

import pytest
import torch
import triton
from torch.profiler import ProfilerActivity, profile

from model.nn import adapted_product
from model.nn.activations import relu_linear
from model.nn.flat_params import FlatParams, linear
from model.nn.lora import Adapter

WIDTH, OUTPUTS, RANK, SCALE = 12, 8, 3, 1.5


def make_weights(places, count=3, dtype=torch.float32):
    """`count` adjacent frozen weights, of which those at `places` have adapters; and their FlatParams."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(OUTPUTS, WIDTH)] * count + [(RANK, WIDTH)] * len(places) + [(OUTPUTS, RANK)] * len(places)
    weights = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    frozen, factors = weights[:count], weights[count:]
    for weight in frozen:
        weight.requires_grad_(False)
    flat = FlatParams([], [*frozen, *factors], [], dtype)
    flat.refresh()
    for place, A, B in zip(places, factors[: len(places)], factors[len(places) :], strict=True):
        frozen[place].adapter = Adapter(A, B, SCALE, 0.0, 0)
    return frozen, factors


@pytest.mark.parametrize("tokens", [OUTPUTS - 1, 40])
@pytest.mark.parametrize("places", [(0, 1, 2), (0, 2), (1,)])
def test_the_product_and_its_gradients_are_those_of_the_merged_matrix(tokens, places):
    frozen, factors = make_weights(places)
    x, grad = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(tokens, 3 * OUTPUTS)
    linear(x, *frozen).backward(grad)
    ours, x.grad = [x.grad, *(factor.grad.clone() for factor in factors)], None
    exact = [factor.detach().clone().requires_grad_() for factor in factors]
    matrices = [weight.detach() for weight in frozen]
    for place, A, B in zip(places, exact, exact[len(places) :], strict=False):
        matrices[place] = matrices[place] + SCALE * B @ A
    (x @ torch.cat(matrices).T).backward(grad)
    for one, other in zip(ours, [x.grad, *(factor.grad for factor in exact)], strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("tokens", [OUTPUTS - 1, 40])
def test_a_relu_after_the_product_is_that_of_the_output(tokens):
    outcomes = []
    for apply in (relu_linear, lambda x, weight: linear(x, weight).relu()):
        (weight,), factors = make_weights((0,), 1)
        x = torch.randn(tokens, WIDTH, generator=torch.manual_seed(1), requires_grad=True)
        out = apply(x, weight)
        out.backward(torch.randn(out.shape, generator=torch.manual_seed(2)))
        outcomes.append([out, x.grad, *(factor.grad for factor in factors)])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


def test_the_product_with_the_merged_matrix_in_bf16_errs_as_little_as_the_one_in_two_parts():
    torch.manual_seed(0)
    (weight,), (A, B) = make_weights((0,), 1, torch.bfloat16)
    x, errors = torch.randn(200, WIDTH).bfloat16(), []
    exact = x.double() @ (weight.double() + SCALE * B.copy.double() @ A.copy.double()).T
    for rows in (200, OUTPUTS - 1):
        out = torch.cat([linear(part, weight) for part in x.split(rows)])
        errors.append((out.double() - exact).norm() / exact.norm())
    assert errors[0] < 1.2 * errors[1] < 0.01


def test_many_tokens_cost_seven_launches_in_kernels_and_eight_products_without(monkeypatch):
    frozen, _ = make_weights((0, 1, 2), dtype=torch.bfloat16)
    x, launches = torch.randn(40, WIDTH, dtype=torch.bfloat16, requires_grad=True), Counter()
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *_, **__: launches.update([self.__name__]))
    for in_kernels, expected in ((False, 8), (True, 2)):
        monkeypatch.setattr(adapted_product, "runs_kernels", lambda _, here=in_kernels: here)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            linear(x, *frozen).sum().backward()
        names = [f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm_")]
        assert sum(event.name in names for event in profiler.events()) == expected
    assert launches == dict(add_adapters=2, project=1, gradient_parts=1, add_parts=1)
