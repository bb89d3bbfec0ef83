"""The end of a step between real ranks: sums that overflow or are sent in bf16."""

import math
from types import SimpleNamespace

import pytest
import torch

from model.nn import gradient_parts
from model.runtime.distributed import start_ranks, stop_ranks
from model.train import reduction
from model.train.commit import NOT_FINITE, reduce_and_update
from model.train.gradients import Attempt, Outcome, _norms
from model.train.optim import make_optimizer
from model.train.reduction import sum_gradients
from tests.parts import make_config, make_model
from tests.ranks import run_ranks


def steps_that_are_not_finite():
    """Steps of two ranks that are skipped and name the right rank; 0, else the number of the first that does not."""
    ranks, model = start_ranks("gloo", 60), make_model(100)
    weights, work = model.flat.masters.clone(), SimpleNamespace(step=1, learn_rate=0.1)
    optimizer = make_optimizer(model, make_config())
    context = SimpleNamespace(ranks=ranks, model=model, optimizer=optimizer, options=make_config())
    of_one = [1.0, math.inf]
    cases = ("gradients", [1.5e19] * 2, None), ("gradients", of_one, 1), ("sums", of_one, 1)  # the first sum overflows
    for number, (name, of_ranks, rank) in enumerate(cases, start=1):
        model.zero_grad()
        getattr(model.flat, name)[0] = of_ranks[ranks.rank]
        updated = reduce_and_update(context, Attempt(Outcome.OK, norms=_norms(context)), work, math.inf)
        if (updated.skipped, updated.rank) != (NOT_FINITE, rank) or not torch.equal(weights, model.flat.masters):
            return number
    stop_ranks()
    return 0


def test_a_step_that_is_not_finite_is_skipped_and_names_the_rank_whose_own_numbers_are_not(tmp_path):
    done = run_ranks(2, steps_that_are_not_finite, folder=tmp_path)
    assert done.codes == [0, 0], done.text


def sum_in_parts(reduce_dtype):
    """Ranks that send gradients in several parts, in bf16 in pieces; 0 if the sum is that of what is sent, else 3."""
    gradient_parts.LEAST_NUMBERS, reduction.PIECE_NUMBERS = 1, 1000
    ranks, model, dtype = start_ranks("gloo", 60), make_model(100), getattr(torch, reduce_dtype.replace("bf", "bfloat"))
    flat = model.flat
    of_ranks = [torch.randn(flat.gradients.shape, generator=torch.manual_seed(r)) for r in range(ranks.world_size)]
    for _ in range(2):
        flat.gradients.copy_(of_ranks[ranks.rank])
        flat.sums.fill_(1.001 + ranks.rank)  # metrics are sent in float32
        sum_gradients(ranks, model, reduce_dtype)
    stop_ranks()
    expected = sum(part.to(dtype).float() for part in of_ranks).to(dtype).float()
    metrics = torch.full_like(flat.sums, sum(1.001 + rank for rank in range(ranks.world_size)))
    is_near = (expected - sum(of_ranks)).norm() < 0.003 * sum(of_ranks).norm()
    is_sum = torch.equal(flat.gradients, expected) and torch.allclose(flat.sums, metrics)
    return 0 if is_sum and is_near and len(model.gradient_parts) > 1 else 3


@pytest.mark.parametrize("world, reduce_dtype", [(2, "bf16"), (3, "bf16"), (2, "float32")])
def test_parts_are_summed_in_float32_with_equal_bits_on_all_ranks_also_where_they_are_sent_in_bf16(
    tmp_path, world, reduce_dtype
):
    done = run_ranks(world, sum_in_parts, reduce_dtype, folder=tmp_path)
    assert done.codes == [0] * world, done.text
