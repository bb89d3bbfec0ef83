import errno
import logging
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import MODELS, T5ModelConfig
from model.commands import setup
from model.data.length_histogram import histogram
from model.memory.estimate import Estimate
from model.memory.oom_policy import PlanRecovery, plan_after_out_of_memory, recovery_of, shrink_plan
from model.memory.plan import (
    CHUNKS,
    PROBED_USABLE,
    USABLE,
    MemoryPlan,
    NothingFits,
    choose_plan,
    fitting_plan,
    time_factor,
)
from model.runtime.device_memory import (
    CONTEXT_BYTES,
    check_memory_safety,
    cleanup_gpu_memory,
    is_out_of_memory,
    limit_memory,
    memory_cap,
    monitor_gpu_memory,
    non_torch_bytes,
)
from model.runtime.fault_injection import ERRORS
from model.train.footprint import make_estimate
from tests.parts import make_config
from tests.tiny import start, wait_for
from train_low_mem import main

GIB = 2**30
SMALL = T5ModelConfig(**MODELS["small"], vocab_size=8192)
CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)


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
    return choose_plan(make_config(**options), estimate, usable_bytes, calibration=calibration)


def test_plenty_of_memory_takes_a_whole_share_in_one_forward():
    plan = choose(80)
    assert (plan.micro_batch_tokens, plan.gradient_checkpointing) == (64 * 1024, False)
    assert choose(80, share_pairs=1).micro_batch_tokens == 1024
    assert choose(1000, share_pairs=10**6).micro_batch_tokens < 10**6


@pytest.mark.parametrize("shape", (SMALL, CHATLM), ids=("small", "chatlm"))
def test_a_plan_fits_what_is_there_and_says_its_peak(shape):
    plans = [choose(gib, shape, share_pairs=512, optimizer="adafactor") for gib in (4, 8, 12, 20, 40)]
    for gib, plan in zip((4, 8, 12, 20, 40), plans, strict=True):
        estimate = estimate_of(shape, share_pairs=512, optimizer="adafactor")
        assert plan.predicted_peak_bytes == estimate.step_peak(*plan.cutting) <= gib * GIB * USABLE * (1 + 1 / 64)
    factors = [round(time_factor(plan, estimate), 6) for plan in plans]
    assert factors == sorted(factors, reverse=True)


def test_a_forward_that_just_misses_a_whole_number_of_the_longest_examples_takes_it():
    estimate = estimate_of(CHATLM, heavy_tailed(), 16, optimizer="adafactor")
    for tokens, taken in ((2048 - 40, 2048), (2048 + 300, None), (3 * 1024 - 6, 3 * 1024)):
        plan = fitting_plan(estimate, 16 * 1024, estimate.step_peak(tokens, 512, False), 512, False)
        assert plan.micro_batch_tokens == taken or (taken is None and plan.micro_batch_tokens <= tokens)


def test_the_time_that_launches_take_decides_between_more_forwards_and_computing_again():
    estimate = estimate_of(CHATLM, heavy_tailed(), 160, optimizer="adafactor")
    plans = {}
    for launch_tokens in (2000, 40_000):  # a small card; one that computes as fast as it is launched
        spec = replace(estimate.spec, launch_tokens=launch_tokens)
        plans[launch_tokens] = choose_plan(make_config(), Estimate(spec, estimate.lengths, 160), 4 * GIB)
    few, many = (estimate.forwards(plans[tokens].micro_batch_tokens) for tokens in (40_000, 2000))
    assert (plans[2000].gradient_checkpointing, plans[40_000].gradient_checkpointing) == (False, True)
    assert few < 1.5 < 3 < many


def test_forwards_of_a_step_are_counted_over_shares_of_varying_length():
    draw, lengths, pairs = np.random.default_rng(0), heavy_tailed(), 32
    drawn = draw.choice(np.repeat(lengths.tokens.sum(axis=1), lengths.counts), (20_000, pairs)).sum(axis=1)
    estimate = estimate_of(lengths=lengths, share_pairs=pairs)
    for tokens in (2000, 4000, 8000, 12_000):
        assert estimate.forwards(tokens) == pytest.approx(np.ceil(drawn / tokens).mean(), rel=0.05)
    alike = estimate_of(lengths=histogram(np.full((100, 2), 50)), share_pairs=10)
    assert [alike.forwards(tokens) for tokens in (999, 1000, 500, 333)] == [2, 1, 2, 4]


def test_what_a_probe_measured_over_the_prediction_makes_the_plan_smaller():
    plain, calibrated = choose(4, share_pairs=512), choose(4, share_pairs=512, calibration=1.3)
    assert calibrated.predicted_peak_bytes * 1.3 <= 4 * GIB * PROBED_USABLE
    assert calibrated.predicted_peak_bytes < plain.predicted_peak_bytes


def test_a_micro_batch_that_is_named_is_the_one_used():
    for tokens in (1024, 5000, 30_000):
        for gib in (None, 40, 80):
            assert choose(gib, micro_batch_tokens=tokens).micro_batch_tokens == tokens


@pytest.mark.parametrize("gib", [None, 80])
def test_a_micro_batch_below_the_longest_example_is_refused(gib):
    with pytest.raises(ValueError, match="micro_batch_tokens=511.*longest example has 1024 tokens"):
        choose(gib, micro_batch_tokens=511)


def test_checkpointing_comes_only_where_no_faster_plan_fits_without_it():
    assert not choose(80).gradient_checkpointing
    assert choose(80, gradient_checkpointing="True").gradient_checkpointing
    long = heavy_tailed(longest=20_000)
    estimate = estimate_of(lengths=long)
    plain, again = (
        estimate.step_peak(40_000, CHUNKS[-1], checkpointing) / GIB / USABLE for checkpointing in (False, True)
    )
    between = (plain + again) / 2
    assert choose(between, lengths=long).gradient_checkpointing
    with pytest.raises(NothingFits):
        choose(between, lengths=long, gradient_checkpointing="False")


def test_what_cannot_fit_is_refused_with_numbers():
    with pytest.raises(NothingFits) as refusal:
        choose(2, CHATLM, optimizer="adamw_rms")
    text = str(refusal.value)
    assert "and 2.00 GiB are there" in text and "optimizer 1.4" in text
    assert "--max_seq_len (now 256)" in text and "--optimizer=adafactor" in text


def test_a_cpu_takes_moderate_micro_batches():
    plan = choose(None, share_pairs=10**4)
    assert 1024 <= plan.micro_batch_tokens <= 16_384
    assert not plan.gradient_checkpointing


@pytest.mark.parametrize("start", [MemoryPlan(131_072, 2048, False, 0, graphs=True), MemoryPlan(513, 1024, True, 0)])
def test_shrinking_makes_each_plan_smaller_and_ends(start):
    plans = [start]
    while (smaller := shrink_plan(plans[-1], longest_tokens=512)) is not None:
        assert smaller != plans[-1]
        assert smaller.micro_batch_tokens <= plans[-1].micro_batch_tokens
        assert smaller.chunk_tokens <= plans[-1].chunk_tokens
        assert smaller.gradient_checkpointing >= plans[-1].gradient_checkpointing
        assert not smaller.graphs, "recordings are given up first"
        plans.append(smaller)
        assert len(plans) < 20
    assert plans[-1] == MemoryPlan(512, 128, True, 0)


def test_shrinking_leaves_a_micro_batch_already_below_the_longest_example():
    assert shrink_plan(MemoryPlan(100, 128, False, 0), 512) == MemoryPlan(100, 128, True, 0)
    assert shrink_plan(MemoryPlan(100, 128, True, 0), 512) is None


def test_after_an_out_of_memory_the_same_plan_is_tried_once_more_and_then_smaller_ones():
    plan, cpu = MemoryPlan(1024, 128, True, 0), torch.device("cpu")

    def shrink(plan):
        return shrink_plan(plan, 512)

    assert plan_after_out_of_memory(cpu, plan, 1, shrink) == plan
    smallest = plan_after_out_of_memory(cpu, plan, 2, shrink)
    assert smallest == replace(plan, micro_batch_tokens=512)
    assert plan_after_out_of_memory(cpu, smallest, 1, shrink) == smallest
    with pytest.raises(NothingFits, match="smallest plan"):
        plan_after_out_of_memory(cpu, smallest, 2, shrink)


def test_a_shrunken_plan_grows_back_rung_by_rung_each_after_a_calm_that_every_shrinking_doubles():
    full = MemoryPlan(4000, 512, False, 0, graphs=True)
    plan, growth = full, PlanRecovery(full, wait_steps=2)
    for _ in range(6):
        plan, growth = growth.after_step(shrink_plan(plan, 1000), shrunk=True)
    assert plan == MemoryPlan(1000, 128, True, 0) and growth.wait_steps == 128
    seen = []
    for _ in range(128 * 6 + 3):
        plan, growth = growth.after_step(plan, shrunk=False)
        seen.append(plan)
    assert seen[126] == MemoryPlan(1000, 128, True, 0) and seen[127] == MemoryPlan(1000, 128, False, 0)
    assert len(set(seen)) == 7 and seen[128 * 6 - 2] == replace(full, graphs=False) and seen[-1] == full


def test_growth_is_the_same_when_it_comes_back_from_a_checkpoint():
    growth = PlanRecovery(MemoryPlan(4000, 512, False, 0), 7, 400)
    assert recovery_of(asdict(growth), MemoryPlan(1, 1, True, 0)) == growth
    assert recovery_of(None, growth.full) == PlanRecovery(growth.full)


@pytest.mark.parametrize("kind", ["oom", "cublas", "cudnn", "nccl", "cpu"])
def test_out_of_memory_is_known_under_all_its_names(kind):
    assert is_out_of_memory(ERRORS[kind]())


def test_a_real_failed_allocation_is_known():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60)
    assert is_out_of_memory(failure.value)
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA out of memory. Tried to allocate more than 1EB memory."),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_failures_are_not_taken_for_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_functions_for_the_hand_work_without_a_gpu():
    assert monitor_gpu_memory() == {}
    assert cleanup_gpu_memory() == 0
    assert check_memory_safety(1e6)
    assert (limit_memory(torch.device("cpu"), 4, 0), non_torch_bytes(torch.device("cpu"), 0)) == (None, 0)


def test_what_another_process_took_in_the_meantime_is_not_counted_as_ours(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    for free, non_torch in ((17.5, 0.5), (7, CONTEXT_BYTES / GIB), (19, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (int(free * GIB), 21 * GIB))
        assert non_torch_bytes(torch.device("cuda"), other_process=GIB) == non_torch * GIB


def test_too_little_free_memory_is_a_warning_with_the_plan_s_figure(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("chat_trainer"), "propagate", True)
    assert check_memory_safety(2.0, free_bytes=3 * GIB)
    assert not check_memory_safety(2.0, free_bytes=GIB, planned_bytes=int(0.5 * GIB))
    assert "1.00 GiB of GPU memory are free, below 2.0; the plan's peak is 0.50 GiB" in caplog.text


def prepare_with_little_free(words):
    """`main` on a card that has 1.25 GiB free whenever it is asked."""
    setup.free_bytes = lambda: int(1.25 * GIB)
    return main(words)


def test_a_run_warns_of_each_stage_at_which_less_is_free_than_the_guides_want(home):
    processes = start(home, 1, function=prepare_with_little_free, output_dir="gates", epochs=1)
    done = wait_for(processes, home)
    warnings = re.findall(r"stage (\w+): 1.25 GiB of GPU memory are free, below (.*); the plan's peak is", done.text)
    assert warnings == [("start", "3.0"), ("model", "2.5"), ("optimizer", "2.0"), ("ready", "1.5")], done.text


def test_the_cap_of_a_limit_above_the_card_is_the_card(monkeypatch):
    card, gib = torch.device("cuda:0"), 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * gib))
    assert [memory_cap(card, limit) for limit in (0.0, 6.0, 12.0)] == [8 * gib, 6 * gib, 8 * gib]
