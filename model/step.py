"""The training loop: one optimizer step at a time, handed out as a StepResult.

A step is a transaction. Local gradients are computed with no collective inside; all ranks vote on the outcome on the
CPU, while their devices still compute; only then are gradients reduced, once, found finite, and weights changed. A step
that runs out of memory on any rank is done again on every rank: same examples, same loss, same gradient.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch

from model import faults
from model.attempt import Attempt, Outcome, attempt_gradients
from model.batches import rooms_for
from model.exact import add_in_order
from model.feed import prepared
from model.graphs import StepGraphs
from model.lengths import histogram
from model.memory import Growth, is_out_of_memory, plan_after_out_of_memory, shrink_plan
from model.optim import update
from model.plan import MemoryPlan
from model.ranks import sum_over_ranks, vote
from model.spikes import MAX_SKIPPED_STEPS, WINDOW, spike_limit, too_many_skipped
from model.watch import stop_asked

FINITE_TRIES = 2  # of a step whose numbers were not finite, before it is left out
NOT_FINITE = f"numbers that were not finite {FINITE_TRIES} times"


class TornUpdate(RuntimeError):
    """A rank failed in the middle of an update: the newest checkpoint is the last state that all ranks share."""

    def __init__(self, step, rank):
        super().__init__(f"rank {rank} ran out of memory in the update of step {step}: going back to the checkpoint")
        self.step, self.rank = step, rank


@dataclass(frozen=True)
class StepResult:
    step: int  # optimizer steps done, this one included
    epoch: int  # from 1
    ends_epoch: bool
    pairs_seen: int  # over all epochs, this step's included
    loss: torch.Tensor  # nats per target token, over all ranks; on the device
    grad_norm: torch.Tensor  # before clipping; on the device
    learn_rate: float
    target_tokens: int  # over all ranks
    tokens: int  # of both sides, over all ranks
    micro_batches: int  # of this rank
    ids: list  # this rank's examples
    plan: MemoryPlan  # the next step's: what this one fitted in, or a rung more after a long calm
    growth: Growth
    events: tuple  # what went wrong on the way, for the journal
    step_seconds: float
    data_wait_seconds: float
    skipped: bool  # its numbers were not finite twice, or its gradient a spike: the weights are as before
    recent_norms: tuple  # gradient norms of the last steps that were not skipped, under the spike guard
    stop: bool  # some rank was asked to stop
    clock_seconds: int  # a clock that all ranks agree on
    torn: bool  # memory ran out on this rank when weights may have been written; `confirm` tells the others


def train_steps(
    ranks, model, optimizer, store, plan, config, course, step=0, pairs_seen=0, growth=None, recent_norms=()
):  # fmt: skip
    """Yield a StepResult after each optimizer step from `pairs_seen` to the end of the course.

    Raises NothingFits when a step does not fit with the smallest plan, TornUpdate when a rank failed while it wrote
    weights, RuntimeError when too many steps in a row are skipped.
    """
    flat, growth, skipped_in_a_row, torn = model.flat, growth or Growth(plan), 0, False
    pairs = -(-course.global_batch // ranks.world_size)
    graphs = StepGraphs(model, _rooms(store, pairs)) if growth.full.graphs else None
    with ThreadPoolExecutor(1) as thread:
        prepare = partial(thread.submit, prepared, ranks, model, store, config, course, graphs)
        upcoming = prepare(plan, step, pairs_seen)
        while pairs_seen < course.total_pairs:
            started = time.perf_counter()
            work, packed = upcoming.result()
            waited = time.perf_counter() - started
            pairs_seen += len(work.all_ids)
            upcoming = prepare(plan, work.step, pairs_seen)
            attempt, fitted, events, stop, clock, skipped, grad_norm, torn = _until_finite(
                ranks, model, optimizer, store, plan, config, work, packed, graphs, torn, recent_norms
            )  # fmt: skip
            plan, growth = growth.after_step(fitted, shrunk=fitted != plan)
            if skipped:
                events.append(("skip", dict(step=work.step, why=skipped, ids=work.all_ids.tolist())))
            elif config.spike_guard and not torn:
                recent_norms = (*recent_norms, float(grad_norm))[-WINDOW:]
            skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
            if skipped_in_a_row > MAX_SKIPPED_STEPS:
                raise RuntimeError(too_many_skipped(skipped_in_a_row, work.step, skipped, work.all_ids, config))
            yield StepResult(
                step=work.step, epoch=work.epoch, ends_epoch=pairs_seen % len(store) == 0, pairs_seen=pairs_seen,
                loss=torch.full_like(flat.loss, torch.nan) if skipped else flat.loss.clone(),
                grad_norm=torch.full_like(flat.loss, torch.nan) if skipped else grad_norm,
                learn_rate=work.learn_rate, target_tokens=work.target_tokens, tokens=work.tokens,
                micro_batches=attempt.micro_batches, ids=work.ids.tolist(), plan=plan, growth=growth,
                events=tuple(events), step_seconds=time.perf_counter() - started,
                data_wait_seconds=waited + attempt.data_wait_seconds, skipped=bool(skipped),
                recent_norms=tuple(recent_norms), stop=stop, clock_seconds=clock, torn=torn,
            )  # fmt: skip


def _rooms(store, pairs):
    kinds = histogram(store.lengths)
    return rooms_for(kinds.tokens, pairs, kinds.counts)


def _until_finite(ranks, model, optimizer, store, plan, config, work, packed, graphs, torn, recent_norms):
    """Do the step until its numbers are finite, FINITE_TRIES times at most.

    Returns what `_until_voted` does, then "" or why the weights are as before, the gradient's norm, and whether memory
    ran out when weights may have been written.
    """
    limit, events = spike_limit(recent_norms, config.spike_guard), []
    for _ in range(FINITE_TRIES):
        attempt, plan, more, stop, clock = _until_voted(ranks, model, store, plan, config, work, packed, graphs, torn)
        skipped, rank, norm, torn = _try_commit(ranks, optimizer, model.flat, attempt, work, config, limit)
        events += more
        if skipped != NOT_FINITE:
            break
        events.append(("not_finite", dict(step=work.step, rank=rank)))
    return attempt, plan, events, stop, clock, skipped, norm, torn


def _until_voted(ranks, model, store, plan, config, work, packed, graphs, torn):
    """Attempt the step until all ranks have succeeded; not where the last update was `torn`.

    Returns the attempt, the plan it fitted in, the journal's events, whether some rank was asked to stop, and the time.
    """
    events = []
    for failures in count(1):
        attempt = Attempt(Outcome.TORN)
        if not torn:
            attempt = attempt_gradients(ranks, model, store, plan, config, work, packed, graphs)
        # outside the except block: the traceback no longer holds the failed attempt's tensors
        mine = attempt.outcome * ranks.world_size + ranks.rank
        clock = int(time.monotonic())
        worst, stop, clock, last, first = vote(ranks, mine, stop_asked(), clock, work.step, -work.step)
        if last != -first:
            raise RuntimeError(f"the ranks are at different steps, {-first} to {last}: restart from the checkpoint")
        outcome, rank = Outcome(worst // ranks.world_size), worst % ranks.world_size
        if outcome is Outcome.OK:
            return attempt, plan, events, bool(stop), clock
        if outcome is Outcome.TORN:
            raise TornUpdate(work.step - 1, rank)
        if graphs:
            graphs.clear()
        shrink = partial(shrink_plan, longest_tokens=int(store.lengths.sum(axis=1, dtype=np.uint32).max()))
        smaller = plan_after_out_of_memory(ranks.device, plan, failures, shrink)
        events.append(("oom", dict(step=work.step, where="step", rank=rank, before=vars(plan), after=vars(smaller))))
        plan = smaller


def confirm(ranks, result):
    """Raise TornUpdate on every rank when the update of `result`'s step failed on any.

    To be called on all ranks before weights are read elsewhere than in the next step, whose vote tells it anyway.
    """
    (failed,) = vote(ranks, (ranks.rank + 1) * result.torn)
    if failed:
        raise TornUpdate(result.step, failed - 1)


def _try_commit(ranks, optimizer, flat, *rest):
    """What `_commit` returns, and whether memory ran out in it, when weights may have been written."""
    try:
        return *_commit(ranks, optimizer, flat, *rest), False
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return "", 0, torch.full_like(flat.loss, torch.nan), True


def _commit(ranks, optimizer, flat, attempt, work, config, norm_limit):
    """Reduce, clip and update the weights; returns ("" or why the update was left out, by which rank, gradient norm).

    The norm is before clipping, on the device. Numbers that are not finite and a norm above `norm_limit` leave weights
    and optimizer alone on all ranks.
    """
    if config.exact:
        add_in_order(ranks, attempt.shards, flat.gradients_and_loss)
    else:
        sum_over_ranks(ranks, flat.gradients_and_loss)
    norm = flat.gradients.norm()
    if not math.isfinite(norm + flat.loss):  # the step's one wait for the device; all ranks have the same sums
        (last,) = vote(ranks, (ranks.rank + 1) * bool(~attempt.norms.isfinite().all()))
        return NOT_FINITE, last - 1 if last else None, norm  # None: each rank's own numbers were finite
    if norm_limit < math.inf and vote(ranks, bool(norm > norm_limit))[0]:
        return f"a gradient norm above {norm_limit:.3g}, {config.spike_guard} times the median", 0, norm
    scale = (config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if config.max_grad_norm else torch.ones_like(norm)
    faults.fire("optimizer", work.step)
    update(optimizer, flat.gradients, work.learn_rate, scale)
    faults.fire("update", work.step)
    return "", 0, norm
