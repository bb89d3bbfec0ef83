"""Runs of one global batch on 1, 2 and 4 processes, an objective each: are steps, examples and losses the same?

    python -m bench.several_gpus --parts equal

Each function is the work of one process, as in bench.several_machines. Runs are alone on a CPU's cores; on GPUs, where
they take seconds after a long start, all numbers of processes run at once. Weights are random, dropout is 0; all is in
float32, because bf16 rounds otherwise in batches that are cut otherwise.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor

from bench.several_machines import failure_of, launch
from config import MODELS
from model.data.tokenizer import PROBE
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import export_model
from model.nn.registry import config_from, family_of
from model.run.journal import read_journal
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.ranks import launcher
from tests.tiny import journal, words
from tests.trials import QWEN_SIZES, tell

WORLDS, STEPS, STEP_ROWS, ROWS = (1, 2, 4), 100, 16, 1280
ROW_CHARACTERS = dict(prompt=24, chosen=48, rejected=48)  # at most
TOLERANCE = 1e-3  # of the losses on several processes beside those on one
WHOLE = dict(pairs={}, dpo=dict(objective="dpo", learn_rate=5e-3, any_learn_rate=True), span=dict(objective="span"))
TEXT = dict(objective="text", dropout=None)
ADAPTER = dict(objective="dpo", model=None, dropout=None, lora_rank=8, learn_rate=1e-3, any_learn_rate=True)
OBJECTIVES = (*WHOLE, "text", "dpo_lora")


def equal(objective, folder, num_gpus):
    """Train with an objective on each number of processes; a line each, beside the losses and ids of one process."""
    options = furnish(folder, objective, num_gpus > 0)
    worlds = [world for world in WORLDS if world <= (num_gpus or max(WORLDS))]
    with ThreadPoolExecutor(len(worlds) if num_gpus else 1) as pool:
        problems = [*pool.map(lambda world: run(folder / str(world), world, num_gpus, options), worlds)]
    found = [steps_of(folder / str(world) / "run") for world in worlds]
    for world, wrong, (losses, ids) in zip(worlds, problems, found, strict=True):
        first, first_ids = found[0]
        farthest = max((abs(losses[step] / loss - 1) for step, loss in first.items() if step in losses), default=1)
        wrong = wrong or ("" if [*losses] == [*range(1, STEPS + 1)] else f"{len(losses)} steps")
        wrong = wrong or ("" if ids == first_ids else "other examples")
        wrong = wrong or ("" if farthest <= TOLERANCE else "other losses")
        ends = [round(loss, 4) for loss in [*losses.values()][:: max(len(losses) - 1, 1)]]
        tell(
            case=objective, world=world, steps=len(losses), loss=ends, largest_difference=float(f"{farthest:.2g}"),
            wrong=wrong,
        )  # fmt: skip
    return 0


def furnish(folder, objective, on_gpus):
    """Write rows with two responses, a tokenizer and what is trained on; returns the options of a run."""
    draw = random.Random(0)
    rows = [
        {name: "".join(draw.choices(PROBE, k=draw.randint(8, most))) for name, most in ROW_CHARACTERS.items()}
        for _ in range(ROWS)
    ]
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer([row["chosen"] for row in rows], 507, folder / "tokenizer")
    options = dict(
        train_file=folder / "rows.jsonl", tokenizer_dir=folder / "tokenizer", validation_file="", output_dir="run",
        max_seq_len=96, global_batch_size=STEP_ROWS, max_steps=STEPS, epochs=None, save_steps=10_000,
    )  # fmt: skip
    options |= (
        dict(gpu_memory_limit_gb=8, mixed_precision="no", warmup_steps=None) if on_gpus else {}
    )  # several runs share a GPU
    if objective in WHOLE:
        return options | dict(model="small" if on_gpus else "tiny") | WHOLE[objective]
    sizes = MODELS["mini"] if on_gpus else dict(family="qwen3") | QWEN_SIZES
    (folder / "sizes.json").write_text(json.dumps(sizes))
    if objective == "text":
        return options | dict(model=folder / "sizes.json") | TEXT
    write_base(folder / "base", sizes)
    return options | dict(finetune_from_ckp_file=folder / "base", tokenizer_dir=None) | ADAPTER


def write_base(folder, sizes):
    """Write a decoder with random weights, greater ones than a training begins with, so that its logits differ."""
    tokenizer = make_qwen_tokenizer(folder.parent / "qwen")
    deviation = sizes["hidden_size"] ** -0.5
    sizes = config_from(sizes | dict(vocab_size=tokenizer.vocab_size, initializer_range=deviation))
    export_model(family_of(sizes).build(sizes).initialise(1), tokenizer, folder)


def run(home, world, num_gpus, options):
    """Train in a folder of its own; returns what failed, "" if nothing did."""
    home.mkdir()
    env = dict(CUDA_VISIBLE_DEVICES="0") if num_gpus and world == 1 else {}
    line = [*launcher("python" if world == 1 else "accelerate", world), *words(**options)]
    return failure_of([launch(line, home, env)], [home])


def steps_of(run_dir):
    """({step: loss}, {step: sorted example ids of all ranks}) of a run; nothing of one that never began."""
    if not (run_dir / "metrics.jsonl").exists():
        return {}, {}
    losses, ids = {line["step"]: line["loss"] for line in journal(run_dir, "train")}, {}
    for path in run_dir.glob("samples_rank*.jsonl"):
        for line in read_journal(path):
            ids.setdefault(line["step"], []).extend(line["ids"])
    return losses, {step: sorted(each) for step, each in ids.items()}
