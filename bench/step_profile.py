"""Where a step's milliseconds go: kernels by group, launches and gaps, and the same steps without the update.

    python -m bench.step_profile --corpus DIR [--models small,chatlm] [--pairs 64,256] [--any_field=value]
    python -m bench.step_profile --corpus LORA_DIR/corpus --models chatlm --pairs 64 --finetune_from_ckp_file=base \
        --lora_rank=16                                    an adapter, after python -m bench.lora --output_dir LORA_DIR

DIR is created if it does not exist. Prints one JSON line per model and number of pairs, then its table. Steps are timed
without the profiler; the busy time is the union of the kernels' intervals under it, and the gaps are the difference to
the median step, which leaves out the steps that are captured. On a CPU the groups are those of PyTorch's operators.
"""

import argparse
import json
import os
import re
import statistics
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch, as train_low_mem.py
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.clock import Pace, StepClock
from bench.corpus import write_corpus
from bench.runs import prepare, typed
from model.runtime.device_memory import release_memory
from model.runtime.distributed import start_ranks
from model.train.step import Position, train_steps

GROUPS = {  # name: pattern of the kernels' names; the first that matches counts
    "attention": r"^attention_",
    "norms": r"^norm_(forward|backward)|rms_norm",
    "cross-entropy": r"cross_entropy|log_softmax|logsumexp",
    "muon's kernels": r"^(matrix_products|subtract_\w+|momentum_and_squares|norms_and_factors)",
    "adapters' kernels": r"^(add_adapters|project|gradient_parts|add_parts)",
    "gates": r"^gate_",
    "adamw's kernels": r"^(adamw_rms|sums_of_squares)|FusedAdam",
    "products": r"nvjet|gemm|cutlass|cublas|splitK|gemv|aten::(addmm|mm|bmm|baddbmm|linear)",
    "copies and zeros": r"Memcpy|Memset|copy|fill|Fill|zero",
    "relu": r"clamp|threshold|relu",
    "embedding": r"embedding|[Ss]ort|[Rr]adix|[Ss]can|index|gather",
    "reductions": r"reduce_kernel|norm|aten::sum",
    "elementwise": r"elementwise|aten::(add|mul|div|sub|where|exp)_?$",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--corpus_pairs", type=int, default=25_600)
    parser.add_argument("--models", default="small,chatlm")
    parser.add_argument("--pairs", default="64,256", help="per step")
    parser.add_argument("--warm_steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=2, help="timed, with the update and again without")
    parser.add_argument("--profiled_steps", type=int, default=10)
    parser.add_argument("--largest", type=int, default=12, help="kernels that are listed by name")
    given, words = parser.parse_known_args()
    if not given.corpus.exists():
        write_corpus(given.corpus, given.corpus_pairs)
    os.chdir(given.corpus)
    ranks = start_ranks()
    for model in given.models.split(","):
        for pairs in given.pairs.split(","):
            line, kernels = profile_training(ranks, given, dict(model=model, batch_size_per_gpu=pairs) | typed(words))
            print(json.dumps(line), flush=True)
            print("\n".join(table(line, kernels, given.largest)), flush=True)
            release_memory()


def profile_training(ranks, given, options):
    """(figures of a training's steps, {kernel: (milliseconds, launches) of a step})."""
    name = "{model}_{batch_size_per_gpu}".format(**options)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run, plan = prepare(ranks, dict(output_dir=f"runs/step_profile_{name}") | options)
    steps = train_steps(run.context, Position(plan))
    timed = time_steps(steps, ranks.device, given)
    steps.close()
    without = time_without_update(run, plan, given)
    steps = train_steps(run.context, Position(plan))
    kernels, busy_ms = profile_steps(steps, ranks.device, given)  # last: what it leaves behind slows no timed step
    steps.close()
    return dict(
        bench="step_profile", model=options["model"], pairs=int(options["batch_size_per_gpu"]),
        optimizer=run.config.optimizer, recorded=plan.graphs, device=device_name(ranks.device),
        tokens_per_second=round(timed["tokens_per_second"]), spread=round(timed["spread"], 3),
        step_ms=round(timed["step_ms"], 3), median_ms=round(timed["median_ms"], 3),
        data_wait_ms=round(timed["data_wait_ms"], 3), busy_ms=round(busy_ms, 3),
        gaps_ms=round(timed["median_ms"] - busy_ms, 3),
        launches=round(sum(count for _, count in kernels.values()), 1), peak_gib=round(timed["peak_gib"], 3),
        without_update_ms=round(without["median_ms"], 3),
        update_ms=round(timed["median_ms"] - without["median_ms"], 3),
    ), kernels  # fmt: skip


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def time_steps(steps, device, given):
    """Figures of `steps` as StepClock gives them."""
    # Graphs captured before the timing hold the peak; replaying them allocates nothing.
    clock, waits = StepClock(device, Pace(given.warm_steps, 0.5, given.seconds), forgets_peak=False), []
    for result in steps:
        waits.append(1e3 * result.data_wait_seconds)
        if clock.tick(len(result.ids), result.tokens):
            return clock.result() | dict(data_wait_ms=statistics.median(waits), median_ms=clock.median_ms())
    raise AssertionError("the corpus ended before the clock")


def time_without_update(run, plan, given):
    """As time_steps, of steps that leave the weights as they are."""
    optimizer, rate = run.optimizer, run.optimizer.param_groups[0]["lr"]
    optimizer.step = optimizer.apply = lambda *_: rate.add_(0.0)  # not nothing: a graph must not be empty
    steps = train_steps(run.context, Position(plan))
    figures = time_steps(steps, run.context.ranks.device, given)
    steps.close()
    del optimizer.step, optimizer.apply
    return figures


def profile_steps(steps, device, given):
    """({kernel: (milliseconds, launches) of a step}, milliseconds of a step in which any kernel ran)."""
    on_gpu, count = device.type == "cuda", given.profiled_steps
    for _ in range(10 * count):  # until nearly every size of steps is captured
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(count):
            next(steps)
        if on_gpu:
            torch.cuda.synchronize()
    kernels, intervals = defaultdict(lambda: [0.0, 0]), []
    for event in profiler.events():
        if (event.device_type == DeviceType.CUDA) == on_gpu:
            microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            kernels[event.name][0] += microseconds / 1e3 / count
            kernels[event.name][1] += 1 / count
            intervals.append((event.time_range.start, event.time_range.end))
    return {name: tuple(values) for name, values in kernels.items()}, covered(intervals) / 1e3 / count


def covered(intervals):
    """Length of the union of intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, last), 0.0)
        last = max(last, end)
    return total


def table(line, kernels, largest):
    """Lines of markdown: milliseconds and launches of a step by group, then the largest kernels."""
    yield (
        f"\n{line['model']}, {line['pairs']} pairs, {line['optimizer']}: {line['median_ms']} ms a step, "
        f"{line['busy_ms']} busy, {line['gaps_ms']} of gaps; {line['without_update_ms']} without update\n"
    )
    groups = defaultdict(lambda: [0.0, 0.0])
    for name, (ms, count) in kernels.items():
        groups[group_of(name)][0] += ms
        groups[group_of(name)][1] += count
    yield "| ms a step | launches | group |\n| --- | --- | --- |"
    yield from rows(groups, len(groups))
    yield "\n| ms a step | launches | kernel |\n| --- | --- | --- |"
    yield from rows(kernels, largest)


def group_of(kernel):
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, kernel)), "other")


def rows(figures, number):
    largest = sorted(figures.items(), key=lambda item: -item[1][0])[:number]
    return [f"| {ms:.3f} | {count:.1f} | {name[:90]} |" for name, (ms, count) in largest]


if __name__ == "__main__":
    main()
