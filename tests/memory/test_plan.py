"""The plan that is chosen from predictions alone, without a device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from config import MODELS
from model.commands.recipe import plan_options
from model.data.buckets import buckets_for
from model.data.length_histogram import Lengths, histogram
from model.memory.estimate import Estimate
from model.memory.plan import (
    CHUNKS,
    PROBED_USABLE,
    USABLE,
    NothingFits,
    Room,
    choose_plan,
    fitting_plan,
    graph_bytes,
)
from model.memory.step_time import time_factor
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.t5.sizes import T5ModelConfig
from tests.parts import make_config, make_estimate
from tests.sizes import QWEN_VOCAB_SIZE, QWENS, HeavyTail

GIB = 2**30


SMALL = T5ModelConfig(**MODELS["small"], vocab_size=8192)


CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)


QWEN_7B = DecoderModelConfig(**QWENS["qwen1.5-7b"], vocab_size=QWEN_VOCAB_SIZE)


def heavy_tailed(longest=512, num_examples=2000):
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.geometric(0.02, (num_examples, 2)) + 1, longest)
    lengths[: num_examples // 20] = longest
    return histogram(lengths)


def estimate_of(shape=SMALL, lengths=None, share_pairs=64, dtype=torch.bfloat16, **options):
    return make_estimate(make_config(**options), shape, dtype, lengths or heavy_tailed(), share_pairs)


def choose(usable_gib, shape=SMALL, share_pairs=64, calibration=None, lengths=None, **options):
    usable_bytes = None if usable_gib is None else int(usable_gib * GIB)
    estimate = estimate_of(shape, lengths, share_pairs, **options)
    return choose_plan(plan_options(make_config(**options)), estimate, usable_bytes, calibration=calibration)


def test_with_plenty_of_memory_a_share_is_one_forward():
    plan = choose(80)
    assert (plan.micro_batch_tokens, plan.gradient_checkpointing) == (64 * 1024, False)
    assert choose(80, share_pairs=1).micro_batch_tokens == 1024
    assert choose(1000, share_pairs=10**6).micro_batch_tokens < 10**6


def test_examples_of_one_length_are_planned_in_whole_numbers():
    """A forward that is as large as an example and a half holds one: what it could hold beside is not counted."""
    lengths, planned = Lengths(np.array([[1024, 1024]]), np.array([64])), set()
    estimate = estimate_of(CHATLM, lengths, share_pairs=8)
    assert estimate.step_peak(3776, 512, 0) == estimate.step_peak(2048, 512, 0) < estimate.step_peak(4096, 512, 0)
    for gib in (4.0, 5.0, 6.0, 7.0, 8.0, 12.0):
        plan = choose(gib, CHATLM, 8, lengths=lengths)
        assert plan.micro_batch_tokens % 2048 == 0 and plan.predicted_peak_bytes <= gib * GIB
        planned.add(plan.micro_batch_tokens)
    assert len(planned) > 2


@pytest.mark.parametrize("shape", (SMALL, CHATLM), ids=("small", "chatlm"))
def test_a_plan_fits_the_memory_and_holds_its_predicted_peak(shape):
    plans = [choose(gib, shape, share_pairs=512, optimizer="adafactor") for gib in (4, 8, 12, 20, 40)]
    for gib, plan in zip((4, 8, 12, 20, 40), plans, strict=True):
        estimate = estimate_of(shape, share_pairs=512, optimizer="adafactor")
        assert plan.predicted_peak_bytes == estimate.step_peak(*plan.batching) <= gib * GIB * USABLE * (1 + 1 / 64)
    factors = [round(time_factor(plan, estimate), 6) for plan in plans]
    assert factors == sorted(factors, reverse=True)


def test_a_micro_batch_just_below_a_multiple_of_the_longest_example_is_raised_to_it():
    estimate = estimate_of(CHATLM, heavy_tailed(), 16, optimizer="adafactor")
    for tokens, taken in ((2048 - 40, 2048), (2048 + 300, None), (3 * 1024 - 6, 3 * 1024)):
        plan = fitting_plan(Room(estimate, estimate.step_peak(tokens, 512, False)), 16 * 1024, 512, False)
        assert plan.micro_batch_tokens == taken or (taken is None and plan.micro_batch_tokens <= tokens)


def test_launch_time_decides_between_more_forwards_and_checkpointing():
    estimate = estimate_of(CHATLM, heavy_tailed(), 160, optimizer="adafactor")
    plans = {}
    for launch_tokens in (2000, 40_000):  # a small card; one that computes as fast as it is launched
        spec = replace(estimate.spec, launch_tokens=launch_tokens)
        plans[launch_tokens] = choose_plan(plan_options(make_config()), Estimate(spec, estimate.lengths, 160), 4 * GIB)
    few, many = (estimate.forwards(plans[tokens].micro_batch_tokens) for tokens in (40_000, 2000))
    assert plans[2000].gradient_checkpointing == 0 < plans[40_000].gradient_checkpointing
    assert few < 1.5 < 3 < many


def test_the_predicted_number_of_forwards_is_the_mean_over_random_shares():
    draw, lengths, pairs = np.random.default_rng(0), heavy_tailed(), 32
    drawn = draw.choice(np.repeat(lengths.tokens.sum(axis=1), lengths.counts), (20_000, pairs)).sum(axis=1)
    estimate = estimate_of(lengths=lengths, share_pairs=pairs)
    for tokens in (2000, 4000, 8000, 12_000):
        assert estimate.forwards(tokens) == pytest.approx(np.ceil(drawn / tokens).mean(), rel=0.05)
    alike = estimate_of(lengths=histogram(np.full((100, 2), 50)), share_pairs=10)
    assert [alike.forwards(tokens) for tokens in (999, 1000, 500, 333)] == [2, 1, 2, 4]


def test_a_probe_that_measures_more_than_predicted_makes_the_plan_smaller():
    plain, calibrated = choose(4, share_pairs=512), choose(4, share_pairs=512, calibration=1.3)
    assert calibrated.predicted_peak_bytes * 1.3 <= 4 * GIB * PROBED_USABLE
    assert calibrated.predicted_peak_bytes < plain.predicted_peak_bytes


def test_a_given_micro_batch_is_the_one_used():
    for tokens in (1024, 5000, 30_000):
        for gib in (None, 40, 80):
            assert choose(gib, micro_batch_tokens=tokens).micro_batch_tokens == tokens


@pytest.mark.parametrize("gib", [None, 80])
def test_a_micro_batch_below_the_longest_example_is_refused(gib):
    with pytest.raises(ValueError, match="micro_batch_tokens=511.*longest example has 1024 tokens"):
        choose(gib, micro_batch_tokens=511)


def test_no_more_blocks_are_checkpointed_than_the_memory_needs():
    long = Lengths(np.array([[12_000, 12_000]]), np.array([1000]))
    numbers, estimate = [], estimate_of(lengths=long, share_pairs=1)
    for gib in (1.6, 2, 2.4, 2.8, 3.2, 6):
        plan = choose(gib, lengths=long, share_pairs=1)
        numbers.append(plan.gradient_checkpointing)
        if numbers[-1]:
            tokens, chunk, number = plan.batching
            assert estimate.step_peak(tokens, chunk, number) <= gib * GIB * USABLE
            assert estimate.step_peak(tokens, chunk, number - 1) > gib * GIB * USABLE
    assert len(set(numbers)) > 3 and numbers[-1] == 0, numbers


def test_checkpointing_is_chosen_only_if_nothing_fits_without_it():
    assert not choose(80).gradient_checkpointing
    assert choose(80, gradient_checkpointing="True").gradient_checkpointing == 12
    long = heavy_tailed(longest=20_000)
    estimate = estimate_of(lengths=long)
    plain, again = (estimate.step_peak(40_000, CHUNKS[-1], checkpointing) / GIB / USABLE for checkpointing in (0, 12))
    between = (plain + again) / 2
    assert choose(between, lengths=long).gradient_checkpointing
    with pytest.raises(NothingFits):
        choose(between, lengths=long, gradient_checkpointing="False")


def test_a_model_that_cannot_fit_is_refused_with_numbers():
    with pytest.raises(NothingFits) as refusal:
        choose(2, CHATLM, optimizer="adamw_rms")
    text = str(refusal.value)
    assert "and 2.00 GiB are there" in text and "optimizer 1.4" in text
    assert "--max_seq_len (now 256)" in text and "--optimizer=adafactor" in text


def test_micro_batches_on_a_cpu_are_moderate():
    plan = choose(None, share_pairs=10**4)
    assert 1024 <= plan.micro_batch_tokens <= 16_384
    assert not plan.gradient_checkpointing


HEAVY_TAIL = HeavyTail(512).lengths.astype(np.int64)  # of 2,048 pairs, one in twenty of 512 tokens a side


def test_steps_of_pairs_of_one_length_are_recorded_although_they_are_padded():
    lengths = Lengths(np.array([[70, 80]]), np.array([1000]))
    estimate = make_estimate(make_config(), CHATLM, torch.bfloat16, lengths, 3)
    plan = choose_plan(plan_options(make_config()), estimate, 24 * GIB, asked=None)
    (bucket,) = buckets_for(lengths.tokens, 3, lengths.counts)
    assert plan.graphs and plan.micro_batch_tokens == bucket.tokens > 3 * 150


def heavy_tail(pairs, lengths=HEAVY_TAIL):
    """Estimate of chatlm with Adafactor on a fast GPU, `pairs` examples of `lengths` per step."""
    config = make_config(optimizer="adafactor")
    return make_estimate(config, CHATLM, torch.bfloat16, histogram(lengths), pairs, launch_tokens=33_000)


def test_checkpointing_is_not_used_for_cuda_graphs_that_replay_few_steps():
    """With 2 pairs per step, few steps fit a bucket, and all others would pay for the checkpointing."""
    for pairs, usable_gib, checkpointing in ((2, 2.5, False), (16, 2.8, True)):
        plan = choose_plan(plan_options(make_config()), heavy_tail(pairs), int(usable_gib * GIB), asked=None)
        assert plan.graphs and (plan.gradient_checkpointing > 0) == checkpointing


@pytest.mark.parametrize("calibration", [None, 0.93, 1.02])
def test_only_small_steps_are_recorded_if_larger_ones_would_not_fit(calibration):
    estimate, sizes = heavy_tail(8), []
    for usable_gib in (2.4, 3.2, 8.0):
        plan = choose_plan(plan_options(make_config()), estimate, int(usable_gib * GIB), None, calibration)
        sizes.append(graph_bytes(estimate, plan))
        assert estimate.step_peak(*plan.batching) * (calibration or 1) <= PROBED_USABLE * usable_gib * GIB
    assert 0 < sizes[0] < sizes[1] < sizes[2], "more memory holds more CUDA graphs"


def qwen_estimate(lengths, pairs, **options):
    """Estimate of an adapter on a Qwen of 7 B on a fast GPU."""
    config = make_config(lora_rank=32, optimizer="adamw", **options)
    return make_estimate(config, QWEN_7B, torch.bfloat16, histogram(lengths), pairs, launch_tokens=33_000)


def test_recorded_steps_of_a_large_network_compute_few_more_blocks_again_than_others():
    short = np.random.default_rng(0).exponential(150, (2000, 2)).clip(16, 512).astype(np.int64)
    for lengths, pairs in ((short, 8), (np.full((100, 2), 1024), 2)):
        estimate = qwen_estimate(lengths, pairs, base_precision="nf4")
        wanted = plan_options(make_config())
        recorded, plain = (choose_plan(wanted, estimate, 15 * GIB, asked) for asked in (None, False))
        assert recorded.graphs and not plain.graphs
        assert recorded.gradient_checkpointing <= plain.gradient_checkpointing + 1 < 20


def test_small_forwards_cost_more_where_each_takes_the_matrices_out_of_four_bits():
    lengths = np.full((100, 2), 128)
    costs = []
    for precision in ("auto", "nf4"):
        estimate = qwen_estimate(lengths, 64, base_precision=precision)
        estimate = Estimate(replace(estimate.spec, launch_tokens=1), estimate.lengths, 64)
        small, large = (fitting_plan(Room(estimate), tokens, 512, 0) for tokens in (1024, 16_384))
        costs.append(time_factor(small, estimate) / time_factor(large, estimate))
    assert costs[0] == pytest.approx(1, abs=0.01) and costs[1] > 1.1


def test_a_large_step_has_larger_chunks_where_they_leave_its_peak_as_it_is():
    lengths = Lengths(np.array([[24, 108]]), np.array([4096]))  # usual pairs: their decoder's backward is the peak
    chunks = {pairs: choose(80, share_pairs=pairs, lengths=lengths).chunk_tokens for pairs in (64, 256, 1024)}
    assert chunks == {64: 512, 256: 2048, 1024: 8192}
    estimate = estimate_of(share_pairs=1024, lengths=lengths)
    batching = choose(80, share_pairs=1024, lengths=lengths).batching
    assert estimate.step_peak(*batching) == estimate.step_peak(batching[0], 2048, batching[2])
    many_words = replace(SMALL, vocab_size=250_112)  # the logits are the peak
    assert choose(80, many_words, share_pairs=1024, lengths=lengths).chunk_tokens == 2048


HALVINGS = (200, 100, 50, 25, 12, 6, 3, 1)  # of the answers wanted


def test_all_wanted_answers_are_generated_together_or_the_largest_halving_of_them_that_fits():
    estimate, batching = estimate_of(bleu_pairs=HALVINGS[0]), (2048, 512, 0)
    assert choose(80, bleu_pairs=HALVINGS[0]).answers == Room(estimate).plan(*batching).answers == HALVINGS[0]
    for answers, fewer in zip(HALVINGS, (*HALVINGS[1:], 1), strict=True):
        needed = estimate.peaks(*batching, answers)["generation"]
        assert Room(estimate, needed).plan(*batching).answers == answers
        assert Room(estimate, needed - 1).plan(*batching).answers == fewer


def test_a_plan_for_less_memory_generates_fewer_long_answers_together():
    long, planned = dict(bleu_pairs=HALVINGS[0], max_new_tokens=4000, optimizer="adafactor"), []
    for gib in (0.8, 4, 40):
        plan = choose(gib, **long)
        peaks = {number: estimate_of(**long).peaks(*plan.batching, number)["generation"] for number in HALVINGS}
        planned.append(max(number for number in HALVINGS if peaks[number] <= gib * GIB * USABLE))
        assert plan.answers == planned[-1]
    assert planned[0] < planned[1] < planned[2] == HALVINGS[0]
