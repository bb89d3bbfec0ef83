"""Runs that take a second: a folder with a tokenizer, 44 pairs and a model of a few thousand weights."""

import hashlib
import json
import random
from pathlib import Path

from model.data.tokenizer import PROBE
from model.data.tokenizer_training import train_tokenizer
from model.run.journal import read_journal
from tests.ranks import fork_ranks, wait_for
from train_low_mem import main

NUM_PAIRS = 44
SHAPE = dict(d_model=16, d_ff=32, num_heads=2, d_kv=8, num_layers=1, num_decoder_layers=1)
OPTIONS = dict(
    model="shape.json", train_file="train.jsonl", validation_file="valid.jsonl", max_seq_len=32, epochs=2,
    global_batch_size=8, warmup_steps=3, logging_steps=1, dropout=0.0,
    save_steps=1, bleu_pairs=0, log_sample_ids=True, plots=False,
)  # fmt: skip
SHORT = dict(epochs=1, save_steps=1000)


def furnish(folder):
    """Write a tokenizer, data and a model's configuration to `folder` and return it; runs there need an output_dir."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(PROBE, k=draw.randint(4, 24))) for _ in range(2 * NUM_PAIRS + 20)]
    train_tokenizer(texts, 507, folder / "model_save" / "tokenizer")
    write_pairs(folder / "train.jsonl", texts[: 2 * NUM_PAIRS])
    write_pairs(folder / "valid.jsonl", texts[2 * NUM_PAIRS :])
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    return folder


def write_pairs(path, texts):
    lines = [
        json.dumps(dict(prompt=p, response=r), ensure_ascii=False) for p, r in zip(texts[::2], texts[1::2], strict=True)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def words(command="train", **changes):
    """Arguments of a command line: OPTIONS with `changes`; a value of None omits the option."""
    options = OPTIONS | changes
    return [command, *(f"--{name}={value}" for name, value in options.items() if value is not None)]


def train(home, world=1, fault="", seconds=90, env=None, command="train", **changes):
    """Run a tiny training in `home` on `world` ranks and return its Ended."""
    return wait_for(start(home, world, fault, env=env, command=command, **changes), home, seconds)


def command(home, *line):
    """Run a command line in one process and return its Ended."""
    return wait_for(fork_ranks(1, main, list(line), folder=home), home, 90)


def refused(ended, *parts):
    """True; asserts that all ranks ended with exit code 2, no traceback and a message that contains all `parts`."""
    assert set(ended.codes) == {2}, ended.text
    assert "Traceback" not in ended.text
    assert all(part in ended.text for part in parts), ended.text
    return True


def start(home, world=1, fault="", env=None, command="train", function=main, **changes):
    """Start a tiny training in `home` and return its processes; `function` is called with the arguments."""
    return fork_ranks(world, function, words(command, **changes), folder=home, env=dict(CHAT_FAULT=fault) | (env or {}))


def weights_hash(run_dir):
    """sha256 of the weights, or of the adapter, in the run's last/."""
    (path,) = Path(run_dir, "last").glob("*model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def journal(run_dir, kind):
    """The journal's valid lines of one kind: without those that a resume made void."""
    return [line for line in read_journal(Path(run_dir, "metrics.jsonl")) if line["kind"] == kind]


def ids_by_epoch(run_dir):
    """Sorted example ids by epoch, from the sample files of all ranks."""
    epochs = {}
    for path in Path(run_dir).glob("samples_rank*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            epochs.setdefault(line["epoch"], []).extend(line["ids"])
    return {epoch: sorted(ids) for epoch, ids in sorted(epochs.items())}
