"""Trains eight tiny runs to their end on a CPU and prints the sha256 of each one's final weights.

    python -m bench.same_weights [--resume RUN_DIR] [--folder DIR]

A restructuring must not change one byte. `--folder` keeps the runs, and takes data, tokenizer and sizes that are there:
a copy of another commit's, whose tokenizer may differ. `--resume` goes on from a copy of a kept `muon` of any commit,
which ends within an epoch. Only the command line and files are used; one thread a process.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

LETTERS = "".join(map(chr, range(0x4E00, 0x4E78)))
ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = [*PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
T5_SHAPE = dict(d_model=32, d_ff=64, num_heads=2, d_kv=16, num_layers=2, num_decoder_layers=2)
QWEN_SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
OPTIONS = dict(train_file="train.jsonl", validation_file="train.jsonl", max_seq_len=48, max_steps=24, save_steps=10,
               global_batch_size=8, warmup_steps=3, micro_batch_tokens=160, bleu_pairs=0, plots=False, screen="off",
               deterministic=True, dropout=0.0, model="t5.json")  # fmt: skip
RUNS = {
    "muon": (PYTHON, {}),
    "muon_2_ranks": (TORCHRUN, dict(dropout=0.1)),
    "adamw_rms": (PYTHON, dict(optimizer="adamw_rms", weight_decay=0.1)),
    "adamw": (PYTHON, dict(optimizer="adamw", lr_schedule="wsd")),
    "adafactor_2_ranks": (ACCELERATE, dict(optimizer="adafactor", z_loss=1e-4)),
    "lora_on_a_decoder": (PYTHON, dict(model=None, finetune_from_ckp_file="qwen", lora_rank=4, lora_dropout=0.1)),
    "checkpointing_and_dropout": (PYTHON, dict(gradient_checkpointing=True, dropout=0.1)),
    "resume": (PYTHON, dict(model=None, is_keep_training=True, max_steps=36)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("--resume", "--folder"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "t5.json").exists():
            furnish(folder)
        if given.resume:
            shutil.copytree(given.resume, folder / "resume")
        for name, (launcher, options) in RUNS.items():
            found = final_hash(launcher, folder, name, options) if given.resume or name != "resume" else "skipped"
            print(f"{name}: {found}", flush=True)


def furnish(folder):
    """Write dialogues, a tokenizer, the sizes of a T5 and a Qwen with random weights."""
    draw, roles, lines = random.Random(0), ("user", "assistant"), []
    for number in range(120):  # of one turn or two
        texts = ["".join(draw.choices(LETTERS, k=draw.randint(2, 16))) for _ in range(2 * (number % 2) + 2)]
        turns = [dict(role=role, content=text) for role, text in zip(2 * roles, texts, strict=False)]
        lines.append(json.dumps(dict(messages=turns)) + "\n")
    Path(folder, "train.jsonl").write_text("".join(lines))
    run([*PYTHON, ROOT / "scripts/train_tokenizer.py", "train.jsonl", "--output_dir=qwen", "--vocab_size=420"], folder)
    Path(folder, "t5.json").write_text(json.dumps(T5_SHAPE))
    shutil.copytree(folder / "qwen", folder / "model_save" / "tokenizer")
    torch.manual_seed(0)
    config = Qwen2Config(**QWEN_SHAPE, num_key_value_heads=1, initializer_range=0.2, vocab_size=420)
    Qwen2ForCausalLM(config).save_pretrained(folder / "qwen")


def final_hash(launcher, folder, name, options):
    """sha256 of the weights, or of the adapter, in the last/ of a run that is trained here."""
    words = [f"--{key}={value}" for key, value in (OPTIONS | options).items() if value is not None]
    run([*launcher, ROOT / "train_low_mem.py", "train", f"--output_dir={name}", *words], folder)
    (path,) = Path(folder, name, "last").glob("*model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(words, folder):
    env = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    subprocess.run(list(map(str, words)), cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
