"""Train all weights of a Qwen3 with random weights, or an adapter on a Qwen1.5, on one card and on several: memory
against the plan, and speed.

    python -m bench.whole_networks [--network 1.7b] [--cases shared,one,two] [--steps 100] [--folder DIR]
    python -m bench.whole_networks --network 4b|lora-7b --worlds 1,2,4,8     its speed, and memory on cards of 24 GB
    python -m bench.whole_networks --rehearse                                on CPU processes, tiny networks

Each case is a run of train_low_mem.py under torchrun on one text of 2,048 tokens for each card and step, or on four;
one of lora-7b is a guide's command line of scripts/train_lora.py, in four bits. It prints a JSON line: the peak
reserved by rank 0, what the plan predicted, the events of the run, milliseconds a step (the median of the journal's
lines after the first), tokens a second, how many times those of the case `one` that is, and what is wrong. One card of
80 GB holds all of 4b only if it computes all blocks again, text by text, so one, two, four and eight do that: a step is
the same work on one card and on several. The folder needs 90 GB of disk for the checkpoint at the end of a run, which
is removed afterwards; with --unsaved a run is killed after its last step instead.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from bench.children import ROOT, Job, run_job
from bench.packed import TINY_QWEN
from model.data.tokenizer import PROBE
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import write_tensors, write_values
from model.nn.registry import config_from, family_of
from model.run.journal import read_journal
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.sizes import QWEN_RANK, QWEN_VOCAB_SIZE, QWENS

GIB, SEQUENCE, REHEARSED_SEQUENCE = 2**30, 2048, 128  # tokens
QWEN_1_7B = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
NETWORKS = {"1.7b": QWEN_1_7B, "4b": QWENS["qwen3-4b"], "lora-7b": QWENS["qwen1.5-7b"]}
AGAIN = ["--gradient_checkpointing=True", f"--micro_batch_tokens={SEQUENCE}", "--compile=False"]  # all blocks, by text
BARS = {2: 1.8, 4: 3.6, 8: 7.0}  # times one card
ADAPTER_BARS = {2: 1.85, 4: 3.7, 8: 7.3}
CARDS = dict(one=1, two=2, four=4, eight=8)
SHARED = ["--optimizer=adamw", "--share_state=True"]
ROUNDED = ["--optimizer=adamw", "--mixed_precision=bf16", "--master_dtype=bf16"]
CARD_24 = "--gpu_memory_limit_gb=23.5"
CASES = {  # name: (cards, texts of a card and step, options, GiB that a card may reserve)
    "shared": (2, 1, [*SHARED, CARD_24, "--gradient_checkpointing=True"], 21),
    "shared_four": (4, 1, [*SHARED, CARD_24], 21),
    "shared_eight": (8, 1, [*SHARED, CARD_24], 21),
    "host_24": (1, 1, [*ROUNDED, "--offload=optimizer", CARD_24], 23),
    "rounded_eight": (8, 1, [*ROUNDED, "--share_state=True", CARD_24], 23),
    "shared_muon": (2, 1, ["--optimizer=muon", "--share_state=True", CARD_24], 21),
    "shared_rounded": (2, 1, [*ROUNDED, "--share_state=True", "--gpu_memory_limit_gb=18.5"], 18),
    "host": (1, 1, ["--optimizer=adamw", "--offload=optimizer", "--gpu_memory_limit_gb=16"], 16),
    "host_rounded": (1, 1, [*ROUNDED, "--offload=optimizer", "--gpu_memory_limit_gb=12.4"], 12),
    "shared_host": (2, 1, ["--optimizer=adamw", "--offload=optimizer", "--gpu_memory_limit_gb=16"], 16),
    "two_whole": (2, 4, ["--optimizer=adamw", "--share_state=False"], 80),
} | {name: (cards, 4, SHARED if cards > 1 else SHARED[:1], 80) for name, cards in CARDS.items()}  # fmt: skip
SMALL_CARDS = {  # a case on cards of 24 GB, for so many of them
    "1.7b": {2: "shared", 4: "shared_four", 8: "shared_eight"},
    "4b": dict.fromkeys((1, 2, 4), "host_24") | {8: "rounded_eight"},
    "lora-7b": {},
}
MOST_ERROR = 0.05  # of the predicted peak
CASE_SECONDS, LINE_STEPS = 240, 5
EVENTS = ("oom", "not_finite", "skip")


def main():
    given = arguments()
    folder = Path(given.folder or os.environ.get("OUT") or tempfile.mkdtemp()).resolve()
    write_inputs(folder, given.network, given.rehearse)
    found = {}
    for name in given.cases.split(","):
        found[name] = beside_one(measured(folder, name, given), found.get("one"), given)
        print(json.dumps(found[name]), flush=True)
    return any(values["wrong"] for values in found.values())


def arguments():
    parser = argparse.ArgumentParser(description="Qwens on one card and on several: memory and speed.")
    parser.add_argument("--network", default="1.7b", choices=NETWORKS)
    parser.add_argument("--cases", default="shared,one,two", help=f"of {', '.join(CASES)}")
    parser.add_argument("--worlds", default="", help="numbers of cards, in place of --cases")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--first_card", type=int, default=0, help="two runs of one card go side by side")
    parser.add_argument("--folder", default="", help="$OUT if that is set, else a temporary one")
    parser.add_argument("--unsaved", action="store_true", help="kill a run of all weights after its last step")
    parser.add_argument("--rehearse", action="store_true", help="on CPU processes, with a tiny network")
    given = parser.parse_args()
    if given.worlds:
        names = [name for name, cards in CARDS.items() if str(cards) in given.worlds.split(",")]
        small = SMALL_CARDS[given.network].get(CARDS[names[-1]], "")
        given.cases = ",".join([*names, *[small] * bool(small)])
    return given


def write_inputs(folder, network, is_rehearsed):
    """Write a network's sizes, or a base with random weights for an adapter, a tokenizer, and long texts."""
    draw, tokens = random.Random(0), REHEARSED_SEQUENCE if is_rehearsed else SEQUENCE
    sizes = NETWORKS[network] | (TINY_QWEN if is_rehearsed else {})
    sizes |= dict(vocab_size=512 if is_rehearsed else QWEN_VOCAB_SIZE, family=sizes.get("model_type", "qwen2"))
    sizes.pop("model_type", None)
    folder.mkdir(parents=True, exist_ok=True)
    texts = ["".join(draw.choices(PROBE, k=3 * tokens)) for _ in range(256)]
    if network == "lora-7b":
        write_base(folder / "base", config_from(sizes))
        rows = [dict(instruction=text[:8], output=text[8:]) for text in texts]
    else:
        train_tokenizer([text[:200] for text in texts], 507, folder / "tokenizer")
        (folder / "sizes.json").write_text(json.dumps(sizes))
        rows = [dict(text=text) for text in texts]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_base(folder, sizes):
    """Write a Hugging Face directory in bf16 whose tensors repeat a few random numbers; norms are ones."""
    tokenizer, noise = make_qwen_tokenizer(folder), 0.02 * torch.randn(2**22, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = family_of(sizes).build(sizes, 0.0, torch.bfloat16)
    write_values(model, tokenizer, folder, dtype="bfloat16")
    tensors = {
        name: torch.ones(tensor.shape, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        else noise.repeat(-(-tensor.numel() // len(noise)))[: tensor.numel()].view(tensor.shape)
        for name, tensor in model.state_dict().items()
    }
    write_tensors(tensors, folder / "model.safetensors")


def measured(folder, name, given):
    """The JSON values of a case."""
    cards, most_gib, run_dir = CASES[name][0], CASES[name][-1], folder / name
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", cards]
    words += (adapter_words if given.network == "lora-7b" else whole_words)(folder, name, given)
    words += [f"--output_dir={run_dir}", f"--max_steps={given.steps}", f"--logging_steps={LINE_STEPS}", "--screen=off"]
    words += ["--validation_file=", "--save_steps=1000000", "--save_seconds=1000000", "--plots=False"]
    places = range(given.first_card, given.first_card + cards)
    env = dict(CUDA_VISIBLE_DEVICES="" if given.rehearse else ",".join(map(str, places)), OMP_NUM_THREADS="1")
    is_killed = given.unsaved and given.network != "lora-7b"
    env |= dict(CHAT_FAULT=f"update:all:{given.steps}:kill") if is_killed else {}
    done = run_job(Job(name, words, CASE_SECONDS, env), folder / f"{name}.log", {})
    lines = [*read_journal(run_dir / "metrics.jsonl")] if (run_dir / "metrics.jsonl").exists() else []
    last = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
    values = dict(network=given.network, case=name, cards=cards, seconds=round(done.seconds, 1))
    if done.problem and not (is_killed and given.steps - last <= LINE_STEPS):
        return values | dict(wrong=f"{done.problem}: {done.text[:1500]} ... {done.text[-500:]}")
    values |= figures(lines, json.loads((run_dir / "plan.json").read_text()), most_gib, given.rehearse)
    shutil.rmtree(run_dir)
    return values


def whole_words(folder, name, given):
    """The command that trains all weights, from scratch."""
    cards, texts, options, _ = CASES[name]
    words = [
        ROOT / "train_low_mem.py",
        "train",
        f"--tokenizer_dir={folder / 'tokenizer'}",
        "--objective=text",
        *options,
    ]
    words += [f"--model={folder / 'sizes.json'}", f"--train_file={folder / 'texts.jsonl'}"]
    words += [f"--max_seq_len={REHEARSED_SEQUENCE if given.rehearse else SEQUENCE}"]
    return [*words, f"--global_batch_size={cards * texts}", *AGAIN * (given.network == "4b" and name in CARDS)]


def adapter_words(folder, name, given):
    """A guide's command line."""
    words = [ROOT / "scripts" / "train_lora.py", "--model_name_or_path", folder / "base", "--use_4bit", "--bf16"]
    words += ["--data_path", folder / "texts.jsonl", "--per_device_train_batch_size", CASES[name][1]]
    words += ["--gradient_accumulation_steps", 1, "--lora_rank", QWEN_RANK, "--lora_alpha", 2 * QWEN_RANK]
    return [*words, "--max_seq_length", REHEARSED_SEQUENCE if given.rehearse else SEQUENCE]


def figures(lines, plan, most_gib, is_rehearsed):
    """What the journal and the plan of a run say, and what is wrong with it."""
    trained = [line for line in lines if line["kind"] == "train"][1:]
    if not trained:
        return dict(wrong=f"too few steps: type --steps={3 * LINE_STEPS} or more")
    events = [line["kind"] for line in lines if line["kind"] in EVENTS]
    peak, predicted = max(line["reserved_bytes"] for line in trained), plan["phases"]["step"]["predicted"]
    wrong = [f"{len(events)} events"] * bool(events)
    if not is_rehearsed:
        wrong += [f"more than {most_gib} GiB"] * (peak > most_gib * GIB)
        wrong += [f"{peak / predicted:.3f} of the predicted peak"] * (abs(peak / predicted - 1) > MOST_ERROR)
    return dict(
        peak_gib=round(peak / GIB, 2), predicted_gib=round(predicted / GIB, 2), events=events,
        step_ms=round(1e3 * statistics.median(line["step_seconds"] for line in trained), 1),
        tokens_per_second=round(statistics.median(line["tokens_per_second"] for line in trained)),
        plan={key: plan[key] for key in ("micro_batch_tokens", "chunk_tokens", "gradient_checkpointing", "graphs")},
        loss=[round(line["loss"], 3) for line in (trained[0], trained[-1])], wrong="; ".join(wrong),
    )  # fmt: skip


def beside_one(values, one, given):
    """`values` of a case with its speed as so many times that of one card, which is wrong if it is below its bar."""
    bar = (ADAPTER_BARS if given.network == "lora-7b" else BARS).get(values["cards"])
    if values["case"] not in CARDS or not one or not {"tokens_per_second"} <= one.keys() & values.keys():
        return values | dict(times_one=None, bar=None)
    times = round(values["tokens_per_second"] / one["tokens_per_second"], 3)
    is_slow = bar is not None and times < bar and not given.rehearse
    wrong = "; ".join([*filter(None, [values["wrong"]]), *[f"{times} times one card, below {bar}"] * is_slow])
    return values | dict(times_one=times, bar=bar, wrong=wrong)


if __name__ == "__main__":
    sys.exit(main())
