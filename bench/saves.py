"""Measure how much a save slows down training.

    python -m bench.saves [--model small] [--processes 1] [--seconds 60] [--every 10] [--deterministic]

Trains for --seconds and saves every --every seconds. The cost of a save is the time that steps during it take above the
median step; it is also printed as a percentage at one save per minute. How long a resume takes: bench.data_scale.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.ranks import send, wait_for
from tests.tiny import furnish, journal
from tests.trials import Disturbed, tell


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=int, default=10, help="seconds between saves")
    parser.add_argument("--pairs", type=int, default=64, help="per step")
    parser.add_argument("--deterministic", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        saves(furnish(Path(folder)), given)


def saves(home, given):
    """Train in `home`, then stop the run and tell the cost of its saves."""
    lines = (home / "train.jsonl").read_text() * 500
    (home / "many.jsonl").write_text(lines)
    run = Disturbed(
        home, "run", given.processes, train_file="many.jsonl", model=given.model, epochs=10_000, dropout=0,
        global_batch_size=given.pairs, eval_steps=10**6, save_steps=10**6, save_seconds=given.every,
        deterministic=given.deterministic, log_sample_ids=False,
    )  # fmt: skip
    processes = run.start()
    assert run.wait_for("first step", run.lines, processes, 300), (home / "rank0.txt").read_text()
    time.sleep(given.seconds)
    send(processes)
    done = wait_for(processes, home, 120)
    assert not any(done.codes), done.text
    tell(harness="saves", **cost_of_saves(run.dir))


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


if __name__ == "__main__":
    sys.exit(main())
