"""Train all weights of a Qwen3-1.7B with random weights on one card and on two: memory against the plan, and speed.

    python -m bench.whole_networks [--cases shared,one,two] [--steps 100] [--folder DIR]     on two GPUs
    python -m bench.whole_networks --cases alone                                             on one GPU
    python -m bench.whole_networks --rehearse                                                on CPUs, a tiny one

Each case is a run of train_low_mem.py under torchrun on one text of 2,048 tokens for each card and step, or on four. It
prints a JSON line: the peak reserved by rank 0, what the plan predicted, the events of the run, milliseconds a step
(the median of the journal's lines after the first), tokens a second, and what is wrong; then how many times as fast two
cards are as one. `alone`: milliseconds of an update of masters and state in host memory, of its transfers without the
computation, and of that without transfers. The folder needs 90 GB of disk for the checkpoint at the end of a run, which
is removed afterwards.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.children import Job, run_job
from model.data.tokenizer import PROBE
from model.data.tokenizer_training import train_tokenizer
from model.nn.decoder.network import DecoderModel
from model.nn.registry import load_model_config
from model.run.journal import read_journal
from model.train.optim import make_optimizer
from tests.parts import make_config

GIB = 2**30
QWEN = dict(
    family="qwen3", vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
TINY = QWEN | SIZES | dict(vocab_size=512, head_dim=32)
ROUNDED = ["--optimizer=adamw", "--mixed_precision=bf16", "--master_dtype=bf16"]
CASES = {  # name: (cards, texts of a card and step, options, GiB that a card may reserve)
    "shared": (2, 1, ["--optimizer=adamw", "--share_state=True", "--gpu_memory_limit_gb=23.5"], 21),
    "shared_muon": (2, 1, ["--optimizer=muon", "--share_state=True", "--gpu_memory_limit_gb=23.5"], 21),
    "shared_rounded": (2, 1, [*ROUNDED, "--share_state=True", "--gpu_memory_limit_gb=18.5"], 18),
    "host": (1, 1, ["--optimizer=adamw", "--offload=optimizer", "--gpu_memory_limit_gb=16"], 16),
    "host_rounded": (1, 1, [*ROUNDED, "--offload=optimizer", "--gpu_memory_limit_gb=12.4"], 12),
    "shared_host": (2, 1, ["--optimizer=adamw", "--offload=optimizer", "--gpu_memory_limit_gb=16"], 16),
    "one": (1, 4, ["--optimizer=adamw"], 80),
    "two": (2, 4, ["--optimizer=adamw", "--share_state=True"], 80),
    "two_whole": (2, 4, ["--optimizer=adamw", "--share_state=False"], 80),
}
LEAST_GAIN, MOST_ERROR = 1.8, 0.05  # two cards against one; measured peak against the predicted one
EVENTS = ("oom", "not_finite", "skip")


def main():
    given = arguments()
    folder = Path(given.folder or os.environ.get("OUT") or tempfile.mkdtemp()).resolve()
    write_inputs(folder, TINY if given.rehearse else QWEN, 64 if given.rehearse else 2048)
    found = {}
    for name in given.cases.split(","):
        found[name] = parts_alone(folder, given) if name == "alone" else measured(folder, name, given)
        print(json.dumps(found[name]), flush=True)
    if {"one", "two"} <= found.keys() and all(not found[name]["wrong"] for name in ("one", "two")):
        gain = found["two"]["tokens_per_second"] / found["one"]["tokens_per_second"]
        print(json.dumps(dict(gain=round(gain, 3), wrong="" if gain >= LEAST_GAIN else f"below {LEAST_GAIN}")))
    return any(values["wrong"] for values in found.values())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="shared,one,two", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--first_card", type=int, default=0, help="two runs of one card go side by side")
    parser.add_argument("--unsaved", action="store_true", help="kill a run before its last checkpoint, to save time")
    parser.add_argument("--folder", default="", help="$OUT if that is set, else a temporary one")
    parser.add_argument("--rehearse", action="store_true", help="on CPU processes, with a tiny network")
    return parser.parse_args()


def write_inputs(folder, sizes, tokens):
    """Write a tokenizer, the sizes of a network and texts of at least so many tokens."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(["".join(draw.choices(PROBE, k=200)) for _ in range(200)], 507, folder / "tokenizer")
    (folder / "sizes.json").write_text(json.dumps(sizes))
    texts = ("".join(draw.choices(PROBE, k=3 * tokens)) for _ in range(64))
    (folder / "texts.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))


def measured(folder, name, given):
    """The JSON values of a case."""
    cards, texts, options, most_gib = CASES[name]
    run_dir = folder / name
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", cards]
    words += ["train_low_mem.py", "train", f"--output_dir={run_dir}", f"--tokenizer_dir={folder / 'tokenizer'}"]
    words += [f"--model={folder / 'sizes.json'}", f"--train_file={folder / 'texts.jsonl'}", "--objective=text"]
    words += ["--validation_file=", f"--max_seq_len={64 if given.rehearse else 2048}", "--logging_steps=5"]
    words += [f"--global_batch_size={cards * texts}", f"--max_steps={given.steps + given.unsaved}", *options]
    words += ["--plots=False", "--save_steps=1000000", "--save_seconds=1000000", "--screen=off"]
    places = range(given.first_card, given.first_card + cards)
    env = dict(CHAT_FAULT=f"forward:0:{given.steps + 1}:kill") if given.unsaved else {}
    env |= dict(CUDA_VISIBLE_DEVICES="" if given.rehearse else ",".join(map(str, places)), OMP_NUM_THREADS="1")
    done = run_job(Job(name, words, 560), folder / f"{name}.log", env)
    if done.problem and not (given.unsaved and "SIGKILL" in done.text):
        return dict(case=name, wrong=f"{done.problem}: {done.text[:1500]} ... {done.text[-500:]}")
    values = figures(run_dir, name, most_gib, given.rehearse)
    shutil.rmtree(run_dir)
    return values | dict(seconds=round(done.seconds, 1))


def parts_alone(folder, given):
    """JSON values of an update in host memory, and of its parts alone; each is the second of two."""
    device = torch.device("cpu" if given.rehearse else f"cuda:{given.first_card}")
    with torch.device("meta"):
        model = DecoderModel(load_model_config(str(folder / "sizes.json")), compute_dtype=torch.bfloat16)
    model.place(device, True)
    optimizer = make_optimizer(model, make_config(optimizer="adamw", offload="optimizer"))
    values = dict(case="alone", weights=len(model.flat.gradients), update_ms=update_ms(optimizer, device))
    kept, optimizer.update_part = optimizer.update_part, lambda *_: None
    values |= dict(transfers_ms=update_ms(optimizer, device))
    optimizer.update_part, optimizer.fetch, optimizer.give_back = kept, lambda *_: None, lambda *_: None
    return values | dict(computation_ms=update_ms(optimizer, device), wrong="")


def update_ms(optimizer, device):
    for _ in range(2):
        started = time.perf_counter()
        optimizer.update(1e-4, torch.ones((), device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return round(1e3 * (time.perf_counter() - started), 1)


def figures(run_dir, name, most_gib, is_rehearsed):
    """What the journal and the plan of a run say, and what is wrong with it."""
    lines, plan = [*read_journal(run_dir / "metrics.jsonl")], json.loads((run_dir / "plan.json").read_text())
    trained = [line for line in lines if line["kind"] == "train"][1:]
    events = [line["kind"] for line in lines if line["kind"] in EVENTS]
    peak, predicted = max(line["reserved_bytes"] for line in trained), plan["phases"]["step"]["predicted"]
    wrong = [f"{len(events)} events"] * bool(events)
    if not is_rehearsed:
        wrong += [f"more than {most_gib} GiB"] * (peak > most_gib * GIB)
        wrong += [f"{peak / predicted:.3f} of the predicted peak"] * (abs(peak / predicted - 1) > MOST_ERROR)
    return dict(
        case=name, peak_gib=round(peak / GIB, 2), predicted_gib=round(predicted / GIB, 2), events=events,
        step_ms=round(1e3 * statistics.median(line["step_seconds"] for line in trained), 1),
        tokens_per_second=round(statistics.median(line["tokens_per_second"] for line in trained)),
        plan={key: plan[key] for key in ("micro_batch_tokens", "chunk_tokens", "gradient_checkpointing", "graphs")},
        loss=[round(line["loss"], 3) for line in (trained[0], trained[-1])], wrong="; ".join(wrong),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
