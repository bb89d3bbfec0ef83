"""The speed of training with dropout beside the same training without it, alternating, each in its own process.

    python -m bench.dropout_speed --corpus DIR [--model small] [--pairs 64,128,256] [--dropout 0.1] [--any_field=value]

DIR is created if it does not exist. Prints one JSON line per number of pairs: tokens per second (medians over the
rounds), their quotient, and the peak of the memory. A process that fails is named with its last lines, exit code 1.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from bench.children import Job, run_jobs
from bench.clock import Pace, StepClock
from bench.corpus import write_corpus

CORPUS_PAIRS, LIMIT_SECONDS = 51_200, 600


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--corpus_pairs", type=int, default=CORPUS_PAIRS)
    parser.add_argument("--model", default="small")
    parser.add_argument("--pairs", default="64,128,256", help="per step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm_steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=6, help="timed, per process")
    parser.add_argument("--child", action="store_true", help="time one training and print its figures")
    given, words = parser.parse_known_args()
    if given.child:
        print(json.dumps(time_training(given, words)))
        return
    if not given.corpus.exists():
        write_corpus(given.corpus, given.corpus_pairs)
    failed = [not compare(given, pairs, words) for pairs in given.pairs.split(",")]
    raise SystemExit(any(failed))


def compare(given, pairs, words):
    """Print the line of one number of pairs; returns whether all its processes succeeded."""
    kinds = (0.0, given.dropout)
    jobs = [job_of(given, pairs, number, dropout, words) for number in range(given.rounds) for dropout in kinds]
    results = {dropout: [] for dropout in kinds}
    for done in run_jobs(jobs, given.corpus / "logs", [{}]):
        if done.problem:
            print(f"{done.job.name}: {done.problem}\n{done.text[-2000:]}", file=sys.stderr, flush=True)
            return False
        figures = json.loads(done.text.splitlines()[-1])
        results[figures["dropout"]].append(figures)
    without, with_dropout = (figures_of(results[dropout]) for dropout in kinds)
    quotient = with_dropout["tokens_per_second"] / without["tokens_per_second"]
    record = dict(bench="dropout_speed", model=given.model, pairs=int(pairs), dropout=given.dropout)
    record |= dict(quotient=round(quotient, 3), without=without, with_dropout=with_dropout)
    print(json.dumps(record), flush=True)
    return True


def figures_of(rounds):
    """Medians over the rounds; whether steps were recorded, and the spread of the rounds' speeds."""
    names = ("tokens_per_second", "step_ms", "peak_gib", "tokens_per_cpu_second")
    medians = {name: round(statistics.median(figures[name] for figures in rounds), 3) for name in names}
    speeds = [figures["tokens_per_second"] for figures in rounds]
    spread = round(max(speeds) / min(speeds) - 1, 3)
    return medians | dict(spread=spread, recorded=rounds[0]["plan"]["graphs"], plan=rounds[0]["plan"])


def job_of(given, pairs, number, dropout, words):
    """The child process that times one training."""
    own = dict(corpus=given.corpus.resolve(), model=given.model, pairs=pairs, dropout=dropout)
    own |= dict(warm_steps=given.warm_steps, seconds=given.seconds)
    options = [f"--{name}={value}" for name, value in own.items()]
    line = [sys.executable, "-m", "bench.dropout_speed", "--child", *options, *words]
    env = dict(PYTORCH_ALLOC_CONF="expandable_segments:True", HF_HUB_OFFLINE="1")  # as train_low_mem.py sets them
    return Job(f"{pairs}_pairs_dropout_{dropout}_{number}", line, LIMIT_SECONDS + 3 * given.seconds, env)


def time_training(given, words):
    """Figures of one training, as bench.clock.StepClock gives them, its plan and its dropout."""
    from bench.loops import train_ours  # transformers takes seconds to import

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    options = dict(word.lstrip("-").split("=", 1) for word in words) | dict(dropout=given.dropout)
    name = f"dropout_speed_{given.pairs}_{given.dropout}"
    cell = dict(model=given.model, pairs=int(given.pairs), rounds=1, name=name, options=options)
    clock = StepClock(device, Pace(given.warm_steps, 1, given.seconds), forgets_peak=False)
    ended = train_ours(cell, given.corpus, clock)
    return clock.result() | ended | dict(dropout=given.dropout)


if __name__ == "__main__":
    main()
