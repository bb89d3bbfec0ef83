"""The expected time of a step is near what was measured on H100s and H200s."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.data.length_histogram import histogram
from model.memory.duration import GPUS, gpu_named, step_seconds
from model.memory.plan import choose_plan
from model.nn.registry import load_model_config
from tests.parts import make_estimate
from tests.sizes import VOCAB_SIZE, draw_lengths

GIB = 2**30
LENGTHS = histogram(draw_lengths(20_000, np.random.default_rng(0)))
LAUNCH_TOKENS = 132 * 250  # of an H100
MEASURED = {  # tokens a second, docs/benchmarks.md
    "H100": {"small": {64: 884e3, 256: 1406e3, 1024: 1693e3}, "chatlm": {64: 365e3, 256: 565e3, 512: 620e3}},
    "H200": {"small": {64: 949e3, 256: 1505e3, 1024: 1769e3}, "chatlm": {64: 384e3, 256: 584e3, 512: 644e3}},
}
CASES = [(gpu, model, pairs) for gpu, models in MEASURED.items() for model, known in models.items() for pairs in known]


def predicted(gpu, model, pairs, dtype=torch.bfloat16, **options):
    config = load_config("pretrain", dict(model=model, validation_file="", **options))
    sizes = replace(load_model_config(model), vocab_size=VOCAB_SIZE)
    estimate = make_estimate(config, sizes, dtype, LENGTHS, pairs, LAUNCH_TOKENS)
    plan = choose_plan(plan_options(config), estimate, 70 * GIB, True)
    return step_seconds(plan, estimate, GPUS[gpu])


@pytest.mark.parametrize(("gpu", "model", "pairs"), CASES)
def test_the_expected_time_is_near_the_measured_one(gpu, model, pairs):
    measured = pairs * LENGTHS.mean / MEASURED[gpu][model][pairs]
    assert predicted(gpu, model, pairs) == pytest.approx(measured, rel=0.10)


def test_a_slower_card_and_checkpointing_take_longer_and_float32_is_not_predicted():
    fast, slow = predicted("H100", "small", 64), predicted("RTX 3090", "small", 64)
    assert slow > 4 * fast
    assert predicted("RTX 3090", "small", 64, gradient_checkpointing="True") > 1.1 * slow
    assert predicted("H100", "small", 64, torch.float32) is None


def test_cards_are_known_by_the_names_that_torch_and_people_give_them():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "l4")
    assert [gpu_named(name)[0] for name in names] == ["H100", "H100 PCIe", "A100", "RTX 4090", "L4"]
    others = ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "")
    assert all(gpu_named(name) is None for name in others)
