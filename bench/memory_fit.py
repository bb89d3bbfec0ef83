"""Measure the memory of steps, fit the constants of the memory estimate to it, and print the estimate's errors.

    python -m bench.memory_fit --out fit.jsonl            on every visible GPU, 8 minutes at most
    python -m bench.memory_fit --refit fit.jsonl          fit to earlier measurements
    python -m bench.memory_fit --rehearse                 without a GPU, with made-up measurements

A case is one training step (forward, backward, update) of `pairs` pairs with `tokens` tokens per side in one forward.
Cases run from small to large, so no earlier one has a higher peak. The constants are fitted to at most 12 cases; the
errors are those of the other cases. Exit code 1 if they exceed LIMITS.
"""

import argparse
import gc
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

from bench.runs import context_of, schedule_of
from config import MODELS, load_config
from model.commands.recipe import with_optimizer
from model.data.length_histogram import Lengths
from model.memory.estimate import Estimate
from model.memory.plan import MemoryPlan
from model.nn.attention import has_kernels
from model.nn.memory_spec import Constants, MemorySpec
from model.nn.t5.family import T5
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.device_memory import peak_memory, release_memory, reset_peak
from model.runtime.distributed import Ranks
from model.train.dry_run import dry_run_update
from model.train.optim import make_optimizer
from model.train.step import Position, train_steps

VOCAB_SIZE, CHUNK_TOKENS = 40_960, 2048
SIZES = (
    (8, 64), (8, 256), (8, 512), (32, 128), (32, 512), (96, 256), (128, 64), (256, 192), (512, 64), (512, 128),
    (512, 512),
)  # fmt: skip
MANY_SHORT = 512, 64
LARGEST_BYTES = 130 * 2**30
SECONDS = 360
RANGE = 0.4, 4.0  # a fitted constant over its present value: so few cases cannot separate all constants
CURRENT = Constants()
LIMITS = dict(median=0.05, percentile_95=0.12, worst_under=-0.03)


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str  # bfloat16 or float32
    checkpointing: bool
    pairs: int
    tokens: int  # per side

    @property
    def blocks(self):
        """Checkpointed blocks."""
        sizes = MODELS[self.model]
        return self.checkpointing * (sizes["num_layers"] + sizes["num_decoder_layers"])

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


@dataclass(frozen=True)
class OneLength:
    """A token store of `pairs` examples with `token_count` tokens per side."""

    pairs: int
    token_count: int
    vocab_size: int = VOCAB_SIZE

    @property
    def lengths(self):
        return np.full((self.pairs, 2), self.token_count, np.uint16)

    @property
    def meta(self):
        return dict(source=dict(max_seq_len=self.token_count))

    def __len__(self):
        return self.pairs

    def tokens(self, ids):
        draw = np.random.default_rng(0)
        return tuple(draw.integers(3, self.vocab_size, len(ids) * self.token_count) for _ in range(2))


def predict(case, constants=CURRENT):
    """Predicted peak of the reserved bytes in the case's step."""
    dtype = getattr(torch, case.dtype)
    model_config = T5ModelConfig(**MODELS[case.model], vocab_size=VOCAB_SIZE)
    kernels = has_kernels(torch.device("cuda"), dtype, *model_config.kernel_sizes)
    spec = with_optimizer(MemorySpec(T5, model_config, dtype.itemsize, kernels, constants=constants), "adamw_rms")
    lengths = Lengths(np.array([[case.tokens, case.tokens]]), np.array([case.pairs]))
    tokens = 2 * case.pairs * case.tokens
    return Estimate(spec, lengths, case.pairs).peaks(tokens, CHUNK_TOKENS, case.blocks)["step"]


def measure(case, device):
    """(peak reserved, peak allocated) bytes of the case's step on `device`, or None if it does not fit."""
    model_config = T5ModelConfig(**MODELS[case.model], vocab_size=VOCAB_SIZE)
    with torch.device(device):
        model = TextToTextModel(model_config, compute_dtype=getattr(torch, case.dtype))
    model.flat.masters.normal_(std=0.02)
    config = load_config("pretrain", dict(warmup_steps=0, optimizer="adamw_rms"))
    plan = MemoryPlan(2 * case.pairs * case.tokens, CHUNK_TOKENS, case.blocks, 0)
    ranks, store = Ranks(0, 1, 0, device, "none", None), OneLength(case.pairs, case.tokens)
    optimizer, schedule = make_optimizer(model, config), schedule_of(config, case.pairs, case.pairs)
    dry_run_update(ranks, model, optimizer)
    release_memory()
    reset_peak(device)
    result = next(train_steps(context_of(ranks, model, optimizer, store, config, schedule), Position(plan)))
    torch.cuda.synchronize(device)
    allocated, reserved, _ = peak_memory(device)
    return None if result.events or result.micro_batches != 1 else (reserved, allocated)


def made_up(case, _):
    """A made-up measurement: the prediction with other constants and 1 % noise."""
    draw = np.random.default_rng(abs(hash(case)) % 2**32)
    others = Constants(reserved=1.05, holes=1.1, workspace_bytes=3e8)
    measured = int(predict(case, others) * draw.uniform(0.99, 1.01))
    return (measured, measured) if measured < LARGEST_BYTES else None


def run_shard(shard, num_shards, rehearse):
    """Measure every `num_shards`-th case, from small to large, and print one JSON line per case."""
    device, deadline = torch.device("cpu" if rehearse else "cuda:0"), time.monotonic() + SECONDS
    cases = sorted((case for case in CASES if predict(case) < 1.3 * LARGEST_BYTES), key=predict)[shard::num_shards]
    if not rehearse:
        torch.zeros(1, device=device)  # initialises the device
        measure(Case("small", "bfloat16", False, 8, 64), device)  # libraries allocate their workspaces
        measure(Case("small", "float32", False, 8, 64), device)
    for case in cases:
        if time.monotonic() > deadline:
            print(f"shard {shard}: time is up before {case}", file=sys.stderr, flush=True)
            break
        started = time.monotonic()
        reserved, allocated = (made_up if rehearse else measure)(case, device) or (None, None)
        gc.collect()
        numbers = dict(measured_bytes=reserved, allocated_bytes=allocated)
        print(json.dumps(asdict(case) | numbers | dict(seconds=round(time.monotonic() - started, 2))), flush=True)


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


def errors(measured, constants):
    """Relative error of the prediction for each case: predicted / measured - 1."""
    return np.array([predict(case, constants) / peak - 1 for case, peak in measured.items()])


def fit(measured):
    """Constants with the least squared error on `measured` (bytes by case); underestimates weigh three times as much.

    Coordinate descent: each constant in turn takes the best of a few values around it, with shrinking steps.
    """

    def cost(constants):
        error = errors(measured, constants)
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
    under = max(0.0, -float(errors(measured, best).min()) - 0.005)
    return replace(best, reserved=best.reserved * (1 + under))


def report(lines):
    """Fit, print the errors on the cases left out of the fit, and return whether they are within LIMITS."""
    names = [f.name for f in fields(Case)]
    measured = {Case(**{name: line[name] for name in names}): line["measured_bytes"] for line in lines}
    measured = {case: peak for case, peak in measured.items() if peak and peak <= LARGEST_BYTES}
    chosen = choose_for_fit(measured)
    before = errors({case: peak for case, peak in measured.items() if case not in chosen}, CURRENT)
    constants = fit({case: measured[case] for case in chosen})
    others = {case: peak for case, peak in measured.items() if case not in chosen}
    after = errors(others, constants)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="file for the measurements, one JSON line each")
    parser.add_argument("--refit", help="file of earlier measurements to fit to")
    parser.add_argument("--rehearse", action="store_true", help="use made-up measurements")
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shard:
        run_shard(*map(int, options.shard.split("/")), options.rehearse)
        return 0
    lines = Path(options.refit).read_text().splitlines() if options.refit else measure_all(options.rehearse)
    if options.out:
        Path(options.out).write_text("".join(line + "\n" for line in lines))
    return 0 if report([json.loads(line) for line in lines]) else 1


if __name__ == "__main__":
    sys.exit(main())
