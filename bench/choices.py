"""Seconds that `test --choices_file` takes for 10,000 made-up questions, in parts: reading, tokenising, computing.

    python -m bench.choices [--model small] [--questions 10000] [--num_shots 0,5] [--passes N]

The questions have CMMLU's form, 67 subjects and about its lengths (questions of 10 to 90 characters, choices of 1 to
20); weights are random, and each character is a token, so that there are more tokens than a trained tokenizer has.
With `--passes N` only so many questions are answered as N forward passes hold, for a CPU. One JSON line for each number
of examples.
"""

import argparse
import csv
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.corpus import ALPHABET, write_tokenizer
from config import MODELS
from model.commands.machine import compute_dtype, has_native_bf16
from model.data.choice_encoding import MAX_PROMPT_TOKENS, QuestionReader, encode_choices
from model.data.choice_files import LETTERS, read_subjects
from model.data.tokenizer import load_tokenizer
from model.generate.scoring import TOKENS_AT_ONCE
from model.nn.registry import config_from, family_of
from model.runtime.distributed import Ranks
from model.train.choices import likeliest_choices
from tests.sizes import VOCAB_SIZE

SUBJECTS, SHOTS = 67, 5


def main():
    parser = argparse.ArgumentParser(description="Seconds that choices take.")
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--num_shots", default="0,5")
    parser.add_argument("--passes", type=int, default=0, help="forward passes whose questions are answered; 0: all")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_questions(Path(folder), options.questions)
        write_tokenizer(Path(folder, "tokenizer"), VOCAB_SIZE)
        tokenizer = load_tokenizer(Path(folder, "tokenizer"))
        model = drawn_model(MODELS[options.model], device)
        for num_shots in map(int, options.num_shots.split(",")):
            line = measure(Path(folder, "test"), num_shots, model, tokenizer, options.passes)
            print(json.dumps(dict(model=options.model, device=device_name(device), **line)), flush=True)


def write_questions(folder, count):
    """Write test/ and dev/ as CMMLU has them."""
    rng = np.random.default_rng(0)

    def text(least, most):
        return "".join(map(chr, rng.choice(ALPHABET[:3000], rng.integers(least, most + 1))))

    for place in range(SUBJECTS):
        for part, number in (("test", len(range(place, count, SUBJECTS))), ("dev", SHOTS)):
            (folder / part).mkdir(exist_ok=True)
            with open(folder / part / f"subject_{place}.csv", "w", encoding="utf-8", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["", "Question", *LETTERS, "Answer"])
                rows.writerows(
                    [row, text(10, 90), *(text(1, 20) for _ in LETTERS), rng.choice(list(LETTERS))]
                    for row in range(number)
                )


def drawn_model(sizes, device):
    model_config = replace(config_from(sizes), vocab_size=VOCAB_SIZE)
    dtype = compute_dtype("auto", has_native_bf16(device))
    return family_of(model_config).build(model_config, 0.0, dtype).initialise(0).to(device).eval()


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def measure(folder, num_shots, model, tokenizer, passes):
    """The figures of one number of examples as a dict."""
    family, laps = family_of(model.config), [time.monotonic()]
    subjects = read_subjects(folder, num_shots)
    laps.append(time.monotonic())
    asked = encode_choices(subjects, num_shots, QuestionReader(tokenizer, family.reads_one_stream, MAX_PROMPT_TOKENS))
    laps.append(time.monotonic())
    tokens, per_pass = int(asked.lengths.sum()), TOKENS_AT_ONCE[model.device.type]
    if passes:
        count = max(int(np.searchsorted(asked.lengths.sum(1).cumsum(), passes * per_pass)), 1)
        asked = replace(asked, contexts=asked.contexts[:count], prefixes=asked.prefixes[:count],
                        candidates=asked.candidates[:count])  # fmt: skip
    ranks = Ranks(0, 1, 0, model.device, "none", None)
    chosen = likeliest_choices(ranks, model, family.first_id(model.config, tokenizer), asked, per_pass)
    laps.append(time.monotonic())
    reading, tokenising, computing = np.diff(laps).round(3).tolist()
    return dict(
        num_shots=num_shots, questions=sum(len(s.questions) for s in subjects), tokens=tokens,
        passes=-(-tokens // per_pass), answered=len(chosen), reading_s=reading, tokenising_s=tokenising,
        computing_s=computing, all_s=round(laps[-1] - laps[0], 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
