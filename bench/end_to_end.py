"""Time a complete fine-tuning from command to exit: `./train_sft_custom.sh 16` and transformers' Seq2SeqTrainer.

    python -m bench.end_to_end --output_dir DIR [--model small] [--pairs 5000] [--epochs 3] [--cpu]

Both start from the same exported random weights and the same parquet files, tokenise them, train for the same epochs,
compute the loss of the same 64 validation pairs and save after each epoch (without generating answers), and write a
model. Ours runs twice, each time into an empty run directory: cold, without compiled kernels and stored tokens, then
warm, with both. Its JSON line also has the seconds to its first training line (step 10) and the share of the step time
spent waiting for data. Seq2SeqTrainer runs with 16 pairs per forward and two forwards per step like ours, and with its
best number of pairs per step (--large), in bf16 with SDPA, grouping by length and fused AdamW. Each part is one
process, run alone, with one JSON line; the last line has the ratios of their seconds.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.children import ROOT, Job, gpu_slots, run_jobs
from bench.corpus import MAX_SEQ_LEN, VOCAB_SIZE, write_corpus
from bench.runs import open_pairs
from model.data.tokenizer import load_tokenizer
from model.formats.weights import export_model
from model.nn.registry import load_model_config
from model.nn.t5.network import TextToTextModel
from tests.tiny import journal

PAIRS = 16  # per GPU: what the guides type
LIMIT_SECONDS = 550


def main():
    parser = argparse.ArgumentParser(description="Time a complete fine-tuning, ours and transformers' trainer.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model", default="small")
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--large", type=int, default=128, help="pairs per step at which Seq2SeqTrainer is fastest")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--parts", default="ours-cold,ours-warm,trainer,trainer-large")
    parser.add_argument("--trainer", default="", help="JSON of the trainer's part to run (for child processes)")
    options = parser.parse_args()
    folder = Path(options.output_dir).resolve()
    if options.trainer:
        return train_trainer(json.loads(options.trainer), folder, options.epochs)
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--output_dir={folder} is not empty: a cold start needs an empty one")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    furnish(folder, options.model, options.pairs)
    seconds = {name: seconds_of(name, folder, options) for name in options.parts.split(",")}
    ratios = {
        f"{theirs}/{ours}": round(seconds[theirs] / seconds[ours], 2)
        for theirs in seconds
        for ours in seconds
        if theirs.startswith("trainer") and ours.startswith("ours") and seconds[theirs] and seconds[ours]
    }
    on_gpu = torch.cuda.is_available() and not options.cpu
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    line = dict(model=options.model, pairs=options.pairs, epochs=options.epochs, device=device, times=ratios)
    print(json.dumps(line), flush=True)
    return 1 if None in seconds.values() else 0


def furnish(folder, model, pairs):
    """Write the corpus and start/, the weights and the tokenizer that every part fine-tunes."""
    write_corpus(folder, pairs)
    model_config = replace(load_model_config(model), vocab_size=VOCAB_SIZE)
    export_model(TextToTextModel(model_config).initialise(0), load_tokenizer(folder / "tokenizer"), folder / "start")


def seconds_of(name, folder, options):
    """Run a part and print its JSON line; returns its seconds from start to exit, or None if it failed."""
    job, begun = Job(name, words_of(name, folder, options), LIMIT_SECONDS, caches(folder, name)), time.time()
    (done,) = run_jobs([job], folder / "logs", gpu_slots(0 if options.cpu else 1))
    line = dict(part=name, seconds=round(done.seconds, 2), problem=done.problem)
    if name.startswith("ours") and not done.problem:
        entries = journal(folder / "runs" / name, "train")
        wait, total = (sum(entry[kind] for entry in entries) for kind in ("data_wait_seconds", "step_seconds"))
        line["trains_after_seconds"] = round(entries[0]["time"] - begun, 2)
        line["data_wait_percent"] = round(100 * wait / total, 3)
    print(json.dumps(line), flush=True)
    if done.problem:
        print(done.text[-2000:], file=sys.stderr, flush=True)
    return None if done.problem else done.seconds


def words_of(name, folder, options):
    """The command line of a part."""
    if name.startswith("ours"):
        files = dict(finetune_from_ckp_file="start", train_file="train.parquet", validation_file="valid.parquet")
        paths = [f"--{option}={folder / file}" for option, file in files.items()]
        own = [
            f"--output_dir={folder / 'runs' / name}",
            f"--epochs={options.epochs}",
            "--bleu_pairs=0",
            "--optimizer=muon",
        ]
        return [ROOT / "train_sft_custom.sh", PAIRS, *paths, *own]
    pairs, rounds = (options.large, 1) if name == "trainer-large" else (PAIRS, 2)
    cell = json.dumps(dict(name=name, pairs=pairs, rounds=rounds, compile=False, static=False))
    words = [sys.executable, "-m", "bench.end_to_end", "--trainer", cell]
    return [*words, "--output_dir", folder, "--epochs", options.epochs]


def caches(folder, name):
    """Environment of a part: compile caches are in `folder`, so the first run of ours compiles its kernels."""
    owner = folder / "caches" / name.split("-")[0]
    return dict(TRITON_CACHE_DIR=f"{owner}/triton", TORCHINDUCTOR_CACHE_DIR=f"{owner}/inductor", HF_HUB_OFFLINE="1")


def train_trainer(cell, folder, epochs):
    """Fine-tune with transformers' Seq2SeqTrainer, with the settings that make it fast."""
    from transformers import Seq2SeqTrainer, T5ForConditionalGeneration  # takes seconds to import

    from bench.loops import pad, trainer_arguments, trainer_rows

    own, tokenizer = folder / "runs" / cell["name"], load_tokenizer(folder / "start")
    train, valid = (
        trainer_rows(open_pairs(folder / file, tokenizer, MAX_SEQ_LEN, own / "tokens"))
        for file in ("train.parquet", "valid.parquet")
    )
    args = trainer_arguments(
        cell, own, num_train_epochs=epochs, lr_scheduler_type="cosine", warmup_steps=20, logging_steps=10,
        eval_strategy="epoch", per_device_eval_batch_size=32, prediction_loss_only=True, save_strategy="epoch",
        save_total_limit=2, dataloader_persistent_workers=torch.cuda.is_available(),
    )  # fmt: skip
    model = T5ForConditionalGeneration.from_pretrained(folder / "start", attn_implementation="sdpa")
    trainer = Seq2SeqTrainer(model, args, train_dataset=train, eval_dataset=valid, data_collator=pad)
    trainer.train()
    trainer.save_model(str(own / "last"))


if __name__ == "__main__":
    sys.exit(main())
