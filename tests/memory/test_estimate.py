from dataclasses import replace

import numpy as np
import pytest
import torch

from config import MODELS
from model.commands.option_values import load_config
from model.commands.recipe import update_options, with_optimizer
from model.data.length_histogram import histogram
from model.data.packing import cut
from model.memory.estimate import Estimate, ForwardCostBound, fixed_bytes
from model.nn.lora import LoraConfig, attach
from model.nn.memory_spec import MemorySpec, count_numbers
from model.nn.t5.family import T5
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.train.optim import make_optimizer

TINY = T5ModelConfig(**MODELS["tiny"], vocab_size=500)

SMALL = T5ModelConfig(**MODELS["small"], vocab_size=40_960)

BF16 = with_optimizer(MemorySpec(T5, SMALL, 2, kernels=True), "adamw_rms")


ADAPTER = LoraConfig(rank=4, alpha=8, targets=("q", "wo"))


def draw_lengths(num_examples, seed=0, longest=512):
    draw = np.random.default_rng(seed)
    return np.minimum(draw.geometric(0.02, (num_examples, 2)) + 1, longest)


def test_no_micro_batch_costs_more_than_the_bound():
    lengths = draw_lengths(3000)
    cost = 3.0 * lengths[:, 0] + 5.0 * lengths[:, 1] + 0.01 * lengths[:, 1] ** 2
    kinds = histogram(lengths)
    by_kind = 3.0 * kinds.tokens[:, 0] + 5.0 * kinds.tokens[:, 1] + 0.01 * kinds.tokens[:, 1] ** 2
    worst, draw = ForwardCostBound(by_kind, kinds, 64), np.random.default_rng(1)
    highest = 0.0
    for limit in (600, 2000, 10_000):
        shares = [np.argsort(-cost)[:64], np.argsort(-lengths[:, 1])[:64]]
        shares += [draw.choice(3000, 64, replace=False) for _ in range(100)]
        for share in shares:
            for part in cut(share, lengths[share], limit):
                if lengths[part].sum() <= limit:
                    assert cost[part].sum() <= worst(limit) * 1.000001
                    highest = max(highest, cost[part].sum() / worst(limit))
    assert highest > 0.9, "a bound that far off is of no use"


def test_the_estimate_for_the_longest_responses_is_that_of_those_examples():
    lengths = draw_lengths(3000).astype(np.int64)
    estimate = Estimate(BF16, histogram(lengths), 64)
    longest = lengths[np.lexsort((-lengths.sum(axis=1), -lengths[:, 1]))]
    for count in (20, 64):
        own = Estimate(BF16, histogram(longest[:count]), count)
        batching = int(longest[:count].sum()), 512, False
        assert estimate.of_longest_targets.step_peak(*batching) == pytest.approx(own.step_peak(*batching), rel=1e-6)
        assert estimate.of_longest_targets.step_peak(*batching) <= estimate.step_peak(*batching)


@pytest.mark.parametrize("checkpointing", (0, 12))
def test_the_peak_grows_with_the_micro_batch_and_with_the_chunk(checkpointing):
    estimate = Estimate(BF16, histogram(draw_lengths(3000)), 1000)
    peaks = [estimate.step_peak(tokens, 2048, checkpointing) for tokens in range(1024, 100_000, 1024)]
    assert peaks == sorted(peaks) and peaks[-1] > peaks[0]
    assert estimate.step_peak(50_000, 128, checkpointing) <= estimate.step_peak(50_000, 2048, checkpointing)


def test_checkpointing_bf16_adafactor_and_a_frozen_encoder_are_predicted_to_save_memory():
    lengths = histogram(draw_lengths(3000))

    def peak(checkpointing=0, **changes):
        return Estimate(replace(BF16, **changes), lengths, 1000).step_peak(100_000, 2048, checkpointing)

    assert peak(checkpointing=12) < peak() / 2
    assert peak() < peak(number_bytes=4, kernels=False)
    assert peak(state_bytes=0) < peak() - 7 * count_numbers(T5, SMALL).weights
    frozen = count_numbers(T5, SMALL).weights - count_numbers(T5, SMALL, "decoder").weights
    assert peak(part="decoder") < peak() - 16 * frozen


def test_the_fixed_bytes_are_weights_gradients_optimizer_state_and_bf16_copies():
    count = count_numbers(T5, SMALL).weights
    assert fixed_bytes(BF16) | dict(workspaces=0) == dict(
        weights=4 * count, bf16_weights=2 * count, gradients=4 * count, optimizer=8 * count, workspaces=0
    )


@pytest.mark.parametrize("name", ("adamw_rms", "muon"))
@pytest.mark.parametrize("part", ("all", "decoder"))
def test_the_predicted_optimizer_state_is_what_the_optimizer_holds(name, part):
    shape = T5ModelConfig(d_model=64, d_ff=128, num_heads=3, d_kv=16, num_layers=2, num_decoder_layers=3, vocab_size=64)
    model = TextToTextModel(shape).freeze_all_but(part)
    optimizer = make_optimizer(model, load_config("pretrain", dict(optimizer=name)))
    held = sum(t.nbytes for fields in optimizer.state.values() for t in fields.values() if t.numel() > 1)
    assert with_optimizer(MemorySpec(T5, shape, 4, False, part=part), name).state_bytes == held


def test_every_phase_has_a_peak_and_loading_has_the_smallest():
    peaks = Estimate(BF16, histogram(draw_lengths(300)), 64).peaks(8192, 1024, False)
    assert set(peaks) == {"load", "first_step", "step", "evaluation", "generation", "save"}
    assert min(peaks, key=peaks.get) == "load" and max(peaks, key=peaks.get) in ("step", "first_step")


@pytest.mark.parametrize("num_ranks", (2, 3))
@pytest.mark.parametrize("name, lora", (("adamw", None), ("muon", None), ("adamw", ADAPTER)))
def test_the_predicted_bytes_of_a_rank_that_shares_state_are_those_that_the_largest_part_holds(name, lora, num_ranks):
    shape = T5ModelConfig(d_model=64, d_ff=128, num_heads=4, d_kv=16, num_layers=2, num_decoder_layers=3, vocab_size=64)
    config, held = load_config("pretrain", dict(optimizer=name, share_state="True")), []
    for rank in range(num_ranks):
        model = TextToTextModel(shape, compute_dtype=torch.bfloat16)
        model = attach(model, lora) if lora else model
        state = make_optimizer(model, update_options(config), (rank, num_ranks)).state.values()
        tensors = [t for fields in state for t in fields.values() if t.numel() > 1]
        held.append((4 * model.flat.masters.numel(), sum(t.nbytes for t in tensors)))
        assert model.flat.masters.untyped_storage().nbytes() == 4 * model.flat.masters.numel()
    spec = with_optimizer(MemorySpec(T5, shape, 2, False, lora=lora), name, num_ranks)
    predicted = fixed_bytes(spec)
    assert (predicted["weights"] - spec.frozen_bytes, predicted["optimizer"]) == tuple(
        max(column) for column in zip(*held, strict=True)
    )
    assert predicted["bf16_weights"] == 2 * spec.trained and predicted["gradients"] == 4 * spec.trained
