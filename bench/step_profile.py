"""Where a step's milliseconds go: kernels by group, launches and gaps, and the same steps without the update.

    python -m bench.step_profile --corpus DIR [--models small,chatlm] [--pairs 64,256] [--any_field=value]
    python -m bench.step_profile --corpus LORA_DIR/corpus --models chatlm --pairs 64 --finetune_from_ckp_file=base \
        --lora_rank=16                                    an adapter, after python -m bench.lora --output_dir LORA_DIR
    python -m bench.step_profile --limit [--tflops 800] [--terabytes 4.8]    what the step would take at the GPU's speed

DIR is created if it does not exist. Prints one JSON line per model and number of pairs, then its table. Steps are timed
without the profiler; the busy time is the union of the kernels' intervals under it, and the gaps are the difference to
the median step, which leaves out the steps that are captured. On a CPU the groups are those of PyTorch's operators.

The limit is computed, on any machine: a product takes its FLOPs or its bytes, whichever takes longer; what passes over
memory takes its bytes, each tensor read or written once. Lengths are those of bench.corpus. Padding to a bucket,
launches and tiles that are not full are not counted, so no step reaches it.
"""

import argparse
import json
import os
import re
import statistics
from collections import defaultdict
from itertools import product
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch, as train_low_mem.py
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.clock import Pace, StepClock
from bench.corpus import VOCAB_SIZE, draw_lengths, write_corpus
from bench.runs import prepare, typed
from config import MODELS
from model.nn.memory_spec import count_numbers
from model.nn.t5.family import T5
from model.nn.t5.sizes import T5ModelConfig
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
# Multiply-adds of Muon's four steps, in cubes of a matrix's shorter side, symmetric products by half. Square matrices:
# 4 x (1/2 + 1/2 + 1). Those four times as long: 2 x (1/2 + 1) x 4 for two parts of steps, and ten symmetric products of
# their Gram matrices. See model/train/orthogonal.py.
SQUARE_CUBES, LONG_CUBES = 8, 17


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--corpus_pairs", type=int, default=25_600)
    parser.add_argument("--models", default="small,chatlm")
    parser.add_argument("--pairs", default="64,256", help="per step")
    parser.add_argument("--warm_steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=2, help="timed, with the update and again without")
    parser.add_argument("--profiled_steps", type=int, default=10)
    parser.add_argument("--largest", type=int, default=12, help="kernels that are listed by name")
    parser.add_argument("--limit", action="store_true", help="print the limit alone")
    parser.add_argument("--tflops", type=float, default=800, help="of bf16 products, dense")
    parser.add_argument("--terabytes", type=float, default=4.8, help="of memory traffic, per second")
    given, words = parser.parse_known_args()
    if given.limit:
        return print_limits(given)
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


def print_limits(given):
    lengths = draw_lengths(100_000, np.random.default_rng(0)).astype(float)
    for model, pairs in product(given.models.split(","), map(int, given.pairs.split(","))):
        sizes = T5ModelConfig(**MODELS[model], vocab_size=VOCAB_SIZE)
        groups = limits(sizes, lengths, pairs, given.tflops * 1e9, given.terabytes * 1e9)
        line = ", ".join(f"{name} {ms:.2f}" for name, ms in groups.items())
        print(f"{model}, {pairs} pairs: {sum(groups.values()):.2f} ms: {line}")


def limits(sizes, lengths, pairs, flops_per_ms, bytes_per_ms):
    """{group: milliseconds of a step} of a T5 with Muon in bf16, under the names of bench.step_profile."""
    prompt, response = pairs * lengths.mean(axis=0)
    d, blocks = sizes.d_model, (sizes.num_layers, sizes.num_decoder_layers)
    numbers = count_numbers(T5, sizes)
    matrices, weights = numbers.matrices, numbers.weights
    norms = prompt * (2 * blocks[0] + 1) + response * (3 * blocks[1] + 1)
    passes = {  # bytes
        "cross-entropy": 4 * response * VOCAB_SIZE,  # bf16 logits in, gradient out
        "norms": 16 * d * norms,  # forward and backward: four bf16 tensors each
        "adamw's kernels": 28 * (weights - matrices) + 4 * weights,  # moments, weight, gradient; norm of the gradient
        "copies and zeros": 6 * weights,  # float32 gradients set to zero, bf16 weights written
        "embedding": 14 * d * (prompt + response),
    }
    return {
        "products": sum(
            count * max(6 * tokens * rows * columns / flops_per_ms, product_bytes(tokens, rows, columns) / bytes_per_ms)
            for count, tokens, rows, columns in products(sizes, prompt, response)
        ),
        "attention": sum(
            count * max(flops / flops_per_ms, traffic / bytes_per_ms)
            for count, flops, traffic in attentions(sizes, lengths, pairs)
        ),
        "muon's kernels": muon_flops(sizes) / flops_per_ms + 20 * matrices / bytes_per_ms,
    } | {name: traffic / bytes_per_ms for name, traffic in passes.items()}


def products(sizes, prompt, response):
    """(number, tokens, inputs, outputs) of the linear layers."""
    d, inner, f = sizes.d_model, sizes.num_heads * sizes.d_kv, sizes.d_ff
    for blocks, tokens, attentions in ((sizes.num_layers, prompt, 1), (sizes.num_decoder_layers, response, 2)):
        yield blocks, tokens, d, 3 * inner
        yield blocks * attentions, tokens, inner, d
        yield blocks, tokens, d, f
        yield blocks, tokens, f, d
    yield sizes.num_decoder_layers, response, d, inner
    yield sizes.num_decoder_layers, prompt, d, 2 * inner
    yield 1, response, d, VOCAB_SIZE


def product_bytes(tokens, rows, columns):
    """Bytes of forward and both products of backward: bf16 tensors, a float32 gradient that is added to."""
    return 3 * 2 * tokens * (rows + columns) + (2 * 2 + 8) * rows * columns


def attentions(sizes, lengths, pairs):
    """(number, FLOPs, bytes) of the attention layers: two products forward, five backward; exponentials not counted."""
    prompt, response = lengths.T
    inner = sizes.num_heads * sizes.d_kv
    for blocks, queries, keys, share in (
        (sizes.num_layers, prompt, prompt, 1),
        (sizes.num_decoder_layers, response, response, 0.5),
        (sizes.num_decoder_layers, response, prompt, 1),
    ):
        traffic = 2 * inner * (6 * queries + 6 * keys)  # forward q, k, v, out; backward these and their gradients
        yield blocks, pairs * 7 * 2 * inner * share * (queries * keys).mean(), pairs * traffic.mean()


def muon_flops(sizes):
    """FLOPs of the orthogonalisation of all matrices of a T5 whose d_ff is four times d_model."""
    square = 4 * (sizes.num_layers + 2 * sizes.num_decoder_layers)
    long = 2 * (sizes.num_layers + sizes.num_decoder_layers)
    return 2 * (SQUARE_CUBES * square + LONG_CUBES * long) * sizes.d_model**3


if __name__ == "__main__":
    main()
