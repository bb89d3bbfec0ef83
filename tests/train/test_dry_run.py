import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import MODELS
from model.commands.recipe import plan_options
from model.data.length_histogram import histogram
from model.data.packing import cut
from model.data.sampler import step_at
from model.memory.plan import PROBED_USABLE, NothingFits, choose_plan
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.distributed import start_ranks, stop_ranks, vote
from model.train import dry_run
from model.train.dry_run import Trial, collate_longest, dry_run_update, plan_before_probes, probe_plan, worst_examples
from model.train.flat_optimizer import FlatOptimizer
from model.train.optim import make_optimizer
from tests.memory.test_plan import HEAVY_TAIL, heavy_tail
from tests.parts import ALONE, PLAN, make_config, make_estimate, make_model
from tests.ranks import run_ranks

GIB = 2**30
RECORDED = replace(PLAN, graphs=True)
CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
LENGTHS = np.random.default_rng(0).integers(20, 256, (6400, 2)).astype("uint16")


def planned(usable_gib, kept=None, kernels=True, steps=100, launch_tokens=0, **options):
    """(MemoryPlan before any probe, function that chooses another after one), for chatlm in bf16, 64 pairs per step."""
    config = make_config(epochs=1, **options)
    estimate = make_estimate(config, CHATLM, torch.bfloat16, histogram(LENGTHS), 64, launch_tokens=launch_tokens)
    estimate.spec = replace(estimate.spec, kernels=kernels)
    schedule = SimpleNamespace(total_pairs=len(LENGTHS), global_batch=len(LENGTHS) / steps)
    context = SimpleNamespace(options=config, loader=SimpleNamespace(schedule=schedule))
    return plan_before_probes(Trial(context, None, estimate, plan_options(config)), kept, int(usable_gib * GIB))


def test_steps_are_recorded_if_the_run_is_long_enough_and_a_whole_step_fits_in_a_forward():
    for dropout in (0, 0.1):
        plan, _ = planned(24, dropout=dropout)
        assert plan.graphs and plan.predicted_peak_bytes <= 24 * GIB
    for less in (planned(3.5), planned(24, steps=99), planned(24, kernels=False)):
        assert not less[0].graphs


def test_cuda_graphs_take_no_memory_from_the_forwards():
    recorded, plain = planned(12)[0], planned(12, compile="False")[0]
    assert recorded == replace(plain, graphs=True)
    tight = planned(8)[0]
    assert tight.graphs and tight.predicted_peak_bytes > 7 * GIB


def test_recorded_steps_use_checkpointing_where_launches_would_take_longer():
    """5 GiB hold forwards of half a step without checkpointing, or CUDA graphs of whole steps with it."""
    for launch_tokens, recorded in ((33_000, True), (1000, False)):
        plan, _ = planned(5, launch_tokens=launch_tokens, optimizer="adafactor")
        assert (plan.graphs, plan.gradient_checkpointing > 0) == (recorded, recorded)
    assert not planned(5, launch_tokens=33_000, optimizer="adafactor", gradient_checkpointing="False")[0].graphs


@pytest.mark.parametrize("share", [0.944, 0.97])
@pytest.mark.parametrize("usable_gib", [2.4, 2.8, 3.3])
def test_every_step_of_an_epoch_fits_on_a_small_gpu_with_cuda_graphs(monkeypatch, usable_gib, share):
    """A step takes `share` of the bytes predicted for its examples."""
    lengths, usable, estimate = HEAVY_TAIL, int(usable_gib * GIB), heavy_tail(8)

    def step_bytes(_run, plan, ids):
        peak = heavy_tail(len(ids), lengths[ids]).step_peak(int(lengths[ids].sum()), *plan.batching[1:])
        return int(share * peak)

    monkeypatch.setattr(dry_run, "_step_peak", step_bytes)
    plan = probed_plan(estimate, lengths, usable, asked=None)
    assert plan.graphs
    for part in forwards_of(lengths, 8, plan):
        assert step_bytes(None, plan, part) <= usable, lengths[part]


def probed_plan(estimate, lengths, usable_bytes, asked):
    """The plan for examples of `lengths` after its probes; the test replaces `_step_peak`, what a probe measures."""
    choose = partial(choose_plan, plan_options(make_config()), estimate, usable_bytes, asked)
    return probe_plan(trial_of(lengths, estimate), choose(), choose)[0]


def trial_of(lengths, estimate):
    examples = SimpleNamespace(bounds=lengths, lengths=lambda ids, epoch: lengths[ids])
    return Trial(SimpleNamespace(ranks=ALONE, loader=SimpleNamespace(examples=examples)), None, estimate, None)


def forwards_of(lengths, pairs, plan):
    """Yield the example ids of each micro-batch of an epoch."""
    for first in range(0, len(lengths), pairs):
        ids = step_at(first, len(lengths), pairs, seed=0).ids
        yield from cut(ids, lengths[ids], plan.micro_batch_tokens)


@pytest.mark.parametrize("share", [0.944, 0.97])
@pytest.mark.parametrize("pairs, usable_gib", [(512, 2), (256, 3)])
def test_attention_scores_of_long_prompts_fit_without_kernels_in_any_micro_batch(monkeypatch, pairs, usable_gib, share):
    draw, usable = np.random.default_rng(0), usable_gib * GIB
    prompts = np.where(draw.random(20_000) < 0.02, 512, draw.integers(5, 60, 20_000))
    lengths = np.stack([prompts, draw.integers(2, 120, 20_000)], axis=1)
    shape = T5ModelConfig(**MODELS["small"], vocab_size=29_298)

    def estimate_of(chosen, number):
        return make_estimate(make_config(), shape, torch.float32, histogram(chosen), number)

    def step_bytes(_run, plan, ids):
        chosen = lengths[ids]
        return int(share * estimate_of(chosen, len(ids)).step_peak(int(chosen.sum()), *plan.batching[1:]))

    monkeypatch.setattr(dry_run, "_step_peak", step_bytes)
    plan = probed_plan(estimate_of(lengths, pairs), lengths, usable, asked=False)
    for part in forwards_of(lengths, pairs, plan):
        assert step_bytes(None, plan, part) <= usable, lengths[part]


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_resumed_run_records_cuda_graphs_as_before_whatever_its_memory_and_length(steps):
    for kept in (PLAN, RECORDED):
        for usable_gib in (4, 5, 100):
            assert planned(usable_gib, kept, steps=steps)[0].graphs == kept.graphs
    assert not planned(100, RECORDED, kernels=False)[0].graphs, "no CUDA graphs without kernels"


def test_the_compile_option_is_obeyed_or_refused():
    assert planned(5, PLAN, steps=10, compile="True")[0].graphs
    assert not planned(100, RECORDED, compile="False")[0].graphs
    with pytest.raises(ValueError, match="compile=True captures CUDA graphs"):
        planned(100, kernels=False, compile="True")
    with pytest.raises(ValueError, match=r"at least \d+ tokens \(64 pairs\).*micro_batch_tokens=4096 cuts it"):
        planned(100, compile="True", micro_batch_tokens=4096)
    assert planned(100, compile="True", micro_batch_tokens=40_000)[0].graphs


@pytest.mark.parametrize("name", ["adamw_rms", "adamw", "adafactor", "muon"])
def test_the_dry_run_of_an_update_does_not_change_later_updates(tokenizer, name):
    ends = []
    for with_dry_run in (False, True):
        model = make_model(tokenizer.vocab_size)
        optimizer = make_optimizer(model, make_config(optimizer=name))
        if with_dry_run:
            dry_run_update(ALONE, model, optimizer)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model.flat.gradients.copy_(torch.randn(model.flat.gradients.shape, generator=generator))
            optimizer.update(0.01, torch.ones(()))
        ends.append(model.flat.masters)
    assert torch.equal(*ends)


def test_the_worst_examples_are_the_longest_responses_and_others_that_fill_the_forward():
    lengths = np.array([[5, 9], [9, 9], [1, 20], [30, 2]], dtype="uint16")
    assert worst_examples(lengths, 100, 3).tolist() == [2, 1, 0]
    assert worst_examples(lengths, 39, 4).tolist() == [2, 1]
    assert worst_examples(lengths, 10, 4).tolist() == [2]
    assert worst_examples(lengths, 36, 4).tolist() == [2, 0], "example 0 fits beside the longest response"
    assert worst_examples(lengths, 36, 1).tolist() == [2]


def test_the_rows_with_the_longest_sides_and_the_longest_row_are_collated():
    collated = []
    lengths = np.array([[250, 1], [9, 9], [20, 30], [249, 20]], dtype="uint8")  # one sum is more than a byte holds
    collate_longest(SimpleNamespace(bounds=lengths, batch=lambda ids, epoch: collated.extend(ids.tolist())))
    assert collated == [0, 2, 3]


def run_probes(monkeypatch, *shares_of_prediction, usable_gib=4, asked=False):
    """(first plan, plans that were probed, result of probe_plan).

    Each probe takes the next of `shares_of_prediction` of its predicted peak; None: it runs out of memory.
    """
    shape = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
    lengths = np.random.default_rng(0).integers(20, 256, (1000, 2))
    estimate = make_estimate(make_config(), shape, torch.bfloat16, histogram(lengths), 512)
    choose = partial(choose_plan, plan_options(make_config()), estimate, usable_gib * GIB, asked)
    first, probed, shares = choose(), [], iter(shares_of_prediction)

    def probe(_run, plan, _ids):
        probed.append(plan)
        share = next(shares)
        return share and int(share * estimate.peaks(*plan.batching)["step"])

    monkeypatch.setattr(dry_run, "_step_peak", probe)
    return first, probed, probe_plan(trial_of(lengths, estimate), first, choose)


def test_probes_that_take_less_than_predicted_make_the_plan_larger_until_it_fills_the_memory(monkeypatch):
    first, probed, (plan, measured) = run_probes(monkeypatch, 0.9, 0.9, 0.9)
    assert (probed[0], probed[-1]) == (first, plan) and plan.predicted_peak_bytes > first.predicted_peak_bytes
    assert 0.96 * 4 * GIB < measured <= PROBED_USABLE * 4 * GIB


def test_after_the_last_probe_a_plan_that_leaves_too_little_for_its_cuda_graphs_is_made_smaller(monkeypatch):
    for last, is_smaller in ((1.1, True), (0.85, False)):
        _, probed, (plan, measured) = run_probes(monkeypatch, 0.96, 0.92, last, usable_gib=6, asked=True)
        assert len(probed) == 3 and plan.graphs and measured
        assert (plan.predicted_peak_bytes < probed[-1].predicted_peak_bytes) == is_smaller
        assert is_smaller or plan == probed[-1]


def test_a_plan_that_just_fits_is_kept_if_no_smaller_plan_exists(monkeypatch):
    first, probed, (plan, _) = run_probes(monkeypatch, 1.3, usable_gib=3.5)
    assert probed == [first] == [plan]


def test_a_larger_plan_that_runs_out_of_memory_gives_way_to_the_plan_that_fitted(monkeypatch):
    first, probed, (plan, _) = run_probes(monkeypatch, 0.9, None)
    assert len(probed) == 2 and plan == first


def test_a_plan_that_runs_out_of_memory_is_made_smaller_and_refused_after_the_last_probe(monkeypatch):
    first, probed, (plan, _) = run_probes(monkeypatch, None, 0.9)
    assert probed == [first, plan] and plan.micro_batch_tokens < first.micro_batch_tokens
    with pytest.raises(NothingFits, match="3 probes ran out of memory"):
        run_probes(monkeypatch, None, None, None)


TIMEOUT_S = 6  # a rank without heartbeats counts as hanging after half of it; Gloo ends a vote after all of it
COMPILATION_SECONDS = TIMEOUT_S + 2


def compile_slowly():
    """Rank 1 compiles the update for longer than the time limit; rank 0 is done and waits."""
    ranks, model = start_ranks("gloo", TIMEOUT_S), make_model(100)
    if ranks.rank == 1:
        update = FlatOptimizer.update
        FlatOptimizer.update = lambda *args: (time.sleep(COMPILATION_SECONDS), update(*args))
    dry_run_update(ranks, model, make_optimizer(model, make_config()))
    vote(ranks, 0)
    stop_ranks()
    return 0


def test_ranks_wait_for_a_rank_that_compiles_for_longer_than_the_time_limit(tmp_path):
    done = run_ranks(2, compile_slowly, folder=tmp_path)
    assert done.codes == [0, 0], done.text
