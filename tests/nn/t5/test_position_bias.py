import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from model.nn.activations import _no_bias
from model.nn.quantized import levels_on, steps_on
from model.nn.t5.position_bias import _distance_buckets, position_buckets


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (16, 64), (64, 512)])
def test_position_buckets_are_those_of_transformers(bidirectional, num_buckets, max_distance):
    distance = torch.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(position_buckets(distance, num_buckets, max_distance, bidirectional), theirs)


def test_what_is_kept_between_calls_may_be_saved_for_backward_whoever_made_it_first():
    cpu = torch.device("cpu")
    with torch.inference_mode():
        kept = [
            _distance_buckets.__wrapped__(32, 128, True, cpu), _no_bias.__wrapped__(8, torch.float32, cpu),
            levels_on.__wrapped__(cpu), steps_on.__wrapped__(cpu),
        ]  # fmt: skip
    assert not any(tensor.is_inference() for tensor in kept)
