"""Measure the memory of steps beside the estimate: fit its constants, and find its errors in four kinds of runs.

    python -m bench.memory_fit [--out fit.jsonl]          on every visible GPU, 8 minutes at most
    python -m bench.memory_fit --refit fit.jsonl          fit to earlier measurements
    python -m bench.memory_fit --part adapters            T5's variants and adapters: 24 steps in one forward
    python -m bench.memory_fit --part nf4 [--models qwen1.5-7b,qwen3-4b,qwen1.5-1.8b]     Qwens in four bits
    python -m bench.memory_fit --part floor [--models qwen3-4b,qwen1.5-7b]     the least memory of an adapter
    python -m bench.memory_fit --part caps [--guide] [--epochs_only] [--shard 0/1]        small cards (small_cards.py)
    … --rehearse                                          without a GPU: made-up measurements, tiny networks

fit: a case is one training step (forward, backward, update) of `pairs` pairs with `tokens` tokens per side in one
forward. Cases run from small to large, so no earlier one has a higher peak. The constants are fitted to at most 12
cases; the errors are those of the other cases. Exit code 1 if they exceed LIMITS. nf4: 100 steps of 2 x 2,048 tokens,
rank 32 on all layers, under a limit of 11, 8 and 4 GiB, the first two in one forward. floor: the same with all blocks
computed again, their inputs and the optimizer's state in host memory; exit code 1 if that takes more GiB or gives fewer
tokens a second than FLOORS, Unsloth's least on an H100, or the plan errs by more than 5 %. caps: --guide takes the case
of the second guide alone (19.58 GiB, 32 pairs, 256 tokens), --epochs_only the planned epoch of each case, --shard n/k
one in k cases; exit code 1 if memory ran out after planning or the plan reached less than 95 % of the best speed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_low_mem.py sets them
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch

from bench.lora import RANK, shape_of
from bench.one_step import Setting, errors
from bench.packed import FLOORS, QWEN_LIMITS, measure_floor, measure_packed
from bench.small_cards import measure_small_cards
from config import MODELS
from model.commands.option_values import load_config
from model.nn.memory_spec import Constants
from model.nn.t5.sizes import T5ModelConfig
from tests.trials import tell

VOCAB_SIZE = 40_960
SIZES = (
    (8, 64), (8, 256), (8, 512), (32, 128), (32, 512), (96, 256), (128, 64), (256, 192), (512, 64), (512, 128),
    (512, 512),
)  # fmt: skip
MANY_SHORT = 512, 64
LARGEST_BYTES = 130 * 2**30
SECONDS = 360
RANGE = 0.4, 4.0  # a fitted constant over its present value: so few cases cannot separate all constants
CURRENT = Constants()
CONFIG = dict(warmup_steps=0, optimizer="adamw_rms", bleu_pairs=0)
LIMITS = dict(median=0.05, percentile_95=0.12, worst_under=-0.03)


ADAPTERS = [  # (shape, rank, checkpointing, pairs, tokens)
    (shape, rank, checkpointing, pairs, tokens)
    for shape, rank in (("v1.1-small", 0), ("mt5-small", 0), ("chatlm", RANK))
    for checkpointing in (False, True)
    for pairs, tokens in ((32, 128), (128, 64), (128, 192), (256, 192))
]


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str  # bfloat16 or float32
    checkpointing: bool
    pairs: int
    tokens: int  # per side

    @property
    def group(self):
        return self.model, self.dtype, self.checkpointing


CASES = [
    Case(model, dtype, checkpointing, *size)
    for model in ("small", "chatlm")
    for dtype in ("bfloat16", "float32")
    for checkpointing in (False, True)
    for size in SIZES
]


def setting_of(case):
    config, sizes = load_config("pretrain", CONFIG), T5ModelConfig(**MODELS[case.model], vocab_size=VOCAB_SIZE)
    return Setting(config, sizes, False, case.pairs, case.tokens, getattr(torch, case.dtype))


def predict(case, constants=CURRENT):
    """Predicted peak of the reserved bytes in the case's step."""
    setting = setting_of(case)
    return setting.estimate_with(constants).peaks(*setting.whole_step(case.checkpointing).batching)["step"]


def measure(case):
    """Peak of the reserved bytes of the case's step, or None if it does not fit."""
    setting = setting_of(case)
    return setting.run(setting.whole_step(case.checkpointing))[0]


def made_up(case):
    """A made-up measurement: the prediction with other constants and 1 % noise."""
    draw = np.random.default_rng(abs(hash(case)) % 2**32)
    others = Constants(reserved=1.05, holes=1.1, workspace_bytes=3e8)
    measured = int(predict(case, others) * draw.uniform(0.99, 1.01))
    return measured if measured < LARGEST_BYTES else None


def run_shard(shard, num_shards, rehearse):
    """Measure every `num_shards`-th case, from small to large, and print one JSON line per case."""
    deadline = time.monotonic() + SECONDS
    cases = sorted((case for case in CASES if predict(case) < 1.3 * LARGEST_BYTES), key=predict)[shard::num_shards]
    if not rehearse:
        measure(Case("small", "bfloat16", False, 8, 64))  # libraries allocate their workspaces
        measure(Case("small", "float32", False, 8, 64))
    for case in cases:
        if time.monotonic() > deadline:
            print(f"shard {shard}: time is up before {case}", file=sys.stderr, flush=True)
            break
        started = time.monotonic()
        peak = (made_up if rehearse else measure)(case)
        numbers = dict(measured_bytes=peak, seconds=round(time.monotonic() - started, 2))
        print(json.dumps(asdict(case) | numbers), flush=True)


def measure_all(rehearse):
    """JSON lines of all cases, measured by one process per GPU."""
    num_gpus = 1 if rehearse else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    shards = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.memory_fit", "--shard", f"{i}/{num_gpus}", *["--rehearse"] * rehearse],
            env=os.environ | dict(CUDA_VISIBLE_DEVICES="" if rehearse else visible[i], PYTHONHASHSEED="0"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(num_gpus)
    ]
    return [line for shard in shards for line in shard.communicate(timeout=SECONDS + 60)[0].splitlines()]


def choose_for_fit(cases):
    """At most 12 of the cases: a small, a medium or the largest one of each group in turn, and with checkpointing also
    the case of many short pairs, which fragments memory most.
    """
    chosen = []
    for i, group in enumerate(sorted({case.group for case in cases})):
        ours = sorted((case for case in cases if case.group == group), key=predict)
        chosen.append(ours[round((0.2, 0.6, 1.0)[i % 3] * (len(ours) - 1))])
        chosen += [case for case in ours if group[2] and (case.pairs, case.tokens) == MANY_SHORT]
    return list(dict.fromkeys(chosen))[:12]


def errors_of(measured, constants):
    """Relative error of the prediction for each case: predicted / measured - 1."""
    return np.array([predict(case, constants) / peak - 1 for case, peak in measured.items()])


def fit(measured):
    """Constants with the least squared error on `measured` (bytes by case); underestimates weigh three times as much.

    Coordinate descent: each constant in turn takes the best of a few values around it, with shrinking steps.
    """

    def cost(constants):
        error = errors_of(measured, constants)
        return float((np.where(error < 0, 3 * error, error) ** 2).mean())

    best, step = CURRENT, 0.5
    while step > 0.002:
        before = cost(best)
        for name in (f.name for f in fields(Constants)):
            values = (getattr(best, name) * k for k in (1 - step, 1 - step / 3, 1.0, 1 + step / 3, 1 + step))
            least, most = (getattr(CURRENT, name) * k for k in RANGE)
            best = min((replace(best, **{name: min(max(v, least), most)}) for v in values), key=cost)
        if cost(best) > 0.999 * before:
            step /= 1.7
    under = max(0.0, -float(errors_of(measured, best).min()) - 0.005)
    return replace(best, reserved=best.reserved * (1 + under))


def report(lines):
    """Fit, print the errors on the cases left out of the fit, and return whether they are within LIMITS."""
    names = [f.name for f in fields(Case)]
    measured = {Case(**{name: line[name] for name in names}): line["measured_bytes"] for line in lines}
    measured = {case: peak for case, peak in measured.items() if peak and peak <= LARGEST_BYTES}
    chosen = choose_for_fit(measured)
    before = errors_of({case: peak for case, peak in measured.items() if case not in chosen}, CURRENT)
    constants = fit({case: measured[case] for case in chosen})
    others = {case: peak for case, peak in measured.items() if case not in chosen}
    after = errors_of(others, constants)
    for case, peak in measured.items():
        row = dict(measured_gib=round(peak / 2**30, 3), predicted_gib=round(predict(case, constants) / 2**30, 3))
        error = round(predict(case, constants) / peak - 1, 4)
        print(json.dumps(asdict(case) | row | dict(error=error, fitted_on=case in chosen)))
    print(json.dumps(dict(cases=len(others), constants_as_they_are=_summary(before), refitted=_summary(after))))
    print(constants)
    summary = _summary(after)
    within = all(summary[name] <= LIMITS[name] for name in ("median", "percentile_95"))
    return within and summary["worst_under"] >= LIMITS["worst_under"] and len(others) >= 36


def _summary(error):
    size = np.abs(error)
    numbers = dict(
        median=np.median(size), percentile_95=np.percentile(size, 95), worst_under=error.min(), worst_over=error.max()
    )
    return {name: round(float(value), 4) for name, value in numbers.items()}


def measure_adapter(case, rehearse):
    """Predicted and measured peak of one step of a T5 variant or an adapter."""
    shape, rank, checkpointing, pairs, tokens = case
    config = load_config("pretrain", dict(warmup_steps=0, bleu_pairs=0) | (dict(lora_rank=rank) if rank else {}))
    size = (2, 16) if rehearse else (pairs, tokens)
    setting = Setting(config, T5ModelConfig(**shape_of(shape, rehearse)), rehearse, *size)
    plan = setting.whole_step(checkpointing)
    values = dict(shape=shape, rank=rank, checkpointing=checkpointing, pairs=size[0], tokens=size[1])
    return values | errors(setting.estimate.peaks(*plan.batching)["step"], setting.run(plan)[0])


def measure_adapters(rehearse):
    """Yield the records of ADAPTERS, then a summary of their errors."""
    found = []
    for case in ADAPTERS:
        found.append(measure_adapter(case, rehearse))
        yield found[-1]
    sizes = np.array([abs(result["error"]) for result in found if result["error"] is not None])
    if len(sizes):
        median, high = (round(float(np.percentile(sizes, percent)), 4) for percent in (50, 95))
        yield dict(cases=len(sizes), median=median, percentile_95=high)


def named(options, known):
    """The models that --models names, or all that are known."""
    return options.models.split(",") if options.models else list(known)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="fit", choices=("fit", "adapters", "nf4", "floor", "caps"))
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--refit", help="file of earlier measurements to fit to")
    parser.add_argument("--rehearse", action="store_true", help="use made-up measurements, tiny networks")
    parser.add_argument("--shard", default="", help="n/k: every k-th case, from the n-th")
    parser.add_argument("--models", default="", help="of nf4 and floor")
    parser.add_argument("--guide", action="store_true", help="of caps: only the case of the second guide")
    parser.add_argument("--epochs_only", action="store_true", help="of caps: do not time other plans")
    parser.add_argument("--seconds", type=float, default=560, help="of caps: no case starts after this time")
    options = parser.parse_args()
    if options.part != "fit":
        records = dict(
            adapters=lambda: measure_adapters(options.rehearse),
            nf4=lambda: (measure_packed(name, options.rehearse) for name in named(options, QWEN_LIMITS)),
            floor=lambda: (measure_floor(name, options.rehearse) for name in named(options, FLOORS)),
            caps=lambda: measure_small_cards(options),
        )[options.part]()
        held = [tell(options.out, **record) or record.get("held", True) for record in records]
        return 0 if all(held) else 1
    if options.shard:
        run_shard(*map(int, options.shard.split("/")), options.rehearse)
        return 0
    lines = Path(options.refit).read_text().splitlines() if options.refit else measure_all(options.rehearse)
    if options.out:
        Path(options.out).write_text("".join(line + "\n" for line in lines))
    return 0 if report([json.loads(line) for line in lines]) else 1


if __name__ == "__main__":
    sys.exit(main())
