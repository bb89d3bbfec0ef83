"""The parts of the benchmarks, at sizes that take a second."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from bench import caps, kernels, several_gpus, step_limit, votes
from bench.children import Done, Job, run_jobs
from bench.clock import Pace, StepClock
from bench.corpus import MAX_SEQ_LEN, VOCAB_SIZE, draw_lengths, write_corpus
from bench.data_scale import build_store
from bench.fill import epoch_fill
from bench.loops import SHAPES, hf_t5, pad, smallest_shape
from bench.report import mixtures
from config import MODELS
from model.data.buckets import buckets_for
from model.data.token_store import read_store
from model.memory.plan import MemoryPlan
from model.nn.memory_spec import count_numbers
from model.nn.t5.family import T5
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.distributed import Ranks
from model.train.step import StepContext
from tests.parts import examples_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A synthetic store of 8,192 pairs."""
    directory = tmp_path_factory.mktemp("store")
    build_store(directory, 8192, pool_tokens=2_000_000)
    return read_store(directory)


def test_a_corpus_has_one_token_per_character_and_the_drawn_lengths(tmp_path):
    made = write_corpus(tmp_path, 300, seed=3)
    assert made.lengths.tolist() == draw_lengths(300, np.random.default_rng(3)).tolist()
    assert made.lengths.max() <= MAX_SEQ_LEN
    assert all(ids[-1] == 1 and 0 < max(ids) < VOCAB_SIZE for pair in examples_of(made, np.arange(9)) for ids in pair)


def test_the_lengths_are_those_of_chatlms_pairs():
    means = draw_lengths(200_000, np.random.default_rng(0)).mean(axis=0)
    assert means == pytest.approx([24, 108], rel=0.02)


def test_a_synthetic_store_has_as_many_tokens_as_its_lengths_say(store):
    ids = np.array([8191, 5, 4096])
    for flat, lengths in zip(store.tokens(ids), store.lengths[ids].astype(int).T, strict=True):
        assert len(flat) == lengths.sum()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fill_is_one_without_recording_and_high_with_it(store, world_size):
    assert epoch_fill(store, world_size, 256 // world_size, []) == (1.0, 0)
    for step_pairs, least in ((256, 0.92), (512, 0.95)):
        buckets = buckets_for(store.lengths, step_pairs // world_size, num_ranks=world_size)
        fill, sizes = epoch_fill(store, world_size, step_pairs // world_size, buckets)
        assert least <= fill < 1
        assert 1 <= sizes <= 9


def test_a_child_over_its_time_limit_is_killed_and_the_others_go_on(tmp_path):
    apart = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(61)'], start_new_session=True)"
    code = f"import subprocess, sys, time; {apart}; print('began', flush=True); time.sleep(60)"
    slow = Job("slow", [sys.executable, "-c", code], 2)
    wrong = Job("wrong", [sys.executable, "-c", "raise SystemExit(3)"], 30)
    done = {d.job.name: d for d in run_jobs([slow, wrong], tmp_path, [dict(SLOT="a")])}
    assert (done["slow"].problem, done["slow"].text) == ("not done after 2 s", "began\n")
    assert done["wrong"].problem == "exit code 3"
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if "import time; time.sleep(61)" in (p.info["cmdline"] or [])
    ]
    assert next(run_jobs([wrong], tmp_path, [{}], total_seconds=0)).problem == "not started: no time left"


def test_the_clock_leaves_out_the_warm_up_and_assigns_steps_to_windows_in_turn():
    clock, ticks = StepClock(torch.device("cpu"), Pace(warm_steps=3, warm_seconds=0, timed_seconds=0, cycle=10)), 0
    while not clock.tick(pairs=2, tokens=torch.tensor(7)):
        ticks += 1
    result = clock.result()
    assert (ticks + 1, result["timed_steps"]) == (3 + 10, 10)
    assert result["tokens_per_second"] == pytest.approx(3.5 * result["pairs_per_second"], rel=1e-6)


def test_the_vote_is_timed_over_the_given_group_and_left_out_without_one(monkeypatch):
    groups, steps = [], [SimpleNamespace(step_seconds=0.002, tokens=6)] * (votes.WARM_STEPS + 3)
    monkeypatch.setattr(votes, "train_steps", lambda context, _: groups.append(context.ranks.cpu_group) or iter(steps))
    ranks = Ranks(0, 2, 0, torch.device("cpu"), "gloo", "the run's group")
    run = SimpleNamespace(ranks=ranks, context=StepContext(ranks, None, None, None, None))
    assert [votes.timed_steps(run, None, group, (40, 3)) for group in ("a group", None)] == [(2, 3000)] * 2
    assert groups == ["a group", None]


def test_the_table_of_several_gpus_sets_each_cell_beside_the_slowest_gpu_and_names_what_went_wrong():
    cell = dict(harness="votes", model="small", optimizer="muon", pairs=256, step_ms=50.0, exchange_ms=4.0, vote_ms=0.1)
    speeds = (1, 5000), (1, 5200), (2, 9500)
    timed = [json.dumps(cell | dict(world=world, tokens_per_second=speed)) for world, speed in speeds]
    one, other = (several_gpus.results_of("scaling", Done(Job("small/1", [], 9), "", 1.0, line)) for line in timed[:2])
    two = several_gpus.results_of("scaling", Done(Job("small/2", [], 9), "", 1.0, f"said\n{timed[2]}\n"))
    hung = several_gpus.results_of("machines", Done(Job("machines", [], 9), "not done after 9 s", 9.0, "waiting"))
    assert [result["wrong"] for result in (*one, *two, *hung)] == ["", "", "", "", "not done after 9 s: waiting"]
    table = list(several_gpus.scaling_table([*one, *other, *two]))
    assert len(table) == 4 and table[-1] == "| small | muon | 256 | 2 | 50.00 | 9,500 | 1.90 | 1.93 | 4.00 | 0.10 |"
    assert list(several_gpus.parts_table([*two, *hung]))[2:] == [
        "| machines | machines | 0 | not done after 9 s: waiting | 9.0 |"
    ]


def test_padding_keeps_every_token_and_masks_the_rest():
    examples = [dict(input_ids=[5, 6, 1], labels=[7, 1]), dict(input_ids=[8, 1], labels=[9, 9, 9, 1])]
    batch = pad(examples, shape=(4, 6))
    assert batch["input_ids"].tolist() == [[5, 6, 1, 0], [8, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[7, 1, -100, -100, -100, -100], [9, 9, 9, 1, -100, -100]]
    assert pad(examples)["labels"].shape == (2, 4)


def test_each_pair_goes_to_the_smallest_shape_that_holds_it():
    assert smallest_shape(np.array([(32, 128), (33, 1), (1, 129), (129, 2), (256, 256)])).tolist() == [
        0,
        2,
        1,
        3,
        3,
    ]


def test_the_mixture_of_padded_shapes_takes_the_sum_of_the_shapes_times():
    cell = dict(model="small", loop="b", problem="", rounds=1, spread=0, step_ms=1, peak_gib=1, first_step_seconds=1)
    parts = [cell | dict(shape=list(shape), pairs=8, pairs_per_second=100.0, name="") for shape in SHAPES]
    (mixture,) = mixtures(parts)
    assert mixture["tokens_per_second"] == pytest.approx(100 * 132, rel=0.02)
    assert list(mixtures(parts[:3])) == []


@pytest.mark.parametrize("mask", kernels.MASKS)
def test_all_compared_attention_methods_compute_the_same(mask):
    has_bias, causal = kernels.MASKS[mask]
    tokens, length, heads, device = 1024, 256, 2, torch.device("cpu")
    q, k, v = torch.randn(3, tokens, heads * 16).mul(0.5).unbind()
    table = torch.randn(kernels.NUM_BUCKETS, heads).requires_grad_() if has_bias else None
    outcomes = []
    for way in (kernels.ours, kernels.rows_with_mask, kernels.dense_by_length):
        prepare, attention = way(tokens, length, heads, causal, device)
        out = attention(q, k, v, prepare(table))
        outcomes.append([out.detach(), *torch.autograd.grad(out.square().sum(), [table])] if has_bias else [out])
    for other in outcomes[1:]:
        for one, expected in zip(other, outcomes[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)


def test_plans_that_cut_a_step_in_the_same_way_share_its_fastest_time(monkeypatch):
    """Four steps of 1,000 tokens: one forward each with 2048 tokens or more, two with 1024. Checkpointing takes twice
    the time, recording a third of it.
    """
    plan, draw, epochs = MemoryPlan(3000, 512, 0, 0), np.random.default_rng(0), []

    def tried_ways(_run, fastest, _warm, plan):
        size, chunk, again = plan.cutting
        if size > 4096 << again:
            return None, 0  # does not fit
        ways = [(step, 1 + (size < 2048), chunk, again, plan.graphs) for step in range(4)]
        for way in ways:
            seconds = way[1] * (1 + again) * draw.uniform(1, 1.5) / (3 if plan.graphs else 1)
            fastest[way] = min(fastest.get(way, seconds), seconds)
        return ways, 4000

    monkeypatch.setattr(caps, "tried_ways", tried_ways)
    monkeypatch.setattr(caps, "train_epoch", lambda _run, plan: epochs.append(plan) or (0, 0))
    speeds = caps.speeds_by_trying(None, plan, 5000, may_record=False)
    speeds = {plan.cutting: per_second for plan, per_second in speeds.items()}
    assert speeds[3000, 512, False] == speeds[4096, 512, False] == speeds[2048, 512, False] > 800
    assert speeds[8192, 512, False] == 0 and speeds[1024, 512, False] < 600 and speeds[8192, 512, True] < 600
    assert not epochs, "only a plan that is faster than the given one must train an epoch"
    speeds = caps.speeds_by_trying(None, plan, 5000, may_record=True)
    assert max(speeds, key=speeds.get) == MemoryPlan(4096, 512, 0, 0, graphs=True) == epochs[0]


def test_a_case_of_a_small_gpu_is_measured(monkeypatch):
    for name, value in dict(VOCAB_SIZE=256, NUM_PAIRS=40, LONGEST=16, TRIED_STEPS=2, TRIED_PAIRS=2, REPEATS=1).items():
        monkeypatch.setattr(caps, name, value)
    record = caps.measure(caps.Case("tiny", 8, 4, "adamw_rms", 16), torch.device("cpu"), 0)
    assert record["out_of_memory_events"] == 0 and record["steps"] == 5
    assert 0 < record["tokens_per_second"] <= record["best_tokens_per_second"]  # the ratio is the machine's noise


def test_the_limit_of_a_step_grows_with_its_pairs_but_for_what_is_done_once():
    sizes, lengths = T5ModelConfig(**MODELS["small"], vocab_size=VOCAB_SIZE), np.array([[24.0, 108.0]] * 8)
    few, many = (step_limit.limits(sizes, lengths, pairs, 8e11, 4.8e9) for pairs in (64, 256))
    once = {"muon's kernels", "adamw's kernels", "copies and zeros"}
    assert {name for name in few if many[name] == few[name]} == once
    assert all(many[name] == pytest.approx(4 * few[name]) for name in few.keys() - once)
    trained = 6 * (count_numbers(T5, sizes).matrices + VOCAB_SIZE * sizes.d_model)  # FLOPs if each side saw each weight
    assert 0.7 < few["products"] * 8e11 / (64 * 108 * trained) < 1


def test_the_loops_of_transformers_have_the_shape_of_ours():
    stock = hf_t5("tiny", "sdpa")
    assert stock.config.decoder_start_token_id == 0 and stock.config.tie_word_embeddings
    ours = TextToTextModel(T5ModelConfig(**MODELS["tiny"], vocab_size=VOCAB_SIZE))
    assert {p.shape for p in stock.parameters()} == {p.shape for p in ours.parameters()}
