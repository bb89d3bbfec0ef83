"""Under small cards reproduced on a large one: does the plan hold, and how near is it to the best micro-batch?

    python -m bench.caps --out caps.jsonl        one GPU; the cases of the n-th of k: --shard n/k
    python -m bench.caps --guide                 the second guide's case alone: 19.58 GiB, batch 32, 256 tokens
    python -m bench.caps --epochs_only           each case's epoch as planned, no other way tried

For each cap in GiB, model and batch size: one epoch of 2,048 pairs with a heavy tail, as planned, and then the same few
steps with the plan and with each micro-batch from one longest pair on, with and without gradient checkpointing, under
the same cap; where the epoch repays recordings also recorded and not. Prints a JSON line a case; exit code 1 when
memory ran out after planning or a plan kept less than 95 % of the best speed.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product

import numpy as np

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_low_mem.py sets it
import torch

from config import MODELS, T5ModelConfig, load_config
from model.commands.setup import Run, check_memory_fits, compute_dtype
from model.memory.plan import STEPS_THAT_REPAY_RECORDING, NothingFits
from model.nn.t5.network import TextToTextModel
from model.runtime.device_memory import limit_memory, non_torch_bytes, other_process_bytes
from model.runtime.distributed import Ranks
from model.train.dry_run import plan_run, rehearse_update
from model.train.loader import Schedule
from model.train.optim import make_optimizer
from model.train.step import TornUpdate, train_steps

VOCAB_SIZE, NUM_PAIRS = 40_960, 2048
OPTIMIZERS = "muon", "adafactor", "adamw_rms"  # the default first
CAPS, BATCHES, LONGEST = (4, 8, 12, 20), (8, 16, 32, 64, 96), 512
WARM_STEPS, RECORDING_STEPS, REPEATS = 3, 60, 3
TRIED_STEPS, TRIED_PAIRS = 12, 384  # timed, at least: of few pairs more steps, or they would not stand for an epoch
HOPELESS, ENOUGH = 0.8, 0.95


@dataclass(frozen=True)
class HeavyTail:
    """A token store of short pairs, one in twenty of which is as long as can be."""

    longest: int

    @property
    def lengths(self):
        draw = np.random.default_rng(0)
        lengths = np.minimum(draw.geometric(1 / 60, (NUM_PAIRS, 2)) + 1, self.longest).astype(np.uint16)
        lengths[::20] = self.longest
        return lengths

    @property
    def meta(self):
        return dict(source=dict(max_seq_len=self.longest))

    def __len__(self):
        return NUM_PAIRS

    def tokens(self, ids):
        draw, totals = np.random.default_rng(0), self.lengths[ids].sum(axis=0, dtype=np.int64)
        return tuple(draw.integers(3, VOCAB_SIZE, total) for total in totals)


def make_run(model_name, batch, cap_gib, optimizer, device, foreign, longest=LONGEST):
    """(Run, its plan): as a training under this cap would be prepared, where others hold `foreign` bytes.

    Raises NothingFits.
    """
    config = load_config("pretrain", dict(
        model=model_name, batch_size_per_gpu=batch, gradient_accumulation_steps=1, gpu_memory_limit_gb=cap_gib,
        epochs=1, max_seq_len=longest, optimizer=optimizer, warmup_steps=10, bleu_pairs=0, learn_rate=1e-3,
    ))  # fmt: skip
    limit_memory(device, cap_gib, non_torch_bytes(device, foreign))
    shape = T5ModelConfig(**MODELS[model_name], vocab_size=VOCAB_SIZE)
    ranks, store = Ranks(0, 1, 0, device, "none", None), HeavyTail(longest)
    dtype = compute_dtype(config.mixed_precision, device)
    check_memory_fits(ranks, config, shape, dtype, store.lengths, batch, foreign)
    with torch.device(device):
        model = TextToTextModel(shape, compute_dtype=dtype)
    model.flat.masters.normal_(std=0.02)
    optimizer = make_optimizer(model, config)
    rehearse_update(ranks, model, optimizer)
    run = Run(config, ranks, None, store, store, model, optimizer, Schedule(NUM_PAIRS, 0, batch, 0))
    plan, memory = plan_run(run, None, foreign)
    return replace(run, memory=memory), plan


def train_epoch(run, plan):
    """(tokens/s, out of memory events, tokens of each step) of an epoch."""
    results = []
    for result in train_steps(run.ranks, run.model, run.optimizer, run.train, plan, run.config, run.schedule):
        results.append(result)
        if len(results) == WARM_STEPS:
            started = clock(run)
    events, tokens = sum(len(result.events) for result in results), [result.tokens for result in results]
    return sum(tokens[WARM_STEPS:]) / (clock(run) - started), events, tokens


def clock(run):
    if run.ranks.device.type == "cuda":
        torch.cuda.synchronize(run.ranks.device)
    return time.perf_counter()


def speeds_by_trying(run, plan, most_tokens, may_record):
    """Tokens/s by plan: the chosen one, and powers of two of micro-batches that fit, up to one for `most_tokens`.

    From the largest down, until one is far from the best: smaller ones are slower still. With `may_record` the largest
    that fits is also tried recorded where `plan` is not, or the other way round. Those near the best are tried again in
    turn. Of a step that several plans cut alike the fastest time counts for all of them: it is the same work, and what
    is left is not the machine's noise. A plan that beats the chosen one must last an epoch.
    """
    fastest, sizes = {}, range(math.ceil(math.log2(max(most_tokens, 2 * LONGEST))), LONGEST.bit_length() - 1, -1)
    try_plan = partial(tried_ways, run, fastest, RECORDING_STEPS if may_record else WARM_STEPS)
    first, tokens = try_plan(plan)
    ways = {plan: first}

    def speeds():
        return {p: tokens / sum(fastest[way] for way in done) if done else 0.0 for p, done in ways.items()}

    recorded = (plan.graphs, not plan.graphs) if may_record else (plan.graphs,)
    for again, graphs in product((False, True), recorded):
        for size in sizes:
            tried = replace(plan.cut_as((2**size, plan.chunk_tokens, again)), graphs=graphs)
            ways[tried], _ = try_plan(tried)
            if graphs != plan.graphs and ways[tried] or 0 < speeds()[tried] < HOPELESS * max(speeds().values()):
                break
    near = [p for p, per_second in speeds().items() if per_second >= HOPELESS * max(speeds().values())]
    for _, tried in product(range(REPEATS), near):
        ways[tried], _ = try_plan(tried)
    for tried in near:
        if speeds()[plan] < ENOUGH * speeds()[tried] and train_epoch(run, tried)[1]:
            ways[tried] = None
    return speeds()


def tried_ways(run, fastest, warm, plan):
    """(Ways in which `plan` does the steps after `warm`, None where they do not fit; these steps' tokens).

    A way is the number of the step, of its forwards, and the rest of the plan; its least seconds go to `fastest`.
    """
    schedule = replace(run.schedule, total_pairs=8 * NUM_PAIRS)
    num_timed = max(TRIED_STEPS, TRIED_PAIRS // schedule.global_batch)
    steps = train_steps(run.ranks, run.model, run.optimizer, run.train, plan, run.config, schedule)
    results = []
    try:
        for result in islice(steps, warm + num_timed):
            if result.events:
                return None, 0
            results.append(result)
    except (NothingFits, TornUpdate):
        return None, 0
    ways = [(result.step, result.micro_batches, *plan.cutting[1:], plan.graphs) for result in results[warm:]]
    for way, result in zip(ways, results[warm:], strict=True):
        fastest[way] = min(fastest.get(way, math.inf), result.step_seconds)
    return ways, sum(result.tokens for result in results[warm:])


def measure(model_name, batch, cap_gib, optimizer, device, foreign, longest=LONGEST, epoch_only=False):
    """The record of one case, with `epoch_only` without the speeds of other plans."""
    record = dict(model=model_name, batch=batch, cap_gib=cap_gib, optimizer=optimizer)
    try:
        run, plan = make_run(model_name, batch, cap_gib, optimizer, device, foreign, longest)
    except NothingFits as refusal:
        return record | dict(refused=str(refusal), held=True)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    whole_epoch, events, tokens = train_epoch(run, plan)
    peak = torch.cuda.max_memory_reserved(device) if on_gpu else 0
    record |= dict(
        plan=plan.cutting, graphs=plan.graphs, predicted_bytes=plan.predicted_peak_bytes, peak_reserved_bytes=peak,
        limits={name: run.memory[name] for name in ("non_torch_bytes", "allocator_limit_bytes")}, steps=len(tokens),
        out_of_memory_events=events, epoch_tokens_per_second=round(whole_epoch), held=not events,
    )  # fmt: skip
    if epoch_only:
        return record
    may_record = on_gpu and len(tokens) >= STEPS_THAT_REPAY_RECORDING
    return record | beside_the_best(plan, speeds_by_trying(run, plan, max(tokens), may_record), events)


def beside_the_best(plan, speeds, events):
    """What a record says of `plan` among the tokens/s of all that was tried."""
    planned, best = speeds[plan], max(speeds, key=speeds.get)
    return dict(
        tokens_per_second=round(planned), best_tokens_per_second=round(speeds[best]),
        best_plan=[*best.cutting, best.graphs], of_the_best=round(planned / speeds[best], 3) if planned else 0.0,
        held=not events and planned >= ENOUGH * speeds[best],
        tried=[[*tried.cutting, tried.graphs, round(per_second)] for tried, per_second in speeds.items()],
    )  # fmt: skip


def cases():
    """Every (model, batch, cap, optimizer): under 4 GiB chatlm also with Adafactor and AdamW."""
    for optimizer, (cap, model_name), batch in product(OPTIMIZERS, product(CAPS, ("small", "chatlm")), BATCHES):
        if optimizer == OPTIMIZERS[0] or (cap, model_name) == (4, "chatlm"):
            yield model_name, batch, cap, optimizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--shard", default="0/1", help="n/k: every k-th case from the n-th on")
    parser.add_argument("--guide", action="store_true", help="the second guide's case alone")
    parser.add_argument("--epochs_only", action="store_true", help="no other way is tried")
    parser.add_argument("--seconds", type=float, default=560, help="no case is begun after so long")
    given = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    shard, num_shards = map(int, given.shard.split("/"))
    chosen = [("chatlm", 32, 19.58, "muon", 256)] if given.guide else list(cases())[shard::num_shards]
    if device.type == "cuda":  # as in a training: each recording would take a stream, and cuBLAS a workspace for it
        torch.cuda.set_stream(torch.cuda.Stream())
    foreign = other_process_bytes(device)  # once: what a case leaves loaded is this process's own
    deadline, held = time.monotonic() + given.seconds, True
    for model_name, batch, cap, optimizer, *longest in chosen:
        if time.monotonic() > deadline:
            print(f"time is up before {model_name}, {batch}, {cap}", file=sys.stderr)
            break
        record = measure(model_name, batch, cap, optimizer, device, foreign, *longest, epoch_only=given.epochs_only)
        held = held and record["held"]
        print(json.dumps(record), flush=True)
        if given.out:
            with open(given.out, "a") as file:
                file.write(json.dumps(record) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
