import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from model.nn.t5.position_bias import position_buckets


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (16, 64), (64, 512)])
def test_position_buckets_are_those_of_transformers(bidirectional, num_buckets, max_distance):
    distance = torch.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(position_buckets(distance, num_buckets, max_distance, bidirectional), theirs)
