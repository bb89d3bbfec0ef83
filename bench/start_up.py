"""Where the seconds of two real trainings go, from command to exit, and how soon their first step is done.

    python -m bench.start_up --data DIR --tokenizer DIR --output_dir DIR [--model small] [--epochs 5,3] [--pairs N]

--data holds pretrain_train, pretrain_valid, sft_train and sft_valid.parquet. `pretrain` is `train_low_mem.py train`,
128 pairs a step, `sft` is `./train_sft_custom.sh 20` from the best/ of the pre-training before. Each runs cold for one
epoch, without compiled kernels (the first of all) and stored tokens, then warm for all its epochs. `torch` is a process
that imports torch and starts CUDA, alone, measured before and after. Prints a JSON line a run, then a table.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from bench.children import ROOT, Job, gpu_slots, run_jobs
from model.display.durations import durations
from model.run.journal import read_journal

LIMIT_SECONDS = 400
TORCH = "import torch; torch.zeros(1, device='cuda' if torch.cuda.is_available() else 'cpu').item()"
FILES = ("pretrain_train", "pretrain_valid", "sft_train", "sft_valid")


def main():
    parser = argparse.ArgumentParser(description="Where the seconds of two real trainings go.")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--model", default="small")
    parser.add_argument("--epochs", default="5,3", help="of the warm pre-training and fine-tuning")
    parser.add_argument("--pairs", type=int, default=0, help="take only the first pairs of each file; 0: all")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--parts", default="pretrain-cold,pretrain-warm,sft-cold,sft-warm")
    options = parser.parse_args()
    folder = options.output_dir.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--output_dir={folder} is not empty: a cold start needs an empty one")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    furnish(folder, options)
    lines = [torch_line(folder, 0)]
    for part in options.parts.split(","):
        lines.append(run_part(part, folder, options))
    lines.append(torch_line(folder, 1))
    print(table(lines), flush=True)
    return 1 if any(line["problem"] for line in lines) else 0


def furnish(folder, options):
    """Copy the data, or the first rows of it, and the tokenizer into `folder`."""
    import pyarrow.parquet as pq

    (folder / "data").mkdir(parents=True)
    shutil.copytree(options.tokenizer, folder / "tokenizer")
    for name in FILES:
        rows = pq.read_table(options.data / f"{name}.parquet")
        pq.write_table(rows.slice(0, options.pairs or len(rows)), folder / "data" / f"{name}.parquet")


def torch_line(folder, number):
    """The measurement of a process that only imports torch and starts CUDA."""
    line = dict(part="torch", seconds=0.0)
    return line | timed(f"torch-{number}", [sys.executable, "-c", TORCH], folder)


def run_part(part, folder, options):
    """Run a part and print its JSON line, which is returned."""
    kind, warmth = part.split("-")
    run_dir = folder / "runs" / part
    words = words_of(kind, folder, options.model, run_dir)
    epochs = dict(zip(("pretrain", "sft"), options.epochs.split(","), strict=True))[kind] if warmth == "warm" else 1
    line = dict(part=part) | timed(part, [*words, f"--epochs={epochs}"], folder)
    if not line["problem"]:
        line |= spent_in(run_dir, line["seconds"])
    print(json.dumps(line), flush=True)
    return line


def timed(name, words, folder):
    """{seconds, problem} of a command, with compile caches in `folder`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the launcher's python3 is this one
    caches = dict(TRITON_CACHE_DIR=str(folder / "caches"), HF_HUB_OFFLINE="1", PATH=path)
    (done,) = run_jobs([Job(name, words, LIMIT_SECONDS, caches)], folder / "logs", gpu_slots(0))
    if done.problem:
        print(done.text[-3000:], file=sys.stderr, flush=True)
    return dict(seconds=round(done.seconds, 2), problem=done.problem)


def words_of(kind, folder, model, run_dir):
    """The command line of a run without its epochs."""
    files = [f"--{role}_file={folder / 'data' / f'{kind}_{role[:5]}.parquet'}" for role in ("train", "validation")]
    files.append(f"--output_dir={run_dir}")
    if kind == "sft":
        start = max(folder.glob("runs/pretrain-*/best"), key=os.path.getmtime)
        return [ROOT / "train_sft_custom.sh", 20, f"--finetune_from_ckp_file={start}", *files]
    own = [f"--model={model}", "--batch_size_per_gpu=64", f"--tokenizer_dir={folder / 'tokenizer'}"]
    return [sys.executable, ROOT / "train_low_mem.py", "train", *own, *files]


def spent_in(run_dir, seconds):
    """Seconds of a finished run by what they were spent on, from its journal."""
    lines = read_journal(run_dir / "metrics.jsonl")
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("start", "eval", "save", "stop")}
    startup, evaluations = by_kind["stop"][-1]["startup"], by_kind["eval"]
    spent = durations(lines, time.time())
    answers = [line.get("answer_seconds", 0.0) for line in evaluations]
    first_step_at = sum(startup.values())
    values = startup | dict(
        first_step_at=first_step_at, start_up=spent["start-up"], steps=spent["steps"],
        evaluations=spent["evaluation"] - sum(answers), answers=sum(answers),
        first_answers=answers[0] if answers else 0.0, saves=spent["saves"],
        end=lines[0]["time"] - spent["start-up"] + seconds - by_kind["stop"][-1]["time"],
        outside_steps=seconds - spent["steps"],
    )  # fmt: skip
    return {name: round(value, 2) for name, value in values.items()}


def table(lines):
    """The figures as a Markdown table, a column a run."""
    names = dict.fromkeys(key for line in lines for key in line if key not in ("part", "problem"))
    head = ["| seconds |", *(f" {line['part']} |" for line in lines)]
    rows = [
        "".join([f"| {name.replace('_', ' ')} |", *(f" {line.get(name, '')} |" for line in lines)]) for name in names
    ]
    return "\n".join(["".join(head), "| --- |" + " --- |" * len(lines), *rows])


if __name__ == "__main__":
    sys.exit(main())
