"""Compare the speed of this trainer with the strongest loops around transformers' T5, on the same pairs.

    python -m bench.compare --output_dir DIR [--models small,chatlm] [--part ours,a,b] [--cpu] [--short] [--together 3]
    python -m bench.compare --output_dir DIR --part dropout [--any_field=value]       with dropout beside without
    python -m bench.compare --output_dir DIR --part profiles --models chatlm          the profiles of run_train.sh

ours: train_steps as train_low_mem.py runs it. A: transformers' Seq2SeqTrainer. B: a hand-tuned loop around HF T5, one
process for each padded shape. dropout: ours with 64, 128 and 256 pairs, with and without --dropout=0.1 in turn.
profiles: ours with the options that run_train.sh types for each profile.

Each cell (one loop with one setting) is timed in its own process and adds a line to DIR/results.jsonl. At the end
DIR/table.md and DIR/compare.png are written from all lines in it, also those of earlier runs; --part none only writes
these two. Exit code 1 if a cell failed.
"""

import argparse
import json
import os
import re
import signal
import sys
from itertools import product
from pathlib import Path

import torch

from bench.children import ROOT, Job, gpu_slots, run_jobs
from bench.clock import WINDOWS, Gate, Pace, StepClock
from bench.corpus import write_corpus
from bench.pictures import report
from bench.runs import typed

GPU_PAIRS, CPU_PAIRS = 51_200, 960  # pairs in the corpus
MEGA_BATCH = 50  # batches that the trainer sorts together (get_length_grouped_indices in transformers)
SET_UP_SECONDS = {"tiny": 150, "small": 200, "chatlm": 300}  # limit for start and warm-up; compiling takes a minute
TIMED_SECONDS = 7.5
PROFILES = ("deepspeed", "stage2_offload", "stage3", "minimal")
B_PAIRS = {"small": (384, 256, 192, 128), "chatlm": (256, 128, 96, 64), "tiny": (384, 256, 192, 128)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--models", default="")
    parser.add_argument("--part", default="ours,a,b")
    parser.add_argument("--cpu", action="store_true", help="tiny and small in float32 on this machine's cores")
    parser.add_argument("--short", action="store_true", help="fewer cells, timed for half as long")
    parser.add_argument("--skip", default="", help="leave out cells whose name contains one of these words")
    parser.add_argument("--together", type=int, default=3, help="cells per GPU: one is timed, the others are set up")
    parser.add_argument("--minutes", type=float, default=60, help="cells that are unfinished by then are stopped")
    parser.add_argument("--pairs", type=int, default=0, help="in the corpus; 0: enough")
    parser.add_argument("--cell", default="", help="JSON of one cell, which this process times (for child processes)")
    options, words = parser.parse_known_args()
    folder = Path(options.output_dir).resolve()
    if options.cell:
        return time_cell(json.loads(options.cell), folder)
    cells = list(chosen_cells(options, typed(words)))
    cells = [cell for cell in cells if not any(word and word in cell["name"] for word in options.skip.split(","))]
    if options.short:
        cells = [cell | dict(timed_seconds=cell["timed_seconds"] / 2) for cell in cells if cell["short"]]
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if cells:
        write_corpus(folder / "corpus", options.pairs or (CPU_PAIRS if options.cpu else GPU_PAIRS))
    num_gpus = 0 if options.cpu else torch.cuda.device_count()
    run_cells(cells, folder, gpu_slots(num_gpus, options.together), options.minutes * 60)
    lines = (folder / "results.jsonl").read_text().splitlines()
    results = {result["name"]: result for result in map(json.loads, lines)}
    report(folder, list(results.values()))
    return any(results[cell["name"]]["problem"] for cell in cells)


def chosen_cells(options, more):
    """Yield the cells of the parts; `more` are options of ours in the part dropout."""
    parts, make_cells = options.part.split(","), cpu_cells if options.cpu else gpu_cells
    for model in (options.models or ("tiny,small" if options.cpu else "small,chatlm")).split(","):
        yield from (cell for cell in make_cells(model) if cell["loop"] in parts)
        if "dropout" in parts:
            yield from dropout_cells(model, more, options.cpu)
        if "profiles" in parts:
            for name in PROFILES:
                yield make_cell(f"{model}/profile/{name}", 32, 2, options=levers_of(name) | more)


def levers_of(profile):
    """{option: text} of the options that run_train.sh types for a profile."""
    script = (ROOT / "run_train.sh").read_text(encoding="utf-8")
    (words,) = re.findall(rf"^{profile}\) levers=\((.*)\)", script, re.MULTILINE)
    return typed(words.split())


def dropout_cells(model, more, on_cpu):
    """Yield cells of ours without dropout and with it, alternating."""
    pace = dict(timed_seconds=3, warm_steps=1) if on_cpu else dict(timed_seconds=6, warm_steps=40, warm_seconds=1)
    for pairs, number, rate in product((8,) if on_cpu else (64, 128, 256), (1, 2), (0.0, 0.1)):
        options = more | dict(dropout=rate)
        yield make_cell(f"{model}/dropout/{pairs}-{rate}-{number}", pairs, 1, options=options, short=True, **pace)


def gpu_cells(model):
    """Yield the cells of `model` on a GPU, in the order in which they start."""
    large = 1024 if model == "small" else 512
    for name, pairs, rounds in (("32x2", 32, 2), ("256", 256, 1), (f"{large}", large, 1)):
        yield make_cell(f"{model}/ours/{name}", pairs, rounds, short=pairs <= 256, warm_steps=12, warm_seconds=4)
    adamw = dict(options=dict(optimizer="adamw_rms"), warm_steps=12, warm_seconds=4)  # A and B use AdamW too
    yield make_cell(f"{model}/ours/256-adamw_rms", 256, 1, short=True, **adamw)
    half = 256 if model == "small" else 128
    for name, pairs, attention, compiled, static in (
        (f"eager-{half}", half, "eager", False, False),
        (f"sdpa-{half}", half, "sdpa", False, False),
        ("sdpa-compiled-128", 128, "sdpa", True, True),
    ):
        flags = dict(attention=attention, compile=compiled, static=static)
        short = name == f"eager-{half}"
        yield make_cell(f"{model}/a/{name}", pairs, 1, short=short, **flags)
    for shape, pairs in zip(((32, 128), (32, 256), (128, 256), (256, 256)), B_PAIRS[model], strict=True):
        name = f"{shape[0]}-{shape[1]}"
        yield make_cell(
            f"{model}/b/{name}", pairs, 1, shape=shape, compile=True, timed_seconds=4, short=model == "small"
        )


def cpu_cells(model):
    """Yield the cells of `model` on a CPU."""
    for optimizer, more in (("", {}), ("-adamw_rms", dict(options=dict(optimizer="adamw_rms")))):
        how = more | dict(timed_seconds=30, warm_steps=1)
        yield make_cell(f"{model}/ours/32x2{optimizer}", 32, 2, CPU_PAIRS, short=model == "tiny", **how)
        yield make_cell(f"{model}/ours/16{optimizer}", 16, 1, CPU_PAIRS, **how)
    for attention, pairs in (("eager", 16), ("sdpa", 16), ("sdpa", 32)):
        flags = dict(attention=attention, compile=False, static=False, timed_seconds=30, warm_steps=1)
        name, short = f"{attention}-{pairs}", model == "tiny" and (attention, pairs) == ("sdpa", 16)
        yield make_cell(f"{model}/a/{name}", pairs, 1, CPU_PAIRS, short=short, **flags)
    if model == "tiny":
        for shape, pairs in zip(((32, 128), (32, 256), (128, 256), (256, 256)), (32, 16, 16, 8), strict=True):
            name = f"{shape[0]}-{shape[1]}"
            yield make_cell(f"{model}/b/{name}", pairs, 1, shape=shape, compile=True, timed_seconds=15, warm_steps=2)


def make_cell(name, pairs, rounds, corpus_pairs=GPU_PAIRS, **more):
    """The cell `name`, MODEL/LOOP/SETTING; a step is `rounds` micro-batches of `pairs` pairs."""
    model, loop, _ = name.split("/")
    grouped = loop == "a" and not more["static"]
    cycle = max(min(corpus_pairs // (pairs * rounds * 4), MEGA_BATCH), WINDOWS) if grouped else WINDOWS
    cell = dict(
        model=model, loop=loop, name=name, pairs=pairs, rounds=rounds, cycle=cycle,
        warm_steps=5, warm_seconds=2, timed_seconds=TIMED_SECONDS, short=False, options={},
        set_up_seconds=SET_UP_SECONDS[model],
    )  # fmt: skip
    return cell | more


def run_cells(cells, folder, slots, total_seconds):
    """Time all cells; print each result and append it to results.jsonl as soon as it is there."""
    by_name = {cell["name"]: cell for cell in cells}
    jobs = [job_of(cell, folder) for cell in cells]
    with open(folder / "results.jsonl", "a") as file:
        for done in run_jobs(jobs, folder / "logs", slots, total_seconds):
            cell = by_name[done.job.name]
            line = json.dumps(cell | dict(problem=problem_of(done), seconds=done.seconds) | figures_of(done))
            print(line, flush=True)
            print(line, file=file, flush=True)


def job_of(cell, folder):
    """The child process of one cell; it has its own compile caches, so its first step compiles everything."""
    caches = folder / "caches" / cell["name"].replace("/", "_")
    words = [sys.executable, "-m", "bench.compare", "--output_dir", folder, "--cell", json.dumps(cell)]
    env = dict(PYTORCH_ALLOC_CONF="expandable_segments:True", HF_HUB_OFFLINE="1")  # as train_low_mem.py sets them
    env |= dict(TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor", TRITON_CACHE_DIR=f"{caches}/triton")
    if os.getloadavg()[0] > os.cpu_count():
        env["OMP_WAIT_POLICY"] = "passive"
    return Job(cell["name"], words, cell["set_up_seconds"] + 400 + 3 * cell["timed_seconds"], env)


def figures_of(done):
    """The figures that the child printed as its last line; {} if it failed."""
    lines = done.text.splitlines()
    return json.loads(lines[-1]) if not done.problem and lines else {}


def problem_of(done):
    """Why a cell failed, in one line; "" if it succeeded."""
    if done.problem == f"exit code {-signal.SIGALRM}":
        return "not set up within its time limit"
    lines = [line for line in done.text.splitlines() if "Error" in line]
    return f"{done.problem}: {lines[-1][:200]}" if done.problem and lines else done.problem


def time_cell(cell, folder):
    """Time one cell in this process and print its figures as the last line."""
    from bench.loops import train_by_hand, train_ours, train_trainer  # transformers takes seconds to import

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if on_gpu else "cpu")
    path = folder / f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock"
    is_ours = cell["loop"] in ("ours", "dropout", "profile")
    gate = Gate(path, alone=is_ours) if on_gpu else None
    pace = Pace(cell["warm_steps"], cell["warm_seconds"], cell["timed_seconds"], cell["cycle"])
    clock = StepClock(device, pace, gate, on_start=lambda: signal.alarm(0), forgets_peak=not is_ours)
    signal.alarm(cell["set_up_seconds"])  # limit of the set-up; the clock cancels it when it starts
    loop = train_ours if is_ours else dict(a=train_trainer, b=train_by_hand)[cell["loop"]]
    more = loop(cell, folder / "corpus", clock)
    print(json.dumps(clock.result() | more), flush=True)
    os._exit(0)  # an ordinary exit would wait for compile workers


if __name__ == "__main__":
    sys.exit(main())
