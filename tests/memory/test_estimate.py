from dataclasses import replace

import numpy as np
import pytest
import torch

from config import MODELS, T5ModelConfig, load_config
from model.data.length_histogram import histogram
from model.data.packing import cut
from model.memory.estimate import Estimate, ForwardCostBound, fixed_bytes, optimizer_bytes
from model.nn.attention import make_layout, round_up
from model.nn.t5.batch import MicroBatch
from model.nn.t5.footprint import MemorySpec, count_parameters, step_moments
from model.nn.t5.network import TextToTextModel
from model.train.optim import make_optimizer
from tests.parts import make_model

TINY = T5ModelConfig(**MODELS["tiny"], vocab_size=500)
SMALL = T5ModelConfig(**MODELS["small"], vocab_size=40_960)
BF16 = MemorySpec(SMALL, 2, kernels=True)


def draw_lengths(num_examples, seed=0, longest=512):
    draw = np.random.default_rng(seed)
    return np.minimum(draw.geometric(0.02, (num_examples, 2)) + 1, longest)


def test_parameters_are_counted_as_the_model_has_them():
    model = make_model(500)
    assert count_parameters(model.config) == sum(p.numel() for p in model.parameters())
    model.freeze_all_but_decoder()
    assert count_parameters(model.config, decoder_only=True) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


@pytest.mark.parametrize("prompt, response", ((48, 48), (64, 128), (128, 24)))
def test_what_is_kept_for_backward_is_counted_to_within_a_hundredth(prompt, response):
    """Against the tensors that autograd really saves on a CPU, where RMSNorm keeps two more than on a GPU."""
    num_examples, model = 4, make_model(500)
    shape = model.config
    kept = saved_bytes(model, num_examples, prompt, response)
    layers = 2 * shape.num_layers * prompt + 3 * shape.num_decoder_layers * response + prompt + response
    kept -= 2 * num_examples * layers * 4 * shape.d_model
    spec = MemorySpec(shape, 4, kernels=False)
    moment = step_moments(spec, np.array([[prompt, response]]), checkpointing=False)["loss"][0]
    # held without being saved for backward: the position bias, ids, what the loss reads and its gradient; and of the
    # decoder's last norm the CPU keeps no output
    moment -= 4 * shape.num_heads * (round_up(prompt) ** 2 + round_up(response) ** 2) + 24 * (prompt + response)
    moment -= 3 * 4 * shape.d_model * response
    assert num_examples * moment == pytest.approx(kept, rel=0.01)


def saved_bytes(model, num_examples, prompt, response):
    """Bytes of the distinct storages that autograd saves in one forward, weights and layouts left out."""
    prompts, responses = np.full(num_examples, prompt), np.full(num_examples, response)
    micro_batch = MicroBatch(
        *(torch.zeros(num_examples * length, dtype=torch.long) for length in (prompt, response, response)),
        make_layout(prompts, prompts),
        make_layout(responses, responses),
        make_layout(responses, prompts),
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.decode(micro_batch)
    return sum(count for count, _ in seen.values())


def test_no_micro_batch_of_a_run_costs_more_than_the_worst_forward():
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


def test_a_forward_of_the_longest_responses_is_counted_as_those_examples():
    lengths = draw_lengths(3000).astype(np.int64)
    estimate = Estimate(BF16, histogram(lengths), 64)
    longest = lengths[np.lexsort((-lengths.sum(axis=1), -lengths[:, 1]))]
    for count in (20, 64):
        own = Estimate(BF16, histogram(longest[:count]), count)
        cutting = int(longest[:count].sum()), 512, False
        assert estimate.of_longest_responses.step_peak(*cutting) == pytest.approx(own.step_peak(*cutting), rel=1e-6)
        assert estimate.of_longest_responses.step_peak(*cutting) <= estimate.step_peak(*cutting)


@pytest.mark.parametrize("checkpointing", (False, True))
def test_the_peak_grows_with_the_micro_batch_and_with_the_chunk(checkpointing):
    estimate = Estimate(BF16, histogram(draw_lengths(3000)), 1000)
    peaks = [estimate.step_peak(tokens, 2048, checkpointing) for tokens in range(1024, 100_000, 1024)]
    assert peaks == sorted(peaks) and peaks[-1] > peaks[0]
    assert estimate.step_peak(50_000, 128, checkpointing) <= estimate.step_peak(50_000, 2048, checkpointing)


def test_checkpointing_bf16_adafactor_and_a_frozen_encoder_are_predicted_to_save_memory():
    lengths = histogram(draw_lengths(3000))

    def peak(checkpointing=False, **changes):
        return Estimate(replace(BF16, **changes), lengths, 1000).step_peak(100_000, 2048, checkpointing)

    assert peak(checkpointing=True) < peak() / 2
    assert peak() < peak(number_bytes=4, kernels=False)
    assert peak(optimizer="adafactor") < peak() - 7 * count_parameters(SMALL)
    assert peak(decoder_only=True) < peak() - 12 * (count_parameters(SMALL) - count_parameters(SMALL, True))


def test_the_fixed_part_is_weights_gradients_optimizer_and_the_bf16_copy():
    count = count_parameters(SMALL)
    assert fixed_bytes(BF16) | dict(workspaces=0) == dict(
        weights=4 * count, bf16_weights=2 * count, gradients=4 * count, optimizer=8 * count, workspaces=0
    )


@pytest.mark.parametrize("name", ("adamw_rms", "muon"))
@pytest.mark.parametrize("decoder_only", (False, True))
def test_the_state_that_is_counted_is_what_the_optimizer_holds(name, decoder_only):
    shape = T5ModelConfig(d_model=64, d_ff=128, num_heads=3, d_kv=16, num_layers=2, num_decoder_layers=3, vocab_size=64)
    model = TextToTextModel(shape)
    if decoder_only:
        model.freeze_all_but_decoder()
    optimizer = make_optimizer(model, load_config("pretrain", dict(optimizer=name)))
    held = sum(t.nbytes for fields in optimizer.state.values() for t in fields.values() if t.numel() > 1)
    counted, _ = optimizer_bytes(MemorySpec(shape, 4, False, name, decoder_only=decoder_only))
    assert counted == held


def test_every_phase_has_a_peak_and_loading_is_the_smallest():
    peaks = Estimate(BF16, histogram(draw_lengths(300)), 64).peaks(8192, 1024, False)
    assert set(peaks) == {"load", "first_step", "step", "evaluation", "generation", "save"}
    assert min(peaks, key=peaks.get) == "load" and max(peaks, key=peaks.get) in ("step", "first_step")


def test_examples_counted_in_parts_are_those_counted_at_once(monkeypatch):
    draw = np.random.default_rng(0).integers(1, 9, (1000, 2)).astype("uint16")
    whole = histogram(draw)
    monkeypatch.setattr("model.data.length_histogram.PART", 7)
    parts = histogram(draw)
    assert np.array_equal(parts.tokens, whole.tokens) and np.array_equal(parts.counts, whole.counts)
    assert whole.counts.sum() == 1000 and whole.longest == draw.sum(axis=1).max()
