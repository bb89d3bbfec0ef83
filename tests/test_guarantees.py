"""Promises of docs/architecture.md that need several processes or a kill to test."""

import functools
import json
import os
import random
import time
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from model.commands.option_values import load_config
from model.data.tokenizer import load_tokenizer
from model.run.run_dir import TOKENS_DIR
from model.train.lr_schedule import LearnRate
from tests.disk_trials import damage_trials, disk_trials
from tests.faulty_runs import killed_run
from tests.parts import open_pairs
from tests.ranks import launch, launcher, run_ranks, wait_for_launch
from tests.tiny import NUM_PAIRS, OPTIONS, ids_by_epoch, journal, train, weights_hash, words
from tests.trials import flip
from train_low_mem import main

EPOCHS, STEPS = OPTIONS["epochs"], 12
EVERY_ID_ONCE = {epoch: list(range(NUM_PAIRS)) for epoch in range(1, EPOCHS + 1)}


@pytest.fixture(scope="module")
def baseline(home):
    """Function of the number of ranks that gives the directory of a run without faults."""

    @functools.cache
    def run(world):
        done = train(home, world, output_dir=f"baseline{world}", dropout=0.1)
        assert done.codes == [0] * world, done.text
        return home / f"baseline{world}"

    return run


# 3. Stopped anywhere and resumed


@pytest.mark.parametrize("world", (1, 2))
def test_promise_3_a_run_killed_at_random_steps_and_inside_saves_ends_with_equal_weights(home, baseline, world):
    draw = random.Random(world)
    sites = draw.sample(["forward", "reduce", "optimizer", "save", "backward_first"], 3)
    steps = sorted(draw.sample(range(2, STEPS + 1), 3))
    faults = [
        f"{site}:{0 if site == 'save' else world - 1}:{step}:kill" for site, step in zip(sites, steps, strict=True)
    ]
    faults.insert(1, f"evaluate:0:{STEPS // 2}:kill")
    name = f"killed{world}"
    for fault in sorted(faults, key=lambda fault: int(fault.split(":")[2])):
        done = train(home, world, fault, output_dir=name, dropout=0.1, is_keep_training="auto")
        assert -9 in done.codes and 0 not in done.codes, f"{fault}: {done}"
    finish_and_compare(home, world, name, baseline)


def test_promise_3_a_resume_with_another_plan_or_number_of_processes_says_that_bits_may_differ(home):
    options, counts = dict(output_dir="replanned", epochs=4), []
    for world, changed in ((1, {}), (1, dict(micro_batch_tokens=64)), (2, dict(micro_batch_tokens=64))):
        faults = f"forward:0:{7 + 2 * len(counts)}:term"
        done = train(home, world, faults, is_keep_training="auto", **options | changed)
        assert done.codes == [0] * world, done.text
        counts.append(done.text.count("bits may differ from step"))
    assert counts == [0, 1, 1]
    lines = [line["bits_may_differ"] for line in journal(home / "replanned", "resume")]
    assert lines == [[], ["plan"], ["processes"]]


@pytest.mark.parametrize("world", (1, 2))
def test_promise_3_a_run_killed_at_any_moment_ends_with_the_weights_of_a_run_that_was_not(home, world):
    shared = dict(reduce_dtype="bf16", optimizer="muon", share_state="True")
    options = dict(epochs=10, save_steps=1) | (shared if world > 1 else {})
    record = killed_run(home, f"cut{world}", world, random.Random(world), kills=5, **options)
    assert record["wrong"] == ""
    assert record["kills"] >= 3, "the run ended before three kills: the test covered too little"


def finish_and_compare(home, world, name, baseline):
    done = train(home, world, output_dir=name, dropout=0.1, is_keep_training=True)
    assert done.codes == [0] * world, done.text
    assert weights_hash(home / name) == weights_hash(baseline(world))
    assert ids_by_epoch(home / name) == EVERY_ID_ONCE
    assert [line["loss"] for line in journal(home / name, "train")] == [
        line["loss"] for line in journal(baseline(world), "train")
    ]
    assert not list((home / name).rglob("*.tmp")), "unfinished files of the killed runs must be deleted"


def test_promise_3_a_run_resumes_with_another_batch_size_and_fewer_ranks(home):
    length = dict(max_steps=STEPS, epochs=None)
    done = train(home, 2, "forward:1:5:kill", output_dir="moved", reduce_dtype="bf16", **length)
    assert done.codes == [1, -9], done.text
    assert "to go on from the newest checkpoint, type:\n" in done.text, done.text
    assert "python train_low_mem.py train --output_dir=moved --is_keep_training=True\n" in done.text, done.text
    assert "gradients are sent in bf16" in done.text and "has no effect" not in done.text, done.text
    done = train(home, 1, output_dir="moved", global_batch_size=6, is_keep_training=True, **length)
    assert done.codes == [0], done.text
    assert "; the 12 of --max_steps count 8 pairs each" in done.text, done.text
    run_dir = home / "moved"
    assert ids_by_epoch(run_dir) == EVERY_ID_ONCE
    assert [(s["world"], s["global_batch"]) for s in journal(run_dir, "start")] == [(2, 8), (1, 6)]
    assert journal(run_dir, "stop")[-1]["reason"] == "finished"
    lines = journal(run_dir, "train")
    assert [line["step"] for line in lines] == list(range(1, lines[-1]["step"] + 1))
    assert lines[-1]["pairs_seen"] == EPOCHS * NUM_PAIRS
    config, seen = load_config("pretrain", OPTIONS), 0
    rate = LearnRate(config.learn_rate, config.lr_schedule, OPTIONS["warmup_steps"] * 8, EPOCHS * NUM_PAIRS)
    for line in lines:  # the schedule counts pairs, and keeps the warm-up of the first start
        middle = (seen + line["pairs_seen"]) / 2
        assert line["learn_rate"] == pytest.approx(rate.at(middle), rel=1e-6)
        seen = line["pairs_seen"]


LONG = dict(epochs=34, warmup_steps=20, learn_rate=1e-3, save_steps=50)
LONG_STEPS = 204


def test_promise_3_a_run_resumed_on_other_numbers_of_ranks_has_the_same_steps(home):
    baseline = train(home, 1, output_dir="alone", **LONG)
    assert baseline.codes == [0], baseline.text
    for world, step in ((2, 40), (1, 80), (4, 120), (3, 160), (2, None)):
        fault = f"forward:all:{step}:term" if step else ""
        done = train(home, world, fault, output_dir="elastic", is_keep_training="auto", **LONG)
        assert done.codes == [0] * world, done.text
    moved, alone = journal(home / "elastic", "train"), journal(home / "alone", "train")
    assert [line["world"] for line in journal(home / "elastic", "start")] == [2, 1, 4, 3, 2]
    assert len(moved) == len(alone) == LONG_STEPS
    for ours, theirs in zip(moved, alone, strict=True):
        for name in ("step", "pairs_seen", "learn_rate", "target_tokens", "tokens"):
            assert ours[name] == theirs[name], f"{name} at step {theirs['step']}"
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
    assert ids_by_step(home / "elastic") == ids_by_step(home / "alone")


def ids_by_step(run_dir):
    """Sorted example ids of each step over all ranks."""
    steps = {}
    for path in run_dir.glob("samples_rank*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["ids"])
    return {step: sorted(ids) for step, ids in steps.items()}


def test_promise_3_a_damaged_newest_checkpoint_a_full_disk_and_a_deleted_directory_lose_no_step(home):
    records = [*damage_trials(home, ("optimizer.safetensors", "manifest.json"), (flip,)), *disk_trials(home, epochs=10)]
    assert {record["trial"]: record["wrong"] for record in records if record["wrong"]} == {}
    assert len(records) == 5


# 4. Out of memory, and a rank that fails


@pytest.mark.parametrize("reduce_dtype", ["float32", "bf16"])
def test_promise_4_out_of_memory_on_the_last_rank_alone_changes_no_bit(home, reduce_dtype):
    same = dict(micro_batch_tokens=64, dropout=0.1, reduce_dtype=reduce_dtype)
    enough, scarce = (home / f"{name}_{reduce_dtype}" for name in ("enough", "scarce"))
    for folder, fault in ((enough, ""), (scarce, "backward:last:3:oom,forward:0:8:cpu")):
        done = train(home, 2, fault, output_dir=folder.name, **same)
        assert done.codes == [0, 0], done.text
    events = journal(scarce, "oom")
    assert [(e["step"], e["rank"], e["before"] == e["after"]) for e in events] == [(3, 1, True), (8, 0, True)]
    assert weights_hash(scarce) == weights_hash(enough)
    assert ids_by_epoch(scarce) == EVERY_ID_ONCE


def test_promise_4_repeated_out_of_memory_shrinks_the_plan_on_all_ranks(home):
    done = train(home, 2, "forward:last:3:oom:3", output_dir="shrunk")
    assert done.codes == [0, 0], done.text
    tokens = [e["after"]["micro_batch_tokens"] for e in journal(home / "shrunk", "oom")]
    assert len(tokens) == 3 and tokens[0] > tokens[1] > tokens[2]
    assert ids_by_epoch(home / "shrunk") == EVERY_ID_ONCE


def test_a_loss_that_is_not_finite_once_changes_no_bit(home, baseline):
    done = train(home, 2, "loss:1:3:nan", output_dir="blip", dropout=0.1)
    assert done.codes == [0, 0], done.text
    assert [(e["step"], e["rank"]) for e in journal(home / "blip", "not_finite")] == [(3, 1)]
    assert weights_hash(home / "blip") == weights_hash(baseline(2))


def test_a_full_disk_loses_a_checkpoint_and_not_the_run(home, baseline):
    done = train(home, 2, "save:0:7:enospc", output_dir="full", dropout=0.1)
    assert done.codes == [0, 0], done.text
    (failed,) = [line for line in journal(home / "full", "save") if "error" in line]
    assert failed["step"] == 7 and "No space left" in failed["error"]
    assert weights_hash(home / "full") == weights_hash(baseline(2))


def test_a_rank_that_fails_ends_all_ranks_under_the_launcher(home):
    process = launch([*launcher("accelerate"), *words(output_dir="failed")], home, dict(CHAT_FAULT="forward:1:3:eio"))
    code, text = wait_for_launch(process, home)
    assert code != 0
    assert "Input/output error (injected)" in text
    last = journal(home / "failed", "train")[-1]
    assert last["step"] == 2 and time.time() - last["time"] < 60


# 7. Each option that the user sets is used


def test_promise_7_the_run_directory_holds_the_options_that_the_user_set(home, baseline):
    stored = json.loads((baseline(2) / "config.json").read_text())
    given = OPTIONS | dict(output_dir="baseline2", dropout=0.1)
    assert {name: stored["config"][name] for name in given} == given
    assert stored["config"] == asdict(load_config("pretrain", given))
    (line,) = journal(baseline(2), "start")
    assert (line["world"], line["global_batch"], line["epochs"], line["total_steps"]) == (2, 8, EPOCHS, STEPS)
    assert line["backend"] == "gloo"
    rates = [line["learn_rate"] for line in journal(baseline(2), "train")]
    assert rates[0] == pytest.approx(3e-2 * 4 / 24)  # the first step's middle, in a warm-up of 3 steps of 8 pairs
    assert 0.9 * 3e-2 < max(rates) <= 3e-2


def test_promise_7_ten_times_the_learning_rate_gives_other_weights(home, baseline):
    done = train(home, output_dir="fast", dropout=0.1, learn_rate=0.3, any_learn_rate=True)
    assert done.codes == [0], done.text
    ours, theirs = (load_file(path / "last" / "model.safetensors") for path in (home / "fast", baseline(1)))
    assert all(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_promise_7_contradicting_options_are_refused_before_anything_is_written(home):
    done = train(home, 2, output_dir="refused", batch_size_per_gpu=3, gradient_accumulation_steps=1, epochs=0)
    assert done.codes == [2, 2], done.text
    assert "epochs=0" in done.text
    done = train(home, 2, output_dir="refused", batch_size_per_gpu=3, gradient_accumulation_steps=1)
    assert done.codes == [2, 2], done.text
    assert "--global_batch_size=8 contradicts" in done.text
    assert not (home / "refused").exists()


def train_at_the_rate_of_the_rank(name):
    return main(words(output_dir=name, learn_rate=[1e-2, 2e-2][int(os.environ["RANK"])]))


def test_promise_7_ranks_that_disagree_on_an_option_stop(home):
    done = run_ranks(2, train_at_the_rate_of_the_rank, "disagreed", folder=home)
    assert done.codes == [1, 1], done.text
    difference = "rank 0 has learn_rate=0.01; rank 1 has learn_rate=0.02"
    assert f"the ranks disagree about the options: {difference}: start them" in done.text
    assert not (home / "disagreed").exists()


# 8. No pickle


def test_promise_8_no_file_of_a_run_is_a_pickle(home, baseline):
    files = [path for folder in (baseline(2), home / "model_save") for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors", "ids.arrow"}
    for path in files:
        assert path.suffix in (
            ".json",
            ".jsonl",
            ".jinja",
            ".md",
            ".safetensors",
            ".arrow",
            ".npy",
            ".png",
            ".lock",
        ) or (path.name == "LATEST"), f"{path} has an unexpected suffix"
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path} looks like a pickle or a zip of pickles"


def test_promise_8_the_token_store_s_arrays_hold_no_objects(home, baseline):
    store = open_pairs(home / "train.jsonl", load_tokenizer(baseline(1) / "tokenizer"), 32, home / TOKENS_DIR)
    assert store.lengths.dtype.hasobject is False and len(store) == NUM_PAIRS
