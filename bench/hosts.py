"""Measure the host memory of a run on two processes, including tokenising: does it fit on a desktop with 16 GB?

    python -m bench.hosts [--pairs 200000] [--processes 2] [--model small] [--seconds 60] [--any_field=value]

Makes a corpus of --pairs pairs. Starts the run with accelerate launch where nothing is tokenised yet, so it tokenises
first, and stops it after --seconds of training with evaluations, answers and checkpoints. Every 0.2 s it sums the
proportional set sizes of the launcher and all its descendants; this counts a page that several processes share once.
Prints one JSON line; exit code 1 if the peak exceeds LIMIT_GIB.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bench.corpus import write_corpus
from tests.ranks import launch, launcher, wait_for_launch
from tests.tiny import journal
from tests.trials import hardware, tell

LIMIT_GIB = 7.0
SAMPLE_SECONDS = 0.2
OPTIONS = dict(
    output_dir="run", tokenizer_dir="tokenizer", train_file="train.parquet", validation_file="valid.parquet",
    epochs=1000, eval_steps=20, save_seconds=10, bleu_pairs=20, max_new_tokens=32,
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model", default="small")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of training")
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_corpus(home, given.pairs)
        shutil.rmtree(home / "model_save")  # its tokens
        words = [f"--{name}={value}" for name, value in (OPTIONS | dict(model=given.model)).items()] + options
        process = launch([*launcher("accelerate", given.processes), "train", *words], home)
        phases = watch(process, home / "run" / "metrics.jsonl", given.seconds)
        _, text = wait_for_launch(process, home)  # the exit code says little: launchers also return 1 after a stop
        stopped = "training" in phases and [line["reason"] for line in journal(home / "run", "stop")]
    if stopped != ["asked"]:
        raise RuntimeError(f"the run ended before it was asked to stop; phases {phases}:\n{text[-4000:]}")
    peak = max(phase["peak_gib"] for phase in phases.values())
    tell(harness="hosts", on=hardware(), processes=given.processes, pairs=given.pairs, **phases, peak_gib=peak)
    return 1 if peak > LIMIT_GIB else 0


def watch(process, path, seconds):
    """{phase: peak_gib of the summed memory and seconds}; stops the run after `seconds` of training.

    `path` is the run's journal: the phase is "tokenising" until its first train line, then "training".
    """
    phases, training_since = {}, None
    while process.poll() is None:
        now = time.monotonic()
        if training_since is None and path.exists() and b'"kind":"train"' in path.read_bytes():
            training_since = now
        phase = phases.setdefault("training" if training_since else "tokenising", dict(peak_gib=0.0, since=now))
        phase |= dict(peak_gib=max(phase["peak_gib"], summed_gib(process.pid)), until=now)
        if training_since and now > training_since + seconds:
            os.kill(process.pid, signal.SIGINT)
            seconds = float("inf")
        time.sleep(SAMPLE_SECONDS)
    return {
        name: dict(peak_gib=round(phase["peak_gib"], 3), seconds=round(phase["until"] - phase["since"], 1))
        for name, phase in phases.items()
    }


def summed_gib(pid):
    """Sum of the proportional set sizes of a process and its descendants in GiB; ended processes count 0."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total / 2**30


if __name__ == "__main__":
    sys.exit(main())
