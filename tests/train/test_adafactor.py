"""Our Adafactor against its formula and against torch's."""

import pytest
import torch

from model.nn.flat_params import FlatParams
from model.train.optim import Adafactor, update


def naive_adafactor(p, grads, rates, decay):
    """Adafactor (Shazeer and Stern 2018, algorithms 4 and 5) of one tensor, written down number by number."""
    rows = columns = squares = 0.0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        kept = 1 - t**-0.8
        squares = kept * squares + (1 - kept) * g**2
        if g.dim() == 2:
            rows = kept * rows + (1 - kept) * (g**2).mean(1)
            columns = kept * columns + (1 - kept) * (g**2).mean(0)
        direction = g / (torch.outer(rows, columns) / rows.mean() if g.dim() == 2 else squares).sqrt()
        direction /= max(1.0, direction.square().mean().sqrt().item())
        p = p - rate * decay * p - rate * max(1e-3, p.square().mean().sqrt().item()) * direction
    return p


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_twenty_steps_of_adafactor_are_those_of_the_formula(decay):
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 5), (11,), (11,), (3, 2), (4, 6), (4, 6), (6, 4)]  # neighbours of one shape are one batch
    starts = [10.0 ** -(i % 4) * torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)]
    grads = [[torch.randn(shape, generator=generator) for _ in range(20)] for shape in shapes]
    rates = [0.01 * (1 + step % 3) for step in range(20)]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = Adafactor(FlatParams(params[:4], params[4:], params[0], torch.float32), torch.tensor(0.0), decay)
    assert len(optimizer.batches) == 5
    for step, rate in enumerate(rates):
        for p, history in zip(params, grads, strict=True):
            p.grad.copy_(4 * history[step])
        update(optimizer, None, torch.tensor(rate), torch.tensor(0.25))
    for p, start, history in zip(params, starts, grads, strict=True):
        expected = naive_adafactor(start, history, rates, decay)
        assert (p - expected).norm() < 1e-4 * (expected - start).norm()


def test_adafactor_is_torch_s_while_that_obeys_the_rate():
    start, grads = torch.randn(12, 8), [torch.randn(12, 8) for _ in range(9)]
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = Adafactor(FlatParams([], [ours], None, torch.float32), torch.tensor(0.0))
    reference = torch.optim.Adafactor([theirs], 0.1)
    for grad in grads:
        ours.grad.copy_(grad)
        update(optimizer, None, torch.tensor(0.1), torch.tensor(1.0))
        theirs.grad = grad
        reference.step()
    assert (ours - theirs).norm() < 1e-5 * (theirs - start).norm()


def test_adafactor_leaves_a_row_without_gradients_alone():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = Adafactor(FlatParams([], [weight], None, torch.float32), torch.tensor(0.0))
    for step in range(3):
        weight.grad.copy_(torch.tensor([[1.0, 2.0], [0.0, 0.0], [float(step), 0.0]]))
        update(optimizer, None, torch.tensor(0.1), torch.tensor(1.0))
    assert weight.isfinite().all() and (weight[1] == 1).all() and (weight[0] < 1).all()
