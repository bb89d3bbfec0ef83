"""Where the seconds of two real trainings go, from command to exit, and how soon their first step is done.

    python -m bench.start_up --output_dir DIR [--data DIR --tokenizer DIR] [--model small] [--epochs 5,3] [--pairs N]

--data holds pretrain_train, pretrain_valid, sft_train and sft_valid.parquet; without it all are synthetic pairs.
`pretrain` is `train_low_mem.py train`, 128 pairs a step, `sft` is `./train_sft_custom.sh 20` from the best/ of the
pre-training before. Each runs cold for one epoch, without compiled kernels (the first of all) and stored tokens, then
warm for all its epochs. `trainer` is transformers' Seq2SeqTrainer in place of the warm `sft`: 20 pairs a forward and
two forwards a step like ours, or its best number of pairs (--large), in bf16 with SDPA, grouping by length and fused
AdamW; it tokenises, computes the loss of the validation pairs and saves after each epoch, but answers nothing. `torch`
is a process that imports torch and starts CUDA, alone, measured before and after. Prints a JSON line a run, then a
table.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from bench.children import ROOT, Job, gpu_slots, run_jobs
from bench.corpus import MAX_SEQ_LEN, write_corpus
from bench.runs import open_pairs
from model.data.tokenizer import load_tokenizer
from model.display.durations import durations
from model.run.journal import read_journal

LIMIT_SECONDS = 400
TORCH = "import torch; torch.zeros(1, device='cuda' if torch.cuda.is_available() else 'cpu').item()"
FILES = ("pretrain_train", "pretrain_valid", "sft_train", "sft_valid")
SFT_PAIRS = 20


def main():
    parser = argparse.ArgumentParser(description="Where the seconds of two real trainings go.")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--model", default="small")
    parser.add_argument("--epochs", default="5,3", help="of the warm pre-training and fine-tuning")
    parser.add_argument("--pairs", type=int, default=0, help="take only the first pairs of each file; 0: all")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--large", type=int, default=128, help="pairs per step at which Seq2SeqTrainer is fastest")
    parser.add_argument("--parts", default="pretrain-cold,pretrain-warm,sft-cold,sft-warm,trainer-same,trainer-large")
    parser.add_argument("--trainer", default="", help=argparse.SUPPRESS)  # JSON of a trainer's part, for its process
    options = parser.parse_args()
    folder = options.output_dir.resolve()
    if options.trainer:
        return train_trainer(json.loads(options.trainer), folder)
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
    """Copy the data, or the first rows of it, and the tokenizer into `folder`; without data make them."""
    import pyarrow.parquet as pq

    (folder / "data").mkdir(parents=True)
    made_up = folder / "corpus"
    if not options.data:
        write_corpus(made_up, options.pairs or 5000)
    shutil.copytree(options.tokenizer or made_up / "tokenizer", folder / "tokenizer")
    for name in FILES:
        file = options.data / f"{name}.parquet" if options.data else made_up / f"{name.split('_')[1]}.parquet"
        rows = pq.read_table(file)
        pq.write_table(rows.slice(0, options.pairs or len(rows)), folder / "data" / f"{name}.parquet")


def torch_line(folder, number):
    """The measurement of a process that only imports torch and starts CUDA."""
    line = dict(part="torch", seconds=0.0)
    return line | timed(f"torch-{number}", [sys.executable, "-c", TORCH], folder)


def run_part(part, folder, options):
    """Run a part and print its JSON line, which is returned."""
    kind, warmth = part.split("-")
    run_dir = folder / "runs" / part
    pretrain, sft = options.epochs.split(",")
    epochs = 1 if warmth == "cold" else pretrain if kind == "pretrain" else sft
    if kind == "trainer":
        pairs, rounds = (SFT_PAIRS, 2) if warmth == "same" else (options.large, 1)
        cell = dict(name=part, pairs=pairs, rounds=rounds, epochs=int(epochs), compile=False, static=False)
        words = [sys.executable, "-m", "bench.start_up", "--output_dir", folder, "--trainer", json.dumps(cell)]
    else:
        words = [*words_of(kind, folder, options.model, run_dir), f"--epochs={epochs}"]
    line = dict(part=part) | timed(part, words, folder)
    if not line["problem"] and kind != "trainer":
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
        return [ROOT / "train_sft_custom.sh", SFT_PAIRS, f"--finetune_from_ckp_file={pretrained(folder)}", *files]
    own = [f"--model={model}", "--batch_size_per_gpu=64", f"--tokenizer_dir={folder / 'tokenizer'}"]
    return [sys.executable, ROOT / "train_low_mem.py", "train", *own, *files]


def pretrained(folder):
    """What the fine-tunings start from: the best model of the last pre-training."""
    return max(folder.glob("runs/pretrain-*/best"), key=os.path.getmtime)


def train_trainer(cell, folder):
    """Fine-tune with transformers' Seq2SeqTrainer, with the settings that make it fast."""
    import torch
    from transformers import Seq2SeqTrainer, T5ForConditionalGeneration  # they take seconds to import

    from bench.loops import pad, trainer_arguments, trainer_rows

    own, start = folder / "runs" / cell["name"], pretrained(folder)
    train, valid = (
        trainer_rows(open_pairs(folder / "data" / file, load_tokenizer(start), MAX_SEQ_LEN, own / "tokens"))
        for file in ("sft_train.parquet", "sft_valid.parquet")
    )
    args = trainer_arguments(
        cell, own, num_train_epochs=cell["epochs"], lr_scheduler_type="cosine", warmup_steps=20, logging_steps=10,
        eval_strategy="epoch", per_device_eval_batch_size=32, prediction_loss_only=True, save_strategy="epoch",
        save_total_limit=2, dataloader_persistent_workers=torch.cuda.is_available(),
    )  # fmt: skip
    model = T5ForConditionalGeneration.from_pretrained(start, attn_implementation="sdpa")
    trainer = Seq2SeqTrainer(model, args, train_dataset=train, eval_dataset=valid, data_collator=pad)
    trainer.train()
    trainer.save_model(str(own / "last"))


def spent_in(run_dir, seconds):
    """Seconds of a finished run by what they were spent on, from its journal."""
    lines = read_journal(run_dir / "metrics.jsonl")
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval", "stop")}
    startup, evaluations = by_kind["stop"][-1]["startup"], by_kind["eval"]
    spent, waits = durations(lines, time.time()), [line["data_wait_seconds"] for line in by_kind["train"]]
    answers = [line.get("answer_seconds", 0.0) for line in evaluations]
    first_step_at = sum(startup.values())
    values = startup | dict(
        first_step_at=first_step_at, start_up=spent["start-up"], steps=spent["steps"], waits_for_data=sum(waits),
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
