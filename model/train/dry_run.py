"""The dry run before the first step: one update, and forwards that measure the memory of the plan on the device.

What could fail late in a run is done here once. Weights, optimizer state and random numbers stay as they were.
"""

import logging
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from model.data.length_histogram import histogram
from model.data.packing import cut
from model.memory.estimate import Estimate
from model.memory.oom_policy import shrink_plan, smaller_plan
from model.memory.plan import (
    NothingFits,
    PlanOptions,
    allowed_checkpointing,
    choose_plan,
    graphs_asked,
    keeps_graphs,
    predicted_peaks,
)
from model.runtime.device_memory import limit_memory, memory_cap, non_torch_bytes, release_memory, within_memory
from model.runtime.distributed import vote
from model.runtime.watchdog import untimed
from model.train.evaluate import Evaluation, evaluating, generate_answers, metric_sums
from model.train.gradients import Outcome, attempt_gradients
from model.train.loader import Work
from model.train.reduction import publish, sum_gradients
from model.train.step import StepContext

LOGGER = logging.getLogger("chat_trainer")
PROBES = 3
TIMED_TOKENS = 512  # at most, of the forward and backward that a CPU times
SAMPLED_EXAMPLES = 2**14  # at most, from which a forward is filled up beside its longest targets
TRIED_TOKENS = 4  # of an answer: the first compiles, the second is captured, the third replayed
FIRST_EPOCH = 1  # whose lengths a probe has
KEPT_USABLE = 1.1  # a resumed plan may be predicted 10 % over the limit: it was measured before, and is probed again


def dry_run_update(ranks, model, optimizer, reduce_dtype="float32"):
    """Do one full-size reduction and one update, with zero gradients and a learning rate of zero.

    This allocates the buffers of the collective and the optimizer's state. `optimizer` must not have been used. Returns
    the seconds that it takes, without those in which a GPU compiles.
    """
    model.zero_grad()

    def reduce_and_update():
        sum_gradients(ranks, model, reduce_dtype)
        optimizer.update(0.0, torch.zeros((), device=ranks.device))
        publish(ranks, model.flat)

    seconds = _without_time_limit(ranks, timed, ranks.device, reduce_and_update)
    optimizer.reset()
    return seconds


def timed(device, work):
    """Seconds that `work()` takes; on a GPU of its second call, since the first one compiles."""
    if device.type == "cuda":
        work()
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def gradient_seconds(context, plan):
    """Seconds for the gradients of a step of mean length on the slowest rank: those of a part of the first, scaled."""
    loader, ranks = context.loader, context.ranks
    work = loader.work_at(0, 0)
    ids = work.ids
    lengths = loader.examples.lengths(ids, FIRST_EPOCH)
    most = plan.micro_batch_tokens if ranks.device.type == "cuda" else min(plan.micro_batch_tokens, TIMED_TOKENS)
    ids = next(iter(cut(ids, lengths, most)), ids)
    tokens = int(loader.examples.lengths(ids, FIRST_EPOCH).sum())
    part = replace(work, step=0, all_ids=ids, ids=ids)
    plan = replace(plan, graphs=False)

    def compute():
        if len(ids):  # a rank may have no example in a small step
            attempt_gradients(context, plan, part)

    seconds = _without_time_limit(ranks, timed, ranks.device, compute)
    release_memory()
    share_pairs = -(-loader.schedule.global_batch // ranks.world_size)
    share_seconds = seconds * loader.examples.histogram.mean * share_pairs / max(tokens, 1)
    context.model.zero_grad()
    return vote(ranks, int(1e6 * share_seconds))[0] / 1e6


def _without_time_limit(ranks, work, *args):
    """The value of `work(*args)`, which may compile for minutes; waits for all ranks without a time limit."""
    with untimed("compiling what the first step needs"):
        value = work(*args)
    vote(ranks, 0)
    return value


@dataclass(frozen=True)
class Trial:
    """What the dry run of a plan needs."""

    context: StepContext
    evaluation: Evaluation | None
    estimate: Estimate
    wanted: PlanOptions

    @property
    def ranks(self):
        return self.context.ranks

    @property
    def examples(self):
        return self.context.loader.examples


def plan_run(context, evaluation, estimate, wanted, kept, other_process):
    """(MemoryPlan that fits on all ranks, dict of predicted and measured bytes by phase and of the device's limits).

    Without an optimizer in the StepContext, nothing is measured. `evaluation` is None where nothing is evaluated.
    `estimate` is of the run, `wanted` are its PlanOptions. `kept` is the checkpoint's plan, which is returned while it
    fits, or None; `other_process` is the number of bytes of the device that other processes hold. Raises NothingFits,
    or ValueError for options that cannot be met.
    """
    ranks, device = context.ranks, context.ranks.device
    trial = Trial(context, evaluation, estimate, wanted)
    collate_longest(context.loader.examples)
    non_torch = non_torch_bytes(device, other_process)
    usable = limit_memory(device, wanted.gpu_memory_limit_gb, non_torch)
    usable = None if usable is None else -vote(ranks, -usable)[0]  # the minimum over ranks
    plan, choose = plan_before_probes(trial, kept, usable)
    measured = {}
    if usable is not None and context.optimizer is not None:
        plan, measured["step"] = probe_plan(trial, plan, choose)
        measured |= probe_evaluation(evaluation, plan) if evaluation else {}
    without_graphs = estimate.peaks(*plan.batching, plan.answers)  # probes run without CUDA graphs
    predicted = predicted_peaks(estimate, plan, usable) | {name: without_graphs[name] for name in measured}
    phases = {name: dict(predicted=count, measured=measured.get(name)) for name, count in predicted.items()}
    return plan, dict(
        phases=phases, cap_bytes=memory_cap(device, wanted.gpu_memory_limit_gb), non_torch_bytes=non_torch,
        other_process_bytes=other_process, allocator_limit_bytes=usable,
        keeps_graphs=keeps_graphs(estimate, plan, usable),
    )  # fmt: skip


def collate_longest(examples):
    """Make a batch of the longest row and those of the longest columns: what the network refuses is found here."""
    bounds = examples.bounds
    longest = [*bounds.argmax(axis=0), bounds.sum(axis=1, dtype=np.int64).argmax()]
    examples.batch(np.unique(longest), FIRST_EPOCH)


def _can_keep(kept, wanted, estimate, usable_bytes):
    """True if the checkpoint's plan is predicted to fit and agrees with the options."""
    if kept is None or wanted.micro_batch_tokens:
        return False
    step_peak = estimate.of_longest_targets.step_peak
    fits = usable_bytes is None or step_peak(*kept.batching) <= usable_bytes * KEPT_USABLE
    return fits and kept.gradient_checkpointing in allowed_checkpointing(wanted.gradient_checkpointing, estimate)


def plan_before_probes(trial, kept, usable_bytes):
    """(MemoryPlan, function of a probe's calibration that chooses another; None if the plan is fixed).

    The plan is `kept` while it fits. With compile=auto, a resumed run captures CUDA graphs only if it did before:
    padding changes the order of additions and with it the last bits.
    """
    wanted, estimate, schedule = trial.wanted, trial.estimate, trial.context.loader.schedule
    asked = graphs_asked(wanted, estimate.spec, schedule.total_pairs / schedule.global_batch)
    if kept and wanted.compile == "auto":
        asked = kept.graphs and estimate.spec.can_capture
    if _can_keep(kept, wanted, estimate, usable_bytes):
        return replace(kept, graphs=bool(asked)), None
    choose = partial(choose_plan, wanted, estimate, usable_bytes, asked)
    return choose(), None if wanted.micro_batch_tokens else choose


def probe_plan(trial, plan, choose):
    """(plan, measured peak reserved bytes of a step over all ranks).

    The plan ran on the device, or needs less than one that did. A probe runs forward and backward of `worst_examples`;
    there are at most PROBES. If a probe takes more or less than predicted, `choose(measured / predicted)` gives the
    next plan; with choose=None the plan stays. Raises NothingFits if all probes run out of memory.
    """
    fitted, estimate, examples = None, trial.estimate, trial.examples
    for number in range(PROBES):
        ids = worst_examples(examples.bounds, plan.micro_batch_tokens, estimate.share_pairs)
        measured = _step_peak(trial.context, plan, ids)
        if measured is None and fitted:
            break
        if measured is None:
            shrink = partial(shrink_plan, longest_tokens=estimate.lengths.longest, num_blocks=estimate.num_blocks)
            smaller = smaller_plan(replace(plan, graphs=False), shrink)  # the batching shrinks; probes capture nothing
            plan, choose = replace(smaller, graphs=plan.graphs), None
            continue
        calibration = measured / _predicted(estimate, examples.lengths(ids, FIRST_EPOCH), plan)
        fitted = plan, measured
        try:
            better = choose(calibration) if choose else plan
        except NothingFits:  # not with the margin, but this plan ran
            break
        is_last = number == PROBES - 1
        takes_less = estimate.step_peak(*better.batching) < estimate.step_peak(*plan.batching)
        # after the last probe, only a smaller plan is taken, where the costliest forward would not fit with CUDA graphs
        if better.batching == plan.batching or is_last and plan.graphs and takes_less:
            return better, measured
        if is_last:
            break
        if trial.ranks.is_main:
            LOGGER.info("a probe took %.3f of its predicted peak: planning again", calibration)
        plan = better
    if fitted:
        return fitted
    raise NothingFits(f"{PROBES} probes ran out of memory, the last with {plan}: lower --max_seq_len or free the GPU")


def _predicted(estimate, lengths, plan):
    """Predicted peak reserved bytes of forward and backward of examples of these lengths in one micro-batch."""
    own = Estimate(estimate.spec, histogram(lengths), len(lengths))
    return own.step_peak(int(lengths.sum(dtype=np.int64)), *plan.batching[1:])


def _step_peak(context, plan, ids):
    """Measured peak reserved bytes of forward and backward of these examples, over all ranks; None if any ran out."""
    ranks, examples = context.ranks, context.loader.examples
    tokens, weights = int(examples.lengths(ids, FIRST_EPOCH).sum()), examples.weights(ids, FIRST_EPOCH)
    work = Work(0, FIRST_EPOCH, ids, tokens, *weights, 0.0, ids)
    release_memory()  # what loading left in the cache
    torch.cuda.reset_peak_memory_stats(ranks.device)
    attempt = _without_time_limit(ranks, attempt_gradients, context, replace(plan, graphs=False), work)
    peak = torch.cuda.max_memory_reserved(ranks.device)
    release_memory()
    failed, highest = vote(ranks, attempt.outcome is Outcome.OUT_OF_MEMORY, peak)
    return None if failed else highest


def worst_examples(lengths, micro_batch_tokens, share_pairs):
    """Ids of the examples of the costliest forward: the longest targets, at least one, and others that fit beside.

    `lengths` is (examples, columns); at most `share_pairs` examples and, beyond the first, `micro_batch_tokens` tokens.
    """
    ids = _longest_targets(lengths, micro_batch_tokens, share_pairs)
    tokens_left, pairs_left = micro_batch_tokens - int(lengths[ids].sum(dtype=np.int64)), share_pairs - len(ids)
    sample = np.setdiff1d(np.arange(0, len(lengths), len(lengths) // SAMPLED_EXAMPLES + 1), ids)
    totals, beside = lengths[sample].sum(axis=1, dtype=np.int64), []
    for place in np.lexsort((-totals, -lengths[sample, -1].astype(np.int64))):
        if totals[place] <= tokens_left and len(beside) < pairs_left:
            beside.append(sample[place])
            tokens_left -= totals[place]
    return np.append(ids, np.array(beside, ids.dtype))


def _longest_targets(lengths, micro_batch_tokens, share_pairs):
    """Ids of the longest targets, longest first, as many as fit in one forward, at least one."""
    targets, first = lengths[:, -1], max(len(lengths) - share_pairs, 0)
    long = np.flatnonzero(targets >= np.partition(targets, first)[first])  # sorts only these, few of millions
    totals = lengths[long].sum(axis=1, dtype=np.int64)
    order = np.lexsort((-totals, -targets[long].astype(np.int64)))[:share_pairs]
    fits = np.cumsum(totals[order]) <= micro_batch_tokens
    return long[order[: max(int(fits.sum()), 1)]]


def probe_evaluation(evaluation, plan):
    """Dict of the peak reserved bytes, over all ranks, of the costliest forward of an evaluation and batch of answers.

    0 if a rank ran out of memory: a real evaluation then goes on in smaller parts.
    """
    works, ranks, measured = dict(evaluation=_worst_evaluation), evaluation.ranks, {}
    if evaluation.num_answers:
        works["generation"] = _worst_generation
    for name, work in works.items():
        torch.cuda.reset_peak_memory_stats(ranks.device)
        fits, _ = _without_time_limit(ranks, within_memory, work, evaluation, plan)
        release_memory()
        failed, peak = vote(ranks, not fits, torch.cuda.max_memory_reserved(ranks.device))
        measured[name] = 0 if failed else peak
    return measured


def _worst_evaluation(evaluation, plan):
    model, examples = evaluation.model, evaluation.examples
    ids = worst_examples(examples.bounds, plan.micro_batch_tokens, len(examples))
    with evaluating(model):
        metric_sums(model, examples, ids, plan.chunk_tokens)


def _worst_generation(evaluation, plan):
    examples = evaluation.examples
    generate_answers(evaluation, examples.longest_questions(plan.answers), plan.answers, TRIED_TOKENS)
