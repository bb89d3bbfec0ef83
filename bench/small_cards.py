"""Emulate small GPUs on a large one: does the plan fit, and how close is its speed to the best micro-batch?

A case is a memory cap in GiB, a model and a batch size. It trains one epoch of 2,048 pairs, a few of them much longer
than the rest, with the plan. Then it times the same few steps under the same cap with the plan and with every
micro-batch size down to one longest pair, with and without activation checkpointing; with and without CUDA graphs too,
if the epoch is long enough to repay them.
"""

import gc
import math
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product

import torch

from bench.runs import context_of, evaluation_of, schedule_of
from config import MODELS
from model.commands.machine import compute_dtype, machine_of
from model.commands.option_values import load_config
from model.commands.recipe import answers_wanted, memory_spec, plan_options
from model.data.length_histogram import histogram
from model.memory.estimate import Estimate
from model.memory.plan import STEPS_THAT_REPAY_GRAPHS, NothingFits, choose_plan
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.device_memory import limit_memory, non_torch_bytes, other_process_bytes
from model.runtime.distributed import Ranks
from model.train.dry_run import dry_run_update, plan_run
from model.train.optim import make_optimizer
from model.train.step import Position, TornUpdate, train_steps
from tests.sizes import HeavyTail

VOCAB_SIZE, NUM_PAIRS = HeavyTail.vocab_size, HeavyTail.pairs
OPTIMIZERS = "muon", "adafactor", "adamw_rms"  # the default first
CAPS, BATCHES, LONGEST = (4, 8, 12, 20), (8, 16, 32, 64, 96), 512
WARM_STEPS, RECORDING_STEPS, REPEATS = 3, 60, 3
TRIED_STEPS, TRIED_PAIRS = 12, 384  # lower bounds: small steps are timed more often, to represent an epoch
HOPELESS, ENOUGH = 0.8, 0.95


@dataclass(frozen=True)
class Case:
    model: str
    batch: int  # pairs per step
    cap_gib: float
    optimizer: str
    longest: int = LONGEST  # tokens of a side


GUIDE = Case("chatlm", 32, 19.58, "muon", 256)  # of the second guide
REHEARSAL = Case("tiny", 8, 4, "adamw_rms", 16)


def make_run(case, device, other_bytes):
    """(StepContext, its plan, memory) of a case while other processes hold `other_bytes`. Raises NothingFits."""
    config = load_config("pretrain", dict(
        model=case.model, batch_size_per_gpu=case.batch, gradient_accumulation_steps=1,
        gpu_memory_limit_gb=case.cap_gib, epochs=1, max_seq_len=case.longest, optimizer=case.optimizer,
        warmup_steps=10, bleu_pairs=0, learn_rate=1e-3,
    ))  # fmt: skip
    usable = limit_memory(device, case.cap_gib, non_torch_bytes(device, other_bytes))
    model_config = T5ModelConfig(**MODELS[case.model], vocab_size=VOCAB_SIZE)
    ranks, store = Ranks(0, 1, 0, device, "none", None), HeavyTail(case.longest)
    machine = machine_of(ranks)
    dtype = compute_dtype(config.mixed_precision, machine.native_bf16)
    spec = memory_spec(config, model_config, dtype, machine)
    answers = answers_wanted(config.bleu_pairs, config.max_new_tokens, machine)
    estimate = Estimate(spec, histogram(store.lengths), case.batch, answers)
    choose_plan(plan_options(config), estimate, usable)
    with torch.device(device):
        model = TextToTextModel(model_config, compute_dtype=dtype)
    model.flat.masters.normal_(std=0.02)
    optimizer = make_optimizer(model, config)
    dry_run_update(ranks, model, optimizer)
    context = context_of(ranks, model, optimizer, store, config, schedule_of(config, NUM_PAIRS, case.batch))
    return context, *plan_run(context, evaluation_of(context), estimate, plan_options(config), None, other_bytes)


def train_epoch(run, plan):
    """(tokens/s, number of out-of-memory events, tokens of each step) of one epoch."""
    results = []
    for result in train_steps(run, Position(plan)):
        results.append(result)
        if len(results) == WARM_STEPS:
            started = clock(run)
    events, tokens = sum(len(result.events) for result in results), [result.tokens for result in results]
    return sum(tokens[WARM_STEPS:]) / (clock(run) - started), events, tokens


def clock(run):
    if run.ranks.device.type == "cuda":
        torch.cuda.synchronize(run.ranks.device)
    return time.perf_counter()


def speeds_by_trying(run, plan, most_tokens, may_capture):
    """{plan: tokens/s} of `plan` and of micro-batches of 2^n tokens, at most one step of `most_tokens`; 0 if they do
    not fit.

    Sizes are tried from the largest down until one is much slower than the best, since smaller ones are slower still.
    With `may_capture` the largest size that fits is also tried with the other choice of CUDA graphs. Plans near the
    best are timed REPEATS more times, in turn. Plans that cut a step in the same way do the same work, so the fastest
    time of that step counts for all of them: this removes the machine's noise. A plan faster than `plan` must also
    train a whole epoch without running out of memory.
    """
    longest = run.loader.examples.store.longest
    fastest, sizes = {}, range(math.ceil(math.log2(max(most_tokens, 2 * longest))), longest.bit_length() - 1, -1)
    try_plan = partial(tried_ways, run, fastest, RECORDING_STEPS if may_capture else WARM_STEPS)
    first, tokens = try_plan(plan)
    ways = {plan: first}

    def speeds():
        return {p: tokens / sum(fastest[way] for way in done) if done else 0.0 for p, done in ways.items()}

    recorded = (plan.graphs, not plan.graphs) if may_capture else (plan.graphs,)
    for again, graphs in product((False, True), recorded):
        for size in sizes:
            tried = replace(plan.batched_as((2**size, plan.chunk_tokens, again)), graphs=graphs)
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
    """(ways of the timed steps or None if they do not fit, tokens of these steps); `warm` steps go first, untimed.

    A way is (step, number of forwards, rest of the plan): all that decides a step's work. `fastest` keeps the least
    seconds of each.
    """
    schedule = replace(run.loader.schedule, total_pairs=8 * NUM_PAIRS)
    num_timed = max(TRIED_STEPS, TRIED_PAIRS // schedule.global_batch)
    steps = train_steps(replace(run, loader=replace(run.loader, schedule=schedule)), Position(plan))
    results = []
    try:
        for result in islice(steps, warm + num_timed):
            if result.events:
                return None, 0
            results.append(result)
    except (NothingFits, TornUpdate):
        return None, 0
    ways = [(result.step, result.micro_batches, *plan.batching[1:], plan.graphs) for result in results[warm:]]
    for way, result in zip(ways, results[warm:], strict=True):
        fastest[way] = min(fastest.get(way, math.inf), result.step_seconds)
    return ways, sum(result.tokens for result in results[warm:])


def measure(case, device, other_bytes, epoch_only=False):
    """The record of one case; with `epoch_only` it has no speeds of other plans."""
    record = dict(model=case.model, batch=case.batch, cap_gib=case.cap_gib, optimizer=case.optimizer)
    try:
        run, plan, memory = make_run(case, device, other_bytes)
    except NothingFits as refusal:
        return record | dict(refused=str(refusal), held=True)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    whole_epoch, events, tokens = train_epoch(run, plan)
    peak = torch.cuda.max_memory_reserved(device) if on_gpu else 0
    record |= dict(
        plan=plan.batching, graphs=plan.graphs, predicted_bytes=plan.predicted_peak_bytes, peak_reserved_bytes=peak,
        limits={name: memory[name] for name in ("non_torch_bytes", "allocator_limit_bytes")}, steps=len(tokens),
        out_of_memory_events=events, epoch_tokens_per_second=round(whole_epoch), held=not events,
    )  # fmt: skip
    if epoch_only:
        return record
    may_capture = on_gpu and len(tokens) >= STEPS_THAT_REPAY_GRAPHS
    return record | beside_the_best(plan, speeds_by_trying(run, plan, max(tokens), may_capture), events)


def beside_the_best(plan, speeds, events):
    """Fields of a record that compare `plan` with the fastest plan of `speeds` (tokens/s)."""
    planned, best = speeds[plan], max(speeds, key=speeds.get)
    return dict(
        tokens_per_second=round(planned), best_tokens_per_second=round(speeds[best]),
        best_plan=[*best.batching, best.graphs], of_the_best=round(planned / speeds[best], 3) if planned else 0.0,
        held=not events and planned >= ENOUGH * speeds[best],
        tried=[[*tried.batching, tried.graphs, round(per_second)] for tried, per_second in speeds.items()],
    )  # fmt: skip


def all_cases():
    """Yield every Case; only chatlm with 4 GiB has all optimizers."""
    for optimizer, (cap, model_name), batch in product(OPTIMIZERS, product(CAPS, ("small", "chatlm")), BATCHES):
        if optimizer == OPTIMIZERS[0] or (cap, model_name) == (4, "chatlm"):
            yield Case(model_name, batch, cap, optimizer)


def measure_small_cards(given):
    """Yield the records of the cases that `given` chooses; a case is measured alone, until the time is up."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    shard, num_shards = map(int, (given.shard or "0/1").split("/"))
    cases = [GUIDE] if given.guide else [REHEARSAL] if given.rehearse else list(all_cases())[shard::num_shards]
    if device.type == "cuda":  # as in training: else each graph has its own stream and cuBLAS workspace
        torch.cuda.set_stream(torch.cuda.Stream())
    other_bytes = other_process_bytes(device)  # once: later growth belongs to this process
    deadline = time.monotonic() + given.seconds
    for case in cases:
        if time.monotonic() > deadline:
            print(f"time is up before {case}", file=sys.stderr)
            return
        yield measure(case, device, other_bytes, epoch_only=given.epochs_only)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
