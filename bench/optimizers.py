"""Compare optimizers on the same pairs: validation loss, and training seconds to the final loss of BASELINE.

    python -m bench.optimizers --output_dir DIR --train_file TRAIN --validation_file VALID [--tokenizer_dir TOKENIZER]
        [--rates muon=0.01,0.02,0.04] [--set epochs=2 ...]

Each optimizer trains at three peak learning rates: train_low_mem.py itself, with the same pairs in the same order, one
run at a time per GPU or on the CPU. Each run adds a line to DIR/results.jsonl; at the end DIR/table.md is written.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch

from bench.children import ROOT, Job, gpu_slots, run_jobs
from model.run.journal import read_journal

RATES = {
    "adamw_rms": (1e-2, 2e-2, 3e-2),
    "adafactor": (5e-3, 1e-2, 2e-2),
    "adamw": (3e-4, 1e-3, 3e-3),
    "muon": (2e-2, 3e-2, 4e-2),
}
BASELINE = ("adamw_rms", 2e-2)
VOCAB_SIZE = 8000
SETTINGS = dict(model="small", epochs=2, warmup_steps=300, bleu_pairs=0, logging_steps=20, eval_steps=100)
HEAD = ("optimizer", "best rate", "validation loss", "other rates", "train s", "train s to the baseline's loss")


def main():
    parser = argparse.ArgumentParser(description="Compare optimizers, each at three learning rates, on the same pairs.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--tokenizer_dir", default="", help=f"default: train one with {VOCAB_SIZE} tokens")
    parser.add_argument("--rates", nargs="*", default=[], help="name=rate,rate,… replaces the rates of an optimizer")
    parser.add_argument("--set", nargs="*", default=[], help="field=value of TrainConfig, for all runs")
    parser.add_argument("--optimizers", default=",".join(RATES))
    parser.add_argument(
        "--together", type=int, default=1, help="runs per GPU at a time; above 1 the seconds are not comparable"
    )
    parser.add_argument("--limit_seconds", type=float, default=540, help="limit of one run")
    parser.add_argument("--minutes", type=float, default=60, help="runs that are unfinished by then are stopped")
    options = parser.parse_args()
    folder = Path(options.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rates = RATES | {name: tuple(map(float, many.split(","))) for name, many in (r.split("=") for r in options.rates)}
    files = {name: Path(getattr(options, name)).resolve() for name in ("train_file", "validation_file")}
    tokenizer = Path(options.tokenizer_dir).resolve() if options.tokenizer_dir else make_tokenizer(folder, files)
    common = SETTINGS | dict(word.split("=", 1) for word in options.set) | files | dict(tokenizer_dir=tokenizer)
    runs = {f"{name}_{rate:g}": (name, rate) for name in options.optimizers.split(",") for rate in rates[name]}
    jobs = [job_of(run, *runs[run], folder, common, options.limit_seconds) for run in runs]
    slots = gpu_slots(torch.cuda.device_count(), options.together)
    results = []
    with open(folder / "results.jsonl", "a") as file:
        for done in run_jobs(jobs, folder / "logs", slots, options.minutes * 60):
            results.append(result_of(done, *runs[done.job.name], folder))
            print(json.dumps(results[-1]), flush=True)
            print(json.dumps(results[-1]), file=file, flush=True)
    text = "\n".join(table(results)) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)


def make_tokenizer(folder, files):
    directory = folder / "tokenizer"
    words = [sys.executable, ROOT / "scripts" / "train_tokenizer.py", files["train_file"]]
    words += ["--output_dir", directory, "--vocab_size", VOCAB_SIZE, "--overwrite"]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    subprocess.run(list(map(str, words)), check=True, env=os.environ | dict(PYTHONPATH=paths))
    return directory


def job_of(run, optimizer, rate, folder, common, limit_seconds):
    """The job of one training, which runs in `folder`."""
    settings = common | dict(optimizer=optimizer, learn_rate=rate, output_dir=folder / "runs" / run)
    options = [f"--{name}={value}" for name, value in settings.items()]
    words = [sys.executable, ROOT / "train_low_mem.py", "train", "--overwrite=True", "--save_steps=1000000", *options]
    return Job(run, words, limit_seconds, folder=folder)


def result_of(done, optimizer, rate, folder):
    """Record of a run; its `curve` has (pairs seen, training seconds, validation loss) of each evaluation."""
    path = folder / "runs" / done.job.name / "metrics.jsonl"
    lines = read_journal(path) if path.exists() else []
    curve, seconds, pairs = [], 0.0, 0
    for line in lines:
        if line["kind"] == "train":  # counts compilation in the first steps, not evaluation and start-up
            seconds, pairs = seconds + line["tokens"] / line["tokens_per_second"], line["pairs_seen"]
        elif line["kind"] == "eval":
            curve.append((pairs, round(seconds, 2), line["loss"]))
    output = [line for line in done.text.splitlines() if line.strip()]
    problem = f"{done.problem}: {output[-1][:160]}" if done.problem and output else done.problem
    return dict(optimizer=optimizer, rate=rate, problem=problem, curve=curve, seconds=round(done.seconds, 1))


def table(results):
    """Markdown lines: the best rate of each optimizer and its seconds to the baseline's final loss; then all curves."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| " + " | ".join("---" for _ in HEAD) + " |"
    target = next((final_loss(r) for r in results if (r["optimizer"], r["rate"]) == BASELINE), math.nan)
    for optimizer in dict.fromkeys(r["optimizer"] for r in results):
        best, *others = sorted((r for r in results if r["optimizer"] == optimizer), key=final_loss)
        rest = "; ".join(f"{r['rate']:g}: {r['problem'] or f'{final_loss(r):.4f}'}" for r in others)
        if final_loss(best) == math.inf:
            yield f"| {optimizer} | | {best['problem'] or 'diverged'} | {rest} | | |"
            continue
        seconds = (seconds for _, seconds, loss in best["curve"] if loss is not None and loss <= target)
        times = f"{best['curve'][-1][1]:.1f} | {next(seconds, 'not reached')}"
        yield f"| {optimizer} | {best['rate']:g} | {final_loss(best):.4f} | {rest} | {times} |"
    yield ""
    counts = sorted({pairs for r in results for pairs, *_ in r["curve"]})
    shown = counts[:: max(len(counts) // 6, 1)]
    yield "| validation loss after pairs | " + " | ".join(f"{pairs:,}" for pairs in shown) + " |"
    yield "| --- |" + " --- |" * len(shown)
    for r in results:
        losses = {pairs: loss for pairs, _, loss in r["curve"] if loss is not None}
        cells = (f"{losses[pairs]:.4f}" if pairs in losses else "" for pairs in shown)
        yield f"| {r['optimizer']} {r['rate']:g} | " + " | ".join(cells) + " |"


def final_loss(result):
    """Validation loss at the end of the run; infinity if it failed before."""
    last = result["curve"][-1][2] if result["curve"] and not result["problem"] else None
    return math.inf if last is None else last


if __name__ == "__main__":
    main()
