"""Trained weights have masters, gradients and copies; frozen ones are held once; adjacent ones act as one matrix."""

import pytest
import torch
import torch.nn.functional as F

from model.nn import products
from model.nn.activations import relu_backward
from model.nn.flat_params import FlatParams, linear, linears
from model.nn.products import product
from tests.parts import SHAPE, batch_of, make_model


def make_layers(dtype=torch.float32, frozen=()):
    """Two adjacent layers with biases, and their FlatParams; `frozen` holds indices of the four parameters."""
    generator = torch.Generator().manual_seed(0)
    weights, biases = (
        [torch.nn.Parameter(torch.randn(size, generator=generator)) for _ in range(2)] for size in ((6, 5), (6,))
    )
    for index in frozen:
        [*weights, *biases][index].requires_grad_(False)
    return weights, biases, FlatParams(biases, weights, [], dtype, biases=biases)


def test_adjacent_layers_with_biases_act_as_one_layer():
    weights, biases, flat = make_layers()
    flat.refresh()
    x = torch.randn(7, 5, requires_grad=True)
    out = linear(x, *weights, biases=tuple(biases))
    expected = F.linear(x, torch.cat([w.detach() for w in weights]), torch.cat([b.detach() for b in biases]))
    torch.testing.assert_close(out, expected)
    grad = torch.randn(7, 12)
    out.backward(grad)
    torch.testing.assert_close(torch.cat([w.grad for w in weights]), grad.T @ x.detach())
    torch.testing.assert_close(torch.cat([b.grad for b in biases]), grad.sum(0))
    torch.testing.assert_close(x.grad, grad @ torch.cat([w.detach() for w in weights]))


def test_layers_with_one_input_give_what_each_gives_and_sum_its_gradient_without_an_addition():
    weights, biases, flat = make_layers()
    flat.refresh()
    x, grads = torch.randn(7, 5, requires_grad=True), torch.randn(2, 7, 6)
    outs = linears(x, [((weights[0],), (biases[0],)), ((weights[1],), ())])
    with torch.profiler.profile() as profile:
        torch.autograd.backward(outs, list(grads))
    assert not any(event.name == "aten::add" for event in profile.events())
    for out, weight, bias, grad in zip(outs, weights, (biases[0], 0), grads, strict=True):
        torch.testing.assert_close(out, F.linear(x, weight) + bias)
        torch.testing.assert_close(weight.grad, grad.T @ x.detach())
    torch.testing.assert_close(biases[0].grad, grads[0].sum(0))
    assert not biases[1].grad.any()
    torch.testing.assert_close(x.grad, grads[0] @ weights[0].detach() + grads[1] @ weights[1].detach())


@pytest.mark.parametrize("rows", [1, 2, 128, 129])
@pytest.mark.parametrize("threads", [1, 2])
def test_few_rows_are_multiplied_by_blocks_of_the_matrix_with_the_same_result(rows, threads, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    in_blocks, calls = products.product_in_blocks, []
    monkeypatch.setattr(products, "product_in_blocks", lambda *x: calls.append(len(x[0])) or in_blocks(*x))
    x, matrix, bias = (torch.randn(*size) for size in ((rows, 512), (192, 512), (192,)))
    expected = (x.double() @ matrix.double().T + bias).float()
    torch.testing.assert_close(product(x, matrix, bias), expected, rtol=1e-4, atol=1e-4)
    assert calls == ([rows] if rows == 1 or (rows <= 128 and threads > 1) else [])
    calls.clear()
    for uncut in (torch.zeros(200, 512), torch.zeros(64, 512), torch.zeros(512, 192).T):  # the last is not contiguous
        product(x[:, : uncut.shape[1]], uncut)
    assert not calls


def test_frozen_weights_get_no_gradient_and_pass_it_on():
    weights, biases, _ = make_layers(frozen=(0, 1, 2, 3))
    x = torch.randn(7, 5, requires_grad=True)
    linear(x, *weights, biases=tuple(biases)).sum().backward()
    assert all(p.grad is None for p in (*weights, *biases)) and x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_layer_is_held_once_in_the_compute_dtype(dtype):
    weights, biases, flat = make_layers(dtype, frozen=(0, 1, 2))
    assert [p.dtype for p in (*weights, biases[0])] == [dtype] * 3 and biases[1].dtype == torch.float32
    assert len(flat.masters) == len(flat.gradients) == 6, "one bias is trained"
    assert weights[0].copy.data_ptr() == weights[0].data_ptr()
    assert sum(flat.nbytes for flat in flat.weights) == 66 * dtype.itemsize + 6 * 4
    out = linear(torch.randn(3, 5, dtype=dtype), weights[0], biases=biases[:1])
    assert out.dtype == dtype and linear(torch.randn(3, 5, dtype=dtype), *weights).shape == (3, 12)


def test_a_frozen_encoder_costs_no_master_and_no_gradient(store, tokenizer):
    model = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16).freeze_all_but("decoder")
    whole = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16)
    held = sum(t.nbytes for t in (model.flat.masters, model.flat.copies, model.flat.gradients, *model.flat.frozen))
    trained = sum(p.numel() for p in model.decoder.parameters())
    frozen = sum(p.numel() for p in whole.parameters()) - trained
    norms_and_bias = SHAPE["d_model"] * 5 + 32 * SHAPE["num_heads"]
    assert held <= 10 * trained + 2 * (frozen + 64 * SHAPE["d_model"]) + 2 * norms_and_bias
    model(batch_of(store, [0, 1])).backward()
    assert model.flat.gradients.any() and model.shared.weight.grad is None


@pytest.mark.parametrize("spread", [False, True])
def test_relu_s_gradient_is_written_over_that_of_its_output_if_no_numbers_share_memory(spread):
    out, grad = torch.relu(torch.randn(6, 4)), torch.ones(1).expand(6, 4) if spread else torch.randn(6, 4)
    expected = torch.where(out > 0, grad, 0)
    found = relu_backward(grad, out)
    assert torch.equal(found, expected) and (found.data_ptr() == grad.data_ptr()) != spread
