"""Which micro-batches a step is cut into, and which of them are padded to a bucket."""

from dataclasses import replace

import numpy as np
import pytest

from model.data.buckets import Bucket
from model.train.loader import Loader
from tests.parts import ALONE, PLAN, examples_in, make_config, schedule_of

SMALL, LARGE = Bucket((64, 128), 4), Bucket((128, 192), 4)


@pytest.mark.parametrize(
    "tokens, most_tokens, bucket",
    [(16, 320, SMALL), (16, 192, SMALL), (16, 191, None), (32, 319, None), (32, 320, LARGE)],
)
def test_a_step_is_recorded_only_up_to_the_tokens_of_the_plan(store, tokens, most_tokens, bucket):
    loader = Loader(ALONE, examples_in(store), schedule_of(make_config(), 60, 4))
    vars(loader)["buckets"] = [SMALL, LARGE]
    plan = replace(PLAN, micro_batch_tokens=most_tokens)
    assert loader._bucket_of(np.full((4, 2), tokens), plan) == bucket


def test_a_step_of_several_micro_batches_is_not_padded(store):
    loader = Loader(ALONE, examples_in(store), schedule_of(make_config(), 60, 16))
    work = loader.work_at(0, 0)
    for tokens in (10**6, 200):
        plan = replace(PLAN, micro_batch_tokens=tokens, graphs=True)
        packed = loader.pack(work, replace(plan, graphs=False))
        assert packed.bucket is None
        assert (len(packed.micro_batches) == 1) == (tokens == 10**6)
    assert loader.pack(work, plan).bucket is None
