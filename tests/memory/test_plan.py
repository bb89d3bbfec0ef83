"""The plan that is chosen from predictions alone, without a device."""

import numpy as np
import pytest
import torch

from bench.caps import HeavyTail
from config import MODELS, T5ModelConfig
from model.data.buckets import buckets_for
from model.data.length_histogram import Lengths, histogram
from model.memory.plan import PROBED_USABLE, USABLE, choose_plan, recording_bytes
from model.train.footprint import make_estimate
from tests.parts import make_config

GIB = 2**30
CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
HEAVY_TAIL = HeavyTail(512).lengths.astype(np.int64)  # of 2,048 pairs, one in twenty of 512 tokens a side


def test_steps_of_pairs_of_one_length_are_recorded_although_they_are_padded():
    lengths = Lengths(np.array([[70, 80]]), np.array([1000]))
    estimate = make_estimate(make_config(), CHATLM, torch.bfloat16, lengths, 3)
    plan = choose_plan(make_config(), estimate, 24 * GIB, asked=None)
    (bucket,) = buckets_for(lengths.tokens, 3, lengths.counts)
    assert plan.graphs and plan.micro_batch_tokens == bucket.tokens > 3 * 150


def heavy_tail(pairs, lengths=HEAVY_TAIL):
    """Estimate of chatlm with Adafactor on a fast GPU, `pairs` examples of `lengths` per step."""
    config = make_config(optimizer="adafactor")
    return make_estimate(config, CHATLM, torch.bfloat16, histogram(lengths), pairs, launch_tokens=33_000)


def test_checkpointing_is_not_used_for_cuda_graphs_that_replay_few_steps():
    """With 2 pairs per step, few steps fit a bucket, and all others would pay for the checkpointing."""
    for pairs, usable_gib, checkpointing in ((2, 2.8, False), (16, 3.4, True)):
        plan = choose_plan(make_config(), heavy_tail(pairs), int(usable_gib * GIB), asked=None)
        assert plan.graphs and plan.gradient_checkpointing == checkpointing


@pytest.mark.parametrize("calibration", [None, 0.93, 1.02])
def test_only_small_steps_are_recorded_if_cuda_graphs_of_all_would_not_fit(calibration):
    estimate, graph_bytes = heavy_tail(8), []
    for usable_gib in (3.2, 3.4, 8.0):
        plan = choose_plan(make_config(), estimate, int(usable_gib * GIB), None, calibration)
        graph_bytes.append(recording_bytes(estimate, plan))
        forward = estimate.step_peak(*plan.cutting) * (calibration or 1)
        assert forward / PROBED_USABLE + graph_bytes[-1] / USABLE <= usable_gib * GIB
    assert 0 < graph_bytes[0] < graph_bytes[1] <= graph_bytes[2], "more memory holds more CUDA graphs"
