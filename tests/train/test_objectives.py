"""An objective may draw other lengths in each epoch, and have loss sums with a divisor each."""

import numpy as np
import pytest
import torch

from model.memory.plan import MemoryPlan
from model.nn.loss_terms import LossTerms
from model.runtime.distributed import ALONE
from model.train.gradients import attempt_gradients
from model.train.loader import Loader
from model.train.step import StepContext
from tests.parts import (
    examples_in,
    farthest,
    gradients_of,
    make_config,
    make_model,
    make_pairs,
    open_pairs,
    schedule_of,
    write_parquet,
)
from tests.tenants.drawn import Drawn

NUM_PAIRS = 24


@pytest.fixture(scope="module")
def examples(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("drawn")
    store = open_pairs(write_parquet(folder / "pairs.parquet", make_pairs(NUM_PAIRS)), tokenizer, 64, folder)
    return examples_in(store, objective=Drawn(), seed=3)


def test_lengths_are_drawn_anew_in_each_epoch_and_stay_within_the_bounds_of_the_plan(examples):
    ids = np.arange(NUM_PAIRS)
    first, again, second = (examples.lengths(ids, epoch) for epoch in (1, 1, 2))
    assert (first == again).all() and (first != second).any()
    for lengths, epoch in ((first, 1), (second, 2)):
        assert ((lengths > 0) & (lengths <= examples.bounds)).all()
        assert (examples.sequences(ids, epoch).lengths == lengths).all()
    assert examples.histogram.longest >= max(first.sum(axis=1).max(), second.sum(axis=1).max())


@pytest.mark.parametrize("micro_batch_tokens", [60, 200])
def test_two_loss_sums_with_a_divisor_each_have_one_gradient_however_the_step_is_cut(
    examples, tokenizer, micro_batch_tokens
):
    config = make_config()
    model = make_model(tokenizer.vocab_size)
    loader = Loader(ALONE, examples, schedule_of(config, 4 * NUM_PAIRS, NUM_PAIRS))
    work = loader.work_at(1, NUM_PAIRS)  # the second epoch
    tokens = int(examples.lengths(work.all_ids, 2)[:, 1].sum())
    assert work.epoch == 2 and work.loss_weights == (tokens, NUM_PAIRS)

    model.zero_grad()
    for row in work.all_ids:
        batch = examples.batch(np.array([row]), 2)
        loss = model.cross_entropy(batch)[0]
        penalty = model.cross_entropy(batch, 2048, LossTerms(0.1))[0] - loss
        (loss / tokens + penalty / NUM_PAIRS).backward()
    alone = gradients_of(model)

    plan = MemoryPlan(micro_batch_tokens, 32, False, 0)
    attempt = attempt_gradients(StepContext(ALONE, model, None, loader, config), plan, work)
    assert attempt.micro_batches > 1
    assert farthest(gradients_of(model), alone) < 1e-5
    assert torch.isfinite(model.flat.sums[:2]).all() and (model.flat.sums[:2] > 0).all()
