"""Measure how much a save slows down training, and how long a resume takes at any position.

    python -m bench.saves [--model small] [--processes 1] [--seconds 60] [--every 10] [--deterministic]
    python -m bench.saves --resume

The first command trains for --seconds and saves every --every seconds. The cost of a save is the time that steps during
it take above the median step; it is also printed as a percentage at one save per minute. The second command times a
resume up to its first step, at pair 0 and at pair 10 million of a run of many epochs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from model.run.checkpoint import checkpoint_paths, read_checkpoint, save_checkpoint
from model.run.snapshot import Snapshot
from tests.ranks import send, wait_for
from tests.tiny import NUM_PAIRS, furnish, journal, start, train
from tests.trials import tell, write_section

FAR_PAIRS = 10_000_000
TIMES = 5


def main():
    parser = argparse.ArgumentParser(description="Measure the cost of saves and resumes.")
    parser.add_argument("--model", default="small")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=int, default=10, help="seconds between saves")
    parser.add_argument("--pairs", type=int, default=64, help="per step")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--resume", action="store_true", help="time resumes instead of saves")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder))
        if given.resume:
            resumes(home)
        else:
            saves(home, given)


def saves(home, given):
    lines = (home / "train.jsonl").read_text() * 500
    (home / "many.jsonl").write_text(lines)
    processes = start(
        home, given.processes, output_dir="run", train_file="many.jsonl", model=given.model, epochs=10_000,
        global_batch_size=given.pairs, eval_steps=10**6, save_steps=10**6, save_seconds=given.every,
        deterministic=given.deterministic, log_sample_ids=False,
    )  # fmt: skip
    path, deadline = home / "run" / "metrics.jsonl", time.monotonic() + 300
    while not path.exists() or b'"train"' not in path.read_bytes():
        assert time.monotonic() < deadline and processes[0].is_alive(), (home / "rank0.txt").read_text()
        time.sleep(0.1)
    time.sleep(given.seconds)
    send(processes)
    done = wait_for(processes, home, 120)
    assert not any(done.codes), done.text
    tell(harness="saves", **cost_of_saves(home / "run"))


def cost_of_saves(run_dir):
    """Seconds lost per save, as a percentage too, at one save per minute; bytes and seconds of snapshot and write."""
    times = [line["time"] for line in journal(run_dir, "train")][5:]
    steps = list(zip(times, times[1:], strict=False))
    saved = [line for line in journal(run_dir, "save")[:-1] if line["time"] > times[0]]  # the last one ended the run
    spans = [(s["time"] - s["write_seconds"] - s["snapshot_seconds"], s["time"]) for s in saved]
    in_save = [any(a < end and begin < b for begin, end in spans) for a, b in steps]
    median_seconds = statistics.median(b - a for (a, b), busy in zip(steps, in_save, strict=True) if not busy)
    lost = sum(b - a - median_seconds for (a, b), busy in zip(steps, in_save, strict=True) if busy) / len(saved)
    return dict(
        saves=len(saved), checkpoint_bytes=saved[0]["bytes"], step_seconds=round(median_seconds, 4),
        snapshot_seconds=statistics.median(s["snapshot_seconds"] for s in saved),
        write_seconds=statistics.median(s["write_seconds"] for s in saved),
        lost_seconds_a_save=round(lost, 4), percent_at_one_save_a_minute=round(lost / 60 * 100, 3),
    )  # fmt: skip


def resumes(home):
    """Time resumes at the start of a run and 10 million pairs later."""
    options = dict(epochs=FAR_PAIRS // NUM_PAIRS + 10, save_steps=10**6, log_sample_ids=False)
    seconds = {}
    for name, pairs in (("near", 0), ("far", FAR_PAIRS)):
        done = train(home, 1, "forward:0:3:term", output_dir=name, **options)
        assert done.codes == [0], done.text
        found = read_checkpoint(checkpoint_paths(home / name)[0])
        state = replace(found.state, step=found.state.step + pairs // 8, pairs_seen=found.state.pairs_seen + pairs)
        save_checkpoint(home / name, state, Snapshot(found.tensors, found.optimizer), 2)
        seconds[name] = statistics.median(resume_seconds(home, name, state.step, options) for _ in range(TIMES))
    ratio = seconds["far"] / seconds["near"]
    tell(harness="resumes", near_seconds=seconds["near"], far_seconds=seconds["far"], ratio=round(ratio, 3))
    rows = [[f"{pairs:,}", f"{seconds[name]:.2f}"] for name, pairs in (("near", 0), ("far", FAR_PAIRS))]
    note = f"`python -m bench.saves --resume`, median of {TIMES}, from fork (imports done) to the first step."
    write_section("resumes", "Resume time at any position", ["position in pairs", "seconds"], rows, note)


def resume_seconds(home, name, step, options):
    begun = time.time()
    done = train(home, 1, f"forward:0:{step + 2}:term", output_dir=name, is_keep_training=True, **options)
    assert done.codes == [0], done.text
    took = next(line["time"] for line in journal(home / name, "train") if line["step"] == step + 1) - begun
    for path in checkpoint_paths(home / name)[:-1]:
        if int(path.name.removeprefix("step_")) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    return took


if __name__ == "__main__":
    sys.exit(main())
