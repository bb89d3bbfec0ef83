import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.caps import HeavyTail
from config import MODELS, T5ModelConfig, load_config
from model.commands import setup
from model.commands.setup import check_memory_fits, kept_recovery
from model.data.buckets import Bucket, buckets_for
from model.data.length_histogram import Lengths, histogram
from model.data.packing import cut
from model.data.sampler import step_at
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import PROBED_USABLE, USABLE, NothingFits, choose_plan, predicted_peaks, recording_bytes
from model.run.checkpoint import TrainState
from model.runtime.distributed import start_ranks, stop_ranks, vote
from model.train import dry_run
from model.train.cuda_graphs import StepGraphs
from model.train.dry_run import plan_before_probes, rehearse_plan, rehearse_update, worst_examples
from model.train.footprint import estimate_for, make_estimate
from model.train.optim import make_optimizer
from tests.parts import ALONE, PLAN, make_config, make_model
from tests.ranks import run_ranks

GIB = 2**30
RECORDED = replace(PLAN, graphs=True)


CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
LENGTHS = np.random.default_rng(0).integers(20, 256, (6400, 2)).astype("uint16")
HEAVY_TAIL = HeavyTail(512).lengths.astype(np.int64)  # of 2,048 pairs, one in twenty of 512 tokens a side


def planned(usable_gib, kept=None, kernels=True, steps=100, launch_tokens=None, **options):
    """(MemoryPlan before any probe, what chooses another after one): chatlm in bf16, 64 pairs a step."""
    config = make_config(epochs=1, **options)
    estimate = make_estimate(config, CHATLM, torch.bfloat16, histogram(LENGTHS), 64, launch_tokens=launch_tokens)
    estimate.spec = replace(estimate.spec, kernels=kernels)
    run = SimpleNamespace(config=config, train=LENGTHS, schedule=SimpleNamespace(global_batch=len(LENGTHS) / steps))
    return plan_before_probes(run, kept, estimate, int(usable_gib * GIB))


def recorded_peak(plan):
    """Predicted bytes of `plan` beside its recordings, for the run of `planned`."""
    estimate = make_estimate(make_config(), CHATLM, torch.bfloat16, histogram(LENGTHS), 64)
    return predicted_peaks(estimate, plan)["recorded_step"]


def test_steps_are_recorded_where_the_run_repays_it_and_both_ways_fit_the_memory():
    plan, _ = planned(24)
    assert plan.graphs and recorded_peak(plan) <= 24 * GIB
    for less in (planned(3.5), planned(24, steps=99), planned(24, dropout=0.1), planned(24, kernels=False)):
        assert not less[0].graphs


def test_recordings_take_memory_from_forwards_that_few_steps_would_need():
    lean, plain = planned(12)[0], planned(12, compile="False")[0]
    assert lean.graphs and not plain.graphs
    assert 64 * LENGTHS.sum(axis=1).mean() < lean.micro_batch_tokens < plain.micro_batch_tokens


def test_steps_are_computed_again_in_a_recording_where_launches_would_take_longer():
    """6 GiB hold forwards of half a step without checkpointing, or recordings of whole steps with it."""
    for launch_tokens, recorded in ((33_000, True), (1000, False)):
        plan, _ = planned(6, launch_tokens=launch_tokens, optimizer="adafactor")
        assert (plan.graphs, plan.gradient_checkpointing) == (recorded, recorded)
    assert not planned(6, launch_tokens=33_000, optimizer="adafactor", gradient_checkpointing="False")[0].graphs


def test_steps_of_pairs_of_one_length_are_recorded_though_they_are_padded():
    lengths = Lengths(np.array([[70, 80]]), np.array([1000]))
    estimate = make_estimate(make_config(), CHATLM, torch.bfloat16, lengths, 3)
    plan = choose_plan(make_config(), estimate, 24 * GIB, asked=None)
    (room,) = buckets_for(lengths.tokens, 3, lengths.counts)
    assert plan.graphs and plan.micro_batch_tokens == room.tokens > 3 * 150


def heavy_tail(pairs, lengths=HEAVY_TAIL):
    """Estimate of chatlm with Adafactor, `pairs` of these `lengths` a step, on a fast GPU."""
    config = make_config(optimizer="adafactor")
    return make_estimate(config, CHATLM, torch.bfloat16, histogram(lengths), pairs, launch_tokens=33_000)


def test_nothing_is_computed_again_for_recordings_that_hold_few_steps():
    """Two pairs of a heavy tail: no few sizes hold most steps, and what none holds pays for computing again."""
    for pairs, usable_gib, computed_again in ((2, 2.8, False), (16, 3.4, True)):
        plan = choose_plan(make_config(), heavy_tail(pairs), int(usable_gib * GIB), asked=None)
        assert plan.graphs and plan.gradient_checkpointing == computed_again


@pytest.mark.parametrize("calibration", [None, 0.93, 1.02])
def test_small_steps_are_recorded_where_recordings_of_all_would_not_fit(calibration):
    estimate, kept = heavy_tail(8), []
    for usable_gib in (3.2, 3.4, 8.0):
        plan = choose_plan(make_config(), estimate, int(usable_gib * GIB), None, calibration)
        kept.append(recording_bytes(estimate, plan))
        forward = estimate.step_peak(*plan.cutting) * (calibration or 1)
        assert forward / PROBED_USABLE + kept[-1] / USABLE <= usable_gib * GIB
    assert 0 < kept[0] < kept[1] <= kept[2], "more of them where more memory is"


@pytest.mark.parametrize("share", [0.944, 0.97])
@pytest.mark.parametrize("usable_gib", [3.26, 3.33, 3.41])
def test_no_step_of_an_epoch_needs_more_than_a_tight_card_has_beside_the_recordings(monkeypatch, usable_gib, share):
    """Where a step takes this `share` of what is predicted for its examples."""
    lengths, usable, estimate = HEAVY_TAIL, int(usable_gib * GIB), heavy_tail(8)

    def step_bytes(_run, plan, ids):
        peak = heavy_tail(len(ids), lengths[ids]).step_peak(int(lengths[ids].sum()), *plan.cutting[1:])
        return int(share * peak)

    monkeypatch.setattr(dry_run, "_step_peak", step_bytes)
    plan = rehearsed_on(estimate, lengths, usable, asked=None)
    kept = recording_bytes(estimate, plan)
    assert kept
    for part in forwards_of(lengths, 8, plan):
        assert step_bytes(None, plan, part) + kept <= usable, lengths[part]


def rehearsed_on(estimate, lengths, usable_bytes, asked):
    """The plan for examples of these `lengths` after its probes, on a device whose steps a test tells."""
    run = SimpleNamespace(ranks=ALONE, train=SimpleNamespace(lengths=lengths))
    choose = partial(choose_plan, make_config(), estimate, usable_bytes, asked)
    return rehearse_plan(run, estimate, choose(), choose)[0]


def forwards_of(lengths, pairs, plan):
    """The examples of each forward of an epoch."""
    for first in range(0, len(lengths), pairs):
        ids = step_at(first, len(lengths), pairs, seed=0).ids
        yield from cut(ids, lengths[ids], plan.micro_batch_tokens)


@pytest.mark.parametrize("share", [0.944, 0.97])
@pytest.mark.parametrize("pairs, usable_gib", [(512, 2), (256, 3)])
def test_the_plain_twin_s_scores_of_long_prompts_fit_wherever_they_stand(monkeypatch, pairs, usable_gib, share):
    draw, usable = np.random.default_rng(0), usable_gib * GIB
    prompts = np.where(draw.random(20_000) < 0.02, 512, draw.integers(5, 60, 20_000))
    lengths = np.stack([prompts, draw.integers(2, 120, 20_000)], axis=1)
    shape = T5ModelConfig(**MODELS["small"], vocab_size=29_298)

    def estimate_of(chosen, number):
        return make_estimate(make_config(), shape, torch.float32, histogram(chosen), number)

    def step_bytes(_run, plan, ids):
        chosen = lengths[ids]
        return int(share * estimate_of(chosen, len(ids)).step_peak(int(chosen.sum()), *plan.cutting[1:]))

    monkeypatch.setattr(dry_run, "_step_peak", step_bytes)
    plan = rehearsed_on(estimate_of(lengths, pairs), lengths, usable, asked=False)
    for part in forwards_of(lengths, pairs, plan):
        assert step_bytes(None, plan, part) <= usable, lengths[part]


def test_a_step_is_recorded_up_to_the_size_that_the_plan_has_memory_for():
    graphs = SimpleNamespace(buckets=[Bucket(64, 128, 4), Bucket(128, 192, 4)])
    small, large = np.full((4, 2), 16), np.full((4, 2), 32)
    for lengths, most_tokens, room in ((small, 320, 0), (small, 192, 0), (small, 191, None), (large, 319, None)):
        assert StepGraphs.bucket_of(graphs, lengths, most_tokens) == (None if room is None else graphs.buckets[room])
    assert StepGraphs.bucket_of(graphs, large, 320) == graphs.buckets[1]


@pytest.mark.parametrize("steps", [10, 1000])
def test_a_run_that_goes_on_records_as_it_did_whatever_memory_and_length_are_now(steps):
    for kept in (PLAN, RECORDED):
        for usable_gib in (4, 5, 100):
            assert planned(usable_gib, kept, steps=steps)[0].graphs == kept.graphs
    assert not planned(100, RECORDED, kernels=False)[0].graphs, "on a CPU there are no graphs"


def test_a_plan_that_gave_recordings_up_grows_back_to_them_only_where_they_may_be():
    growth = asdict(PlanRecovery(RECORDED, calm_steps=3))
    state = TrainState(plan=asdict(PLAN), growth=growth)
    assert kept_recovery(state, PLAN, may_record=True) == growth
    assert kept_recovery(state, PLAN, may_record=False) == asdict(PlanRecovery(PLAN, calm_steps=3))
    assert kept_recovery(state, RECORDED, may_record=True) is None


def test_what_the_user_says_of_recording_holds_or_is_refused():
    assert planned(5, PLAN, steps=10, compile="True")[0].graphs
    assert not planned(100, RECORDED, compile="False")[0].graphs
    with pytest.raises(ValueError, match="compile=True records CUDA graphs"):
        planned(100, kernels=False, compile="True")
    with pytest.raises(ValueError, match="64 pairs in .* tokens at least.*micro_batch_tokens=4096 cuts them"):
        planned(100, compile="True", micro_batch_tokens=4096)
    assert planned(100, compile="True", micro_batch_tokens=40_000)[0].graphs


@pytest.mark.parametrize("name", ["adamw_rms", "adamw", "adafactor", "muon"])
def test_the_rehearsed_update_leaves_no_trace(tokenizer, name):
    ends = []
    for rehearsed in (False, True):
        model = make_model(tokenizer.vocab_size)
        optimizer = make_optimizer(model, make_config(optimizer=name))
        if rehearsed:
            rehearse_update(ALONE, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"].fill_(0.01)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model.flat.gradients.copy_(torch.randn(model.flat.gradients.shape, generator=generator))
            optimizer.step()
        ends.append(model.flat.masters)
    assert torch.equal(*ends)


def test_the_costliest_examples_are_the_longest_responses_and_fill_one_forward():
    lengths = np.array([[5, 9], [9, 9], [1, 20], [30, 2]], dtype="uint16")
    assert worst_examples(lengths, 100, 3).tolist() == [2, 1, 0]
    assert worst_examples(lengths, 39, 4).tolist() == [2, 1]
    assert worst_examples(lengths, 10, 4).tolist() == [2]
    assert worst_examples(lengths, 36, 4).tolist() == [2, 0], "what fits beside them"
    assert worst_examples(lengths, 36, 1).tolist() == [2]


def rehearsed(monkeypatch, *shares_of_prediction, usable_gib=4, asked=False):
    """(first plan, plans that were probed, what came of it), for probes that took these shares of the worst predicted.

    None: that probe ran out of memory.
    """
    shape = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
    lengths = np.random.default_rng(0).integers(20, 256, (1000, 2))
    run = SimpleNamespace(config=make_config(), ranks=ALONE, train=SimpleNamespace(lengths=lengths))
    estimate = make_estimate(run.config, shape, torch.bfloat16, histogram(lengths), 512)
    choose = partial(choose_plan, run.config, estimate, usable_gib * GIB, asked)
    first, probed, shares = choose(), [], iter(shares_of_prediction)

    def probe(_run, plan, _ids):
        probed.append(plan)
        share = next(shares)
        return share and int(share * estimate.peaks(*plan.cutting)["step"])

    monkeypatch.setattr(dry_run, "_step_peak", probe)
    return first, probed, rehearse_plan(run, estimate, first, choose)


def test_probes_that_take_less_than_predicted_make_the_plan_larger_until_it_fills_the_memory(monkeypatch):
    first, probed, (plan, measured) = rehearsed(monkeypatch, 0.9, 0.9)
    assert probed == [first, plan] and plan.micro_batch_tokens > first.micro_batch_tokens
    assert 0.96 * 4 * GIB < measured <= PROBED_USABLE * 4 * GIB


def test_the_last_probe_makes_a_plan_smaller_that_leaves_its_recordings_too_little(monkeypatch):
    for last, is_smaller in ((1.1, True), (0.85, False)):
        _, probed, (plan, measured) = rehearsed(monkeypatch, 0.96, 0.92, last, usable_gib=6, asked=True)
        assert len(probed) == 3 and plan.graphs and measured
        assert (plan.predicted_peak_bytes < probed[-1].predicted_peak_bytes) == is_smaller
        assert is_smaller or plan == probed[-1]


def test_a_plan_that_just_fits_is_kept_where_nothing_smaller_is_left(monkeypatch):
    first, probed, (plan, _) = rehearsed(monkeypatch, 1.3, usable_gib=3.5)
    assert probed == [first] == [plan]


def test_a_larger_plan_that_runs_out_of_memory_leaves_the_one_that_fitted(monkeypatch):
    first, probed, (plan, _) = rehearsed(monkeypatch, 0.9, None)
    assert len(probed) == 2 and plan == first


def test_a_plan_that_runs_out_of_memory_shrinks_and_one_that_always_does_is_refused(monkeypatch):
    first, probed, (plan, _) = rehearsed(monkeypatch, None, 0.9)
    assert probed == [first, plan] and plan.micro_batch_tokens < first.micro_batch_tokens
    with pytest.raises(NothingFits, match="3 probes ran out of memory"):
        rehearsed(monkeypatch, None, None, None)


TIMEOUT_S = 6  # after half of it a silent rank hangs, after all of it Gloo gives a vote up
COMPILATION_SECONDS = TIMEOUT_S + 2


def compile_slowly():
    """Rank 1 compiles the update for longer than the time limit, while rank 0 is done and waits for it."""
    ranks, model = start_ranks("gloo", TIMEOUT_S), make_model(100)
    if ranks.rank == 1:
        update = dry_run.update
        dry_run.update = lambda *args: (time.sleep(COMPILATION_SECONDS), update(*args))
    rehearse_update(ranks, model, make_optimizer(model, make_config()))
    vote(ranks, 0)
    stop_ranks()
    return 0


def test_a_rank_that_compiles_for_longer_than_the_time_limit_is_waited_for(tmp_path):
    done = run_ranks(2, compile_slowly, folder=tmp_path)
    assert done.codes == [0, 0], done.text


def estimate_on_unlike_gpus():
    """Ranks whose GPUs launch at different speeds; 3 unless they reckon alike."""
    ranks = start_ranks("gloo", 60)
    dry_run.launch_tokens_here = lambda: 9000 - 1000 * ranks.rank
    estimate = estimate_for(ranks, make_config(), CHATLM, torch.bfloat16, LENGTHS, 64)
    stop_ranks()
    return 0 if estimate.spec.launch_tokens == 8000 else 3


def test_ranks_on_unlike_gpus_reckon_with_the_same_speed_of_launches(tmp_path):
    done = run_ranks(2, estimate_on_unlike_gpus, folder=tmp_path)
    assert done.codes == [0, 0], done.text


def test_what_cannot_fit_is_refused_with_its_bytes_before_anything_is_on_the_device(monkeypatch, store):
    shape = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
    config = load_config("pretrain", dict(optimizer="adamw_rms"))
    for gib, fits in ((8, True), (3, False)):
        monkeypatch.setattr(setup, "limit_memory", lambda *_, gib=gib: gib * 2**30)
        if fits:
            check_memory_fits(ALONE, config, shape, torch.float32, store.lengths, 16, 0)
        else:
            with pytest.raises(NothingFits, match="weights 0.73, bf16_weights 0.00, gradients 0.73, optimizer 1.47"):
                check_memory_fits(ALONE, config, shape, torch.float32, store.lengths, 16, 0)
