"""Out of memory at every site of a run, on the CPU. `python -m bench.faults` covers all errors, ranks and worlds."""

import ctypes
import functools
import gc
import json
import os

import pytest
import torch

import train_low_mem
from model.runtime.device_memory import monitor_gpu_memory, release_memory
from model.train.flat_optimizer import FlatOptimizer
from tests.faulty_runs import RANKS, SITES, calm_run, checks, faulty_run, options
from tests.tiny import journal, start, train, wait_for


@pytest.fixture(scope="module")
def baseline(home):
    return functools.cache(functools.partial(calm_run, home, kind_options={}))


@pytest.mark.parametrize(
    "world, errors", ((2, zip(RANKS, ("real", "cublas", "oom"), strict=True)), (4, [("last", "nccl+cudnn+cpu")]))
)
def test_promise_4_out_of_memory_at_every_site_on_any_rank_changes_no_bit(home, baseline, world, errors):
    for rank, kind in errors:
        record = faulty_run(home, (world, rank, kind), *baseline(world), {})
        assert not record["wrong"], record
        assert len(record["sites"]) == len(SITES) - (rank == "last"), record


def tear_the_fifth_update(words):
    """`main`; rank 1 runs out of memory in its fifth update, after half of its weights and all its state changed."""
    update, calls = FlatOptimizer.update, []

    def torn(optimizer, rate, *args):
        calls.extend([rate] if rate else [])  # the dry run's rate is 0
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        update(optimizer, rate, *args)
        if rate and len(calls) == 5 and os.environ["RANK"] == "1":
            with torch.no_grad():
                for p, old in list(zip(params, before, strict=True))[len(params) // 2 :]:
                    p.copy_(old)
            raise torch.OutOfMemoryError("CUDA out of memory, in the middle of an update")

    FlatOptimizer.update = torn
    return train_low_mem.main(words)


def test_promise_4_all_ranks_go_back_to_the_checkpoint_after_an_update_that_one_rank_left_half_done(home, baseline):
    baseline_dir, _ = baseline(2)
    given = options(2, {}) | dict(output_dir="torn", save_steps=3)
    done = wait_for(start(home, 2, function=tear_the_fifth_update, **given), home)
    assert done.codes == [0, 0], done.text
    assert "rank 1 ran out of memory in the update of step 5: going back to the checkpoint" in done.text
    assert [line["step"] for line in journal(home / "torn", "resume")] == [0, 3]
    held = checks(home / "torn", baseline_dir)
    assert all(held.values()), held


def test_repeated_failures_of_the_update_end_the_run_only_if_no_checkpoint_was_saved_between_them(home):
    far = ",".join(f"update:0:{number}:oom" for number in (2, 4, 6, 8))
    done = train(home, 1, far, output_dir="far")
    assert done.codes == [0], done.text
    done = train(home, 1, "update:0:4:oom:9", output_dir="near")
    assert done.codes == [1] and "memory ran out in 3 updates" in done.text


@pytest.mark.parametrize("end, faults", [("finished", "save:0:12:oom"), ("asked", "forward:0:5:int,save:0:5:oom")])
def test_promise_4_out_of_memory_in_the_last_save_loses_no_step(home, end, faults):
    done = train(home, 1, faults, output_dir=end, save_steps=1000)
    assert done.codes == [0], done.text
    (stop,) = journal(home / end, "stop")
    assert stop["reason"] == end and (home / end / "last" / "model.safetensors").exists()
    last = journal(home / end, "save")[-1]
    assert "error" not in last and last["step"] == stop["step"]


def test_too_many_steps_that_are_not_finite_end_the_run_with_all_their_ids_in_the_journal(home):
    bad = range(8, 19)  # two epochs end among them
    faults = ",".join(f"loss:0:{step}:nan:2" for step in bad)
    done = train(home, 1, faults, output_dir="bad", epochs=4, save_steps=1000)
    assert done.codes == [1] and "11 steps in a row were skipped" in done.text
    skips = journal(home / "bad", "skip")
    assert [line["step"] for line in skips] == list(bad) and all(line["ids"] for line in skips)
    assert [(line["step"], line["reason"]) for line in journal(home / "bad", "stop")] == [(18, "failed")]
    assert (home / "bad" / "checkpoints" / "LATEST").read_text() == "step_00000006", "weights in doubt are not saved"
    assert train(home, 1, output_dir="bad", epochs=4, is_keep_training=True).codes == [0]


def test_a_save_that_is_due_after_a_step_that_is_not_finite_waits_for_the_next_finite_step(home):
    faults = "loss:0:4:nan:2,loss:0:6:nan:2,loss:0:7:nan:2"  # 4: a save, 6: an epoch's end
    assert train(home, 1, faults, output_dir="waits", epochs=2, save_steps=4).codes == [0]
    saved, evaluated = ([line["step"] for line in journal(home / "waits", kind)] for kind in ("save", "eval"))
    assert sorted(set(saved)) == [5, 8, 12] and evaluated == [6, 12]


def test_a_kill_does_not_lose_the_evaluation_that_is_due_after_a_step_that_is_not_finite(home):
    options = dict(output_dir="cut", epochs=2, save_steps=4)
    kills = "evaluate:0:6:kill,evaluate:0:7:slow,evaluate:0:7:kill"  # at whichever step it runs
    assert train(home, 1, f"loss:0:6:nan:2,{kills}", **options).codes == [-9]
    assert train(home, 1, **options, is_keep_training="auto").codes == [0]
    assert [line["step"] for line in journal(home / "cut", "eval")] == [6, 12]


def test_a_stop_after_a_step_that_is_not_finite_waits_for_the_next_finite_step(home):
    faults = "forward:0:8:int,loss:0:8:nan:2,loss:0:9:nan:2"
    assert train(home, 1, faults, output_dir="doubted", epochs=4).codes == [0]
    assert (home / "doubted" / "checkpoints" / "LATEST").read_text() == "step_00000010"
    assert [(line["step"], line["reason"]) for line in journal(home / "doubted", "stop")] == [(10, "asked")]


@pytest.mark.parametrize(("bad", "code", "latest"), [((12,), 0, 12), ((11, 12), 1, 6)])
def test_a_run_finishes_if_only_its_last_step_is_not_finite_and_fails_if_the_last_two_are(home, bad, code, latest):
    faults, run = ",".join(f"loss:0:{step}:nan:2" for step in bad), f"end{len(bad)}"
    done = train(home, 1, faults, output_dir=run, epochs=2, save_steps=1000)
    assert done.codes == [code], done.text
    assert (home / run / "checkpoints" / "LATEST").read_text() == f"step_{latest:08d}"


STEP_SITES = ("forward", "loss", "backward_first", "backward", "reduce", "optimizer", "update")
LIBC, M_ARENA_MAX = ctypes.CDLL(None), -8  # of malloc.h
WIDE = dict(d_model=128, d_ff=256, num_heads=2, d_kv=64, num_layers=1, num_decoder_layers=1)


def record_memory_after_each_step(words):
    """`main`; after each step it empties the caches and appends the bytes this process holds to memory.jsonl."""
    LIBC.mallopt(M_ARENA_MAX, 1)  # else a new thread may get an arena of its own: 0.7 MiB that stay, but no leak
    gc.freeze()  # excludes the imported modules: a collection then takes milliseconds
    write_events = train_low_mem.write_events

    def write_events_and_memory(run, journal, samples, result):
        write_events(run, journal, samples, result)
        release_memory()
        LIBC.malloc_trim(0)
        with open("/proc/self/status") as status, open("memory.jsonl", "a") as out:
            host = next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
            gpu = monitor_gpu_memory()
            out.write(json.dumps(dict(step=result.step, host=host) | gpu) + "\n")

    train_low_mem.write_events = write_events_and_memory
    return train_low_mem.main(words)


def memory_around_100_errors(home, run_dir, **changes):
    """(memory before 100 out of memory errors, memory after the last, bytes of one gradient).

    Each site fails once before: the first error of a kind imports and caches what stays.
    """
    (home / "wide.json").write_text(json.dumps(WIDE))
    sites = {number: (STEP_SITES[number % 7], "evaluate", "evaluate", "generate", "save") for number in range(7, 34)}
    faults = [f"{site}:0:{number}:oom" for number, names in sites.items() for site in names]
    given = dict(
        model="wide.json", epochs=6, micro_batch_tokens=64, eval_steps=1, bleu_pairs=2, max_new_tokens=4,
        output_dir=run_dir,
    )  # fmt: skip
    processes = start(home, 1, ",".join(faults), function=record_memory_after_each_step, **given | changes)
    done = wait_for(processes, home, 240)
    assert done.codes == [0] and done.text.count(":oom fires") == 35 + 100, done.text
    lines = [json.loads(line) for line in (home / "memory.jsonl").read_text().splitlines()]
    (home / "memory.jsonl").unlink()
    before = next(line for line in lines if line["step"] == 14)  # before its evaluation and save
    return before, lines[-1], 4 * journal(home / run_dir, "start")[0]["parameters"]


def test_promise_4_a_process_leaks_no_memory_in_100_out_of_memory_errors(home):
    before, after, gradient_bytes = memory_around_100_errors(home, "hundred", env=dict(CUDA_VISIBLE_DEVICES=""))
    growth_bytes = after["host"] - before["host"]
    assert growth_bytes < gradient_bytes < 0.02 * before["host"], f"{growth_bytes / 2**20:.2f} MiB more than {before}"


@pytest.mark.gpu
def test_promise_4_a_run_leaks_no_gpu_memory_in_100_out_of_memory_errors(home):
    before, after, _ = memory_around_100_errors(home, "hundred_gpu")
    for what in ("allocated_bytes", "reserved_bytes"):
        assert after[what] <= 1.02 * before[what], (what, before, after)


def test_a_step_that_never_fits_ends_the_run_with_a_checkpoint_and_the_reason(home):
    done = train(home, 2, "forward:last:3:oom:1000", output_dir="never")
    assert done.codes == [1, 1], done.text
    assert "out of memory with the smallest plan" in done.text and "--is_keep_training=True" in done.text
    assert (home / "never" / "checkpoints" / "LATEST").read_text() == "step_00000002"
    assert journal(home / "never", "stop")[-1]["reason"] == "failed"


def test_plan_json_holds_the_predicted_bytes_by_phase_and_the_limits(home, baseline):
    baseline_dir, _ = baseline(2)
    stored = json.loads((baseline_dir / "plan.json").read_text())
    assert set(stored["phases"]) == {"load", "first_step", "step", "evaluation", "generation", "save"}
    assert all(phase["predicted"] > 0 for phase in stored["phases"].values())
    assert stored["micro_batch_tokens"] == 64
    limits = journal(baseline_dir, "start")[0]["memory"]
    assert limits.pop("step_seconds") > 0 and limits.pop("keeps_graphs")
    assert limits == dict(cap_bytes=0, non_torch_bytes=0, other_process_bytes=0, allocator_limit_bytes=None), (
        "none on a CPU"
    )
    assert limits.items() <= stored.items()


def test_promise_4_answers_that_never_fit_end_the_run_with_a_checkpoint_and_the_remedy(home):
    answering = dict(bleu_pairs=4, max_new_tokens=4, epochs=1)
    done = train(home, 2, "generate:1:6:oom:50", output_dir="mute", **answering)
    assert done.codes == [1, 1] and "Traceback" not in done.text and "--max_new_tokens" in done.text, done.text
    last = journal(home / "mute", "oom")[-1]
    assert (last["where"], last["before"]["answers"], last["after"]) == ("anywhere", 1, None)
    assert [line["reason"] for line in journal(home / "mute", "stop")] == ["failed"]
    done = train(home, 2, output_dir="mute", is_keep_training=True, **answering)
    assert done.codes == [0, 0], done.text
