"""What options do for the quality of a small model: each set of options trained with several seeds, a table row each.

    python -m bench.study --data DIR --output_dir DIR [--seeds 1,2] [--seconds 3000] [--gpus 1]
        -- NAME --option=value … -- NAME --option=value … [--ensemble NAME-1,NAME-2]

DIR of --data has pretrain_train.parquet and pretrain_valid.parquet. A run is `train` with the model small, a vocabulary
of 8,000 and the options of its NAME, in <output_dir>/runs/NAME-SEED; in the options {runs} stands for the directory of
all runs and {seed} for the seed: --teacher={runs}/drop-1/best,{runs}/drop-2/best learns from two runs of the name drop.
Names whose options have {runs} are trained after all others. --ensemble evaluates the mean of the probabilities of the
best/ of these runs. After --seconds, runs are killed; the same command goes on where they were. Figures are those of
the evaluation with the lowest loss, a number for each seed: loss in nats a token, and which evaluation that was; nats a
character; share of greedy answers that loop and that ended; distinct-2; seconds of the whole run.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.children import ROOT, Job, gpu_slots, run_jobs
from model.commands.option_values import load_config
from model.commands.setup import prepare_test
from model.data.packing import cut
from model.run.journal import read_journal
from model.run.run_dir import TOKENIZER_DIR
from model.runtime.distributed import ALONE
from model.train.evaluate import EPOCH, evaluating

BASE = dict(model="small", bleu_pairs=512, plots=False, screen="off")
FILES = dict(train_file="pretrain_train.parquet", validation_file="pretrain_valid.parquet")
FIGURES = dict(loss=".3f", after="d", nats_per_char=".3f", loops=".1%", ended=".1%", distinct_2=".3f", seconds=".0f")


@dataclass(frozen=True)
class Arm:
    name: str
    options: tuple  # words like --option=value


def main():
    own, *parts = split(sys.argv[1:], "--")
    parser = argparse.ArgumentParser(description="What options do for the quality of a small model.")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--vocab_size", type=int, default=8000)
    parser.add_argument("--ensemble", action="append", default=[], help="NAME-SEED,NAME-SEED")
    options = parser.parse_args(own)
    folder, data = options.output_dir.resolve(), options.data.resolve()
    deadline, arms = time.time() + options.seconds, [Arm(name, tuple(words)) for name, *words in parts]
    folder.mkdir(parents=True, exist_ok=True)
    furnish(folder, data, options.vocab_size)
    seeds, failed = options.seeds.split(","), False
    print(f"| name | options | {' | '.join(FIGURES)} |\n| --- | --- |{' --- |' * len(FIGURES)}", flush=True)
    for needs_runs in (False, True):
        stage = [arm for arm in arms if any("{runs}" in word for word in arm.options) == needs_runs]
        jobs = [job_of(arm, seed, folder, data) for arm in stage for seed in seeds]
        for done in run_jobs(jobs, folder / "logs", gpu_slots(options.gpus), deadline - time.time()):
            if done.problem:
                failed = True
                print(f"{done.job.name}: {done.problem}\n{done.text[-2000:]}", file=sys.stderr, flush=True)
        for arm in stage:
            print(row(arm, [folder / "runs" / f"{arm.name}-{seed}" for seed in seeds]), flush=True)
    os.chdir(folder)  # where the runs keep their tokens
    for names in options.ensemble:
        figures = ensemble([folder / "runs" / name for name in names.split(",")], data)
        print(f"| ensemble | {names} | {figures['loss']:.3f} | | {figures['nats_per_char']:.3f} | | | | |", flush=True)
    return int(failed)


def split(words, mark):
    """Lists of the words between the words `mark`."""
    parts = [[]]
    for word in words:
        parts = [*parts, []] if word == mark else [*parts[:-1], [*parts[-1], word]]
    return parts


def furnish(folder, data, vocab_size):
    """Train the tokenizer of all runs, once."""
    if not (folder / TOKENIZER_DIR).is_dir():
        words = [sys.executable, ROOT / "scripts" / "train_tokenizer.py", data / FILES["train_file"]]
        words += ["--output_dir", TOKENIZER_DIR, "--vocab_size", str(vocab_size)]
        subprocess.run(list(map(str, words)), cwd=folder, check=True, stdout=subprocess.DEVNULL)


def job_of(arm, seed, folder, data):
    """The training of an arm with a seed; a run that was begun goes on."""
    values = dict(output_dir=folder / "runs" / f"{arm.name}-{seed}", seed=seed, is_keep_training="auto") | BASE
    values |= {name: data / file for name, file in FILES.items()}
    own = [word.replace("{runs}", str(folder / "runs")).replace("{seed}", seed) for word in arm.options]
    typed = {word.partition("=")[0].lstrip("-") for word in own}
    typed |= {"train_file"} if "mix" in typed else set()
    typed |= {"model"} if "finetune_from_ckp_file" in typed else set()  # its weights set the sizes
    words = [f"--{name}={value}" for name, value in values.items() if name not in typed]
    command = [sys.executable, ROOT / "train_low_mem.py", "train", *words, *own]
    return Job(f"{arm.name}-{seed}", command, math.inf, folder=folder)


def row(arm, run_dirs):
    """The table row of an arm: a figure of each run."""
    found = [figures_of(run_dir) for run_dir in run_dirs]
    cells = [", ".join(format(each[name], form) if name in each else "?" for each in found)
             for name, form in FIGURES.items()]  # fmt: skip
    return f"| {arm.name} | `{' '.join(arm.options)}` | {' | '.join(cells)} |"


def figures_of(run_dir):
    """{name: number} of FIGURES of a run, at its evaluation with the lowest loss; {} if it has none."""
    file = Path(run_dir, "metrics.jsonl")
    lines = read_journal(file) if file.is_file() else []
    evaluations = [line for line in lines if line["kind"] == "eval"]
    if not evaluations:
        return {}
    after, best = min(enumerate(evaluations, 1), key=lambda item: item[1]["loss"])
    known = {name: best[name] for name in FIGURES if name in best}
    return known | dict(after=after, seconds=seconds_of(file))


def seconds_of(file):
    """Seconds of all starts of a run, from the first import to the last line before the next start."""
    total, begun, last = 0.0, None, 0.0
    with open(file, encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if line["kind"] == "start":
                total += (last - begun) if begun is not None else 0.0
                begun = line["time"] - line["startup_seconds"]
            last = line["time"]
    return total + last - begun


def ensemble(run_dirs, data):
    """{loss, nats_per_char} of the validation file by the mean of the runs' probabilities."""
    ranks = replace(ALONE, device=torch.device("cuda", 0)) if torch.cuda.is_available() else ALONE
    prepared = [prepare_test(ranks, stored_config(run_dir, data), set()) for run_dir in run_dirs]
    models, plans = [run.model for run, _ in prepared], [plan for _, plan in prepared]
    evaluation, chunk_tokens = prepared[0][0].evaluation, min(plan.chunk_tokens for plan in plans)
    examples, ids, total, count = evaluation.examples, evaluation.share_ids, 0.0, 0
    for part in cut(ids, examples.lengths(ids, EPOCH), min(plan.micro_batch_tokens for plan in plans) // 2):
        batch, found = examples.batch(part, EPOCH).to(evaluation.model.device), []
        for model in models:
            with evaluating(model):
                found.append(model.token_log_probs(batch, chunk_tokens).double())
        mean, is_target = torch.stack(found).logsumexp(0) - math.log(len(models)), batch.labels >= 0
        total, count = total - mean[is_target].sum().item(), count + int(is_target.sum())
    return dict(loss=total / count, nats_per_char=total / evaluation.share_characters)


def stored_config(run_dir, data):
    """TrainConfig of a run, to evaluate it on the validation file without answers."""
    stored = json.loads((run_dir / "config.json").read_text())["config"]
    own = dict(max_seq_len=stored["max_seq_len"], single_turn=stored["single_turn"], bleu_pairs=0)
    return load_config("pretrain", own | dict(output_dir=run_dir, validation_file=data / FILES["validation_file"]))


if __name__ == "__main__":
    sys.exit(main())
