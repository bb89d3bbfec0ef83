"""Measure the memory and speed of each profile of run_train.sh on the same pairs.

    python -m bench.profiles --output_dir DIR [--model chatlm] [--seconds 20] [--profiles NAME,…] [--any_field=value]

Each profile is started as a user types it, on one GPU, and asked to stop after --seconds of training. Prints one JSON
line per profile: the plan, median tokens/s and milliseconds per step in the second half of the steps, the peak of the
reserved memory, and the step time relative to the first profile's.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from bench.corpus import write_corpus
from tests.ranks import ROOT, launch, wait_for_launch
from tests.tiny import journal

PROFILES = "deepspeed,stage2_offload,stage3,minimal"
START_SECONDS = 200
CORPUS_PAIRS = 20_000


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--model", default="chatlm")
    parser.add_argument("--pairs", type=int, default=CORPUS_PAIRS, help="pairs in the corpus")
    parser.add_argument("--seconds", type=float, default=20, help="seconds of training")
    parser.add_argument("--profiles", default=PROFILES)
    given, options = parser.parse_known_args()
    folder = given.output_dir.resolve()
    write_corpus(folder, given.pairs)
    first = None
    for name in given.profiles.split(","):
        words = dict(
            model=given.model, tokenizer_dir=folder / "tokenizer", train_file=folder / "train.parquet",
            validation_file=folder / "valid.parquet", output_dir=folder / "runs" / name, epochs=1000, bleu_pairs=0,
            eval_steps=10**6, save_steps=10**6, logging_steps=1,
        )  # fmt: skip
        words = [ROOT / "run_train.sh", "-t", name, *(f"--{option}={value}" for option, value in words.items())]
        process = launch([*words, *options], folder, dict(NUM_PROCESSES="1"))
        train_for(process, folder / "runs" / name / "metrics.jsonl", given.seconds)
        _, text = wait_for_launch(process, folder)
        record = figures(folder / "runs" / name, text)
        first = first or record["step_ms"]
        print(json.dumps(dict(profile=name, model=given.model, **record, times=round(record["step_ms"] / first, 2))))
        sys.stdout.flush()


def train_for(process, path, seconds):
    """Ask the run of `process` to stop `seconds` after the first training line in the journal at `path`."""
    deadline = time.monotonic() + START_SECONDS
    while not (path.exists() and b'"kind":"train"' in path.read_bytes()):
        if process.poll() is not None or time.monotonic() > deadline:
            return
        time.sleep(0.2)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGINT)


def figures(run_dir, text):
    """Plan, speed and peak memory of a run. Raises RuntimeError with the run's output if it did not train."""
    lines = journal(run_dir, "train") if (run_dir / "metrics.jsonl").exists() else []
    if len(lines) < 2:
        raise RuntimeError(f"{run_dir} did not train:\n{text[-2000:]}")
    later = lines[len(lines) // 2 :]
    plan = json.loads((run_dir / "plan.json").read_text())
    return dict(
        plan={name: plan[name] for name in ("micro_batch_tokens", "gradient_checkpointing", "graphs")},
        steps=len(lines), tokens_per_second=round(statistics.median(line["tokens_per_second"] for line in later)),
        step_ms=round(1000 * statistics.median(line["step_seconds"] for line in later), 2),
        reserved_gib=round(max(line.get("reserved_bytes") or 0 for line in later) / 2**30, 2),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
