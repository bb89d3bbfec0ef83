"""The training loop: it yields a StepResult after each optimizer step.

A step is a transaction. Each rank computes its local gradients without collectives; all ranks then vote on the outcome
on the CPU, while their devices still compute. Only after the vote are the gradients reduced, once, checked to be
finite, and the weights updated. When any rank runs out of memory, all ranks compute the step again: same examples, same
loss, same gradient.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from model.data.buckets import buckets_for
from model.data.length_histogram import histogram
from model.memory.oom_policy import PlanRecovery, plan_after_out_of_memory, shrink_plan
from model.memory.plan import MemoryPlan
from model.runtime import fault_injection
from model.runtime.device_memory import is_out_of_memory
from model.runtime.distributed import sum_over_ranks, vote
from model.runtime.watchdog import stop_asked
from model.train.cuda_graphs import StepGraphs
from model.train.fixed_shards import add_in_order
from model.train.gradients import Attempt, Outcome, attempt_gradients
from model.train.loader import prepared
from model.train.optim import update
from model.train.spike_guard import MAX_SKIPPED_STEPS, WINDOW, TooManySkipped, spike_limit, too_many_skipped

FINITE_TRIES = 2  # attempts at a step whose numbers are not finite, before it is skipped
NOT_FINITE = f"numbers that were not finite {FINITE_TRIES} times"


class TornUpdate(RuntimeError):
    """A rank failed during an update: the newest checkpoint is the last state that all ranks share."""

    def __init__(self, step, rank):
        super().__init__(f"rank {rank} ran out of memory in the update of step {step}: going back to the checkpoint")
        self.step, self.rank = step, rank


@dataclass(frozen=True)
class AgreedAttempt:
    """An attempt that succeeded on all ranks."""

    attempt: Attempt
    plan: MemoryPlan  # that the attempt ran with
    events: tuple  # (kind, values) journal lines of the failures before it
    stop: bool  # any rank was asked to stop
    clock_seconds: int  # the latest clock of any rank, the same on all


@dataclass(frozen=True)
class UpdateResult:
    """How a step's update ended."""

    grad_norm: torch.Tensor  # before clipping; on the device
    skipped: str = ""  # why the weights were left unchanged; "": they were updated
    rank: int | None = None  # the rank with numbers that are not finite; None: only the sum over ranks is not finite
    torn: bool = False  # memory ran out on this rank after weights may have been written


@dataclass(frozen=True)
class StepResult:
    step: int  # optimizer steps done, this one included
    epoch: int  # from 1
    ends_epoch: bool
    pairs_seen: int  # over all epochs, this step's included
    loss: torch.Tensor  # cross-entropy in nats per target token, over all ranks; on the device
    z_loss: torch.Tensor  # per target token, over all ranks; on the device; loss + z_loss is minimised
    grad_norm: torch.Tensor  # before clipping; on the device
    learn_rate: float
    target_tokens: int  # over all ranks
    tokens: int  # of prompts and responses, over all ranks
    micro_batches: int  # of this rank
    ids: list  # this rank's examples
    plan: MemoryPlan  # of the next step: this step's, or one level larger after many steps without out of memory
    recovery: PlanRecovery
    events: tuple  # (kind, values) journal lines of what failed in this step
    step_seconds: float
    data_wait_seconds: float
    skipped: bool  # not finite twice, or a gradient spike: the weights are unchanged
    in_doubt: bool  # the step was not finite, and the weights may be the cause
    recent_norms: tuple  # gradient norms of the last steps that were not skipped; empty without the spike guard
    stop: bool  # any rank was asked to stop
    clock_seconds: int  # the latest clock of any rank, the same on all
    torn: bool  # memory ran out on this rank after weights may have been written; `confirm` tells the other ranks


def train_steps(
    ranks, model, optimizer, store, plan, config, schedule, step=0, pairs_seen=0, recovery=None, recent_norms=()
):  # fmt: skip
    """Yield a StepResult after each optimizer step, from `pairs_seen` to the end of the schedule.

    Raises NothingFits if a step does not fit with the smallest plan, TornUpdate if a rank failed while it wrote
    weights, TooManySkipped if too many steps in a row are skipped.
    """
    recovery, skipped_in_a_row, torn, in_doubt = recovery or PlanRecovery(plan), 0, False, False
    lengths, pairs = histogram(store.lengths), -(-schedule.global_batch // ranks.world_size)
    shrink = partial(shrink_plan, longest_tokens=lengths.longest)
    buckets = buckets_for(lengths.tokens, pairs, lengths.counts)
    graphs = StepGraphs(model, buckets) if recovery.full.graphs else None
    with ThreadPoolExecutor(1) as thread:
        prepare = partial(thread.submit, prepared, ranks, model, store, config, schedule, graphs)
        upcoming = prepare(plan, step, pairs_seen)
        while pairs_seen < schedule.total_pairs:
            started = time.perf_counter()
            work, packed = upcoming.result()
            waited = time.perf_counter() - started
            pairs_seen += len(work.all_ids)
            upcoming = prepare(plan, work.step, pairs_seen)
            agreed, updated = _until_finite(
                ranks, model, optimizer, store, plan, shrink, config, work, packed, graphs, torn, recent_norms
            )
            torn, waited = updated.torn, waited + agreed.attempt.data_wait_seconds
            plan, recovery = recovery.after_step(agreed.plan, shrunk=agreed.plan != plan)
            if config.spike_guard and not updated.skipped and not torn:
                recent_norms = (*recent_norms, float(updated.grad_norm))[-WINDOW:]
            skipped_in_a_row = skipped_in_a_row + 1 if updated.skipped else 0
            ended = pairs_seen >= schedule.total_pairs
            # if only the run's last step fails, its examples are blamed: no later step can test the weights
            in_doubt = updated.skipped == NOT_FINITE and (in_doubt or not ended)
            yield StepResult(
                **_step_values(work, agreed, updated, model.flat.loss_parts), ends_epoch=pairs_seen % len(store) == 0,
                in_doubt=in_doubt,
                pairs_seen=pairs_seen, plan=plan, recovery=recovery, recent_norms=tuple(recent_norms),
                step_seconds=time.perf_counter() - started, data_wait_seconds=waited,
            )  # fmt: skip
            if skipped_in_a_row > MAX_SKIPPED_STEPS or (ended and in_doubt):  # after the caller has journaled the step
                message = too_many_skipped(skipped_in_a_row, work.step, updated.skipped, work.all_ids, config)
                raise TooManySkipped(message)


def _step_values(work, agreed, updated, loss_parts):
    """The StepResult fields of this step alone; `loss_parts`, the model's, is copied: the next step overwrites it."""
    unknown = torch.full_like(loss_parts, torch.nan)
    loss, z_loss = (unknown if updated.skipped else loss_parts.clone()).unbind()
    return dict(
        step=work.step, epoch=work.epoch, learn_rate=work.learn_rate, target_tokens=work.target_tokens,
        tokens=work.tokens, ids=work.ids.tolist(), micro_batches=agreed.attempt.micro_batches, events=agreed.events,
        stop=agreed.stop, clock_seconds=agreed.clock_seconds, skipped=bool(updated.skipped), torn=updated.torn,
        loss=loss, z_loss=z_loss, grad_norm=unknown[0] if updated.skipped else updated.grad_norm,
    )  # fmt: skip


def _until_finite(ranks, model, optimizer, store, plan, shrink, config, work, packed, graphs, torn, recent_norms):
    """(AgreedAttempt, UpdateResult) of the step, tried until its numbers are finite, at most FINITE_TRIES times."""
    limit, events = spike_limit(recent_norms, config.spike_guard), []
    for _ in range(FINITE_TRIES):
        agreed = _until_agreed(ranks, model, store, plan, shrink, config, work, packed, graphs, torn)
        updated = _try_update(ranks, optimizer, model.flat, agreed.attempt, work, config, limit)
        events += agreed.events
        if updated.skipped != NOT_FINITE:
            break
        plan, torn = agreed.plan, updated.torn
        events.append(("not_finite", dict(step=work.step, rank=updated.rank)))
    if updated.skipped:
        events.append(("skip", dict(step=work.step, why=updated.skipped, ids=work.all_ids.tolist())))
    return replace(agreed, events=tuple(events)), updated


def _until_agreed(ranks, model, store, plan, shrink, config, work, packed, graphs, torn):
    """AgreedAttempt: attempt the step until it succeeds on all ranks.

    `torn`: this rank's last update was; all ranks then raise TornUpdate. Raises NothingFits if the smallest plan fails.
    """
    events = []
    for failures in count(1):
        attempt = Attempt(Outcome.TORN)
        if not torn:
            attempt = attempt_gradients(ranks, model, store, plan, config, work, packed, graphs)
        # no exception is being handled here, so no traceback keeps the failed attempt's tensors alive
        outcome, rank, stop, clock = _vote_on(ranks, attempt.outcome, work.step)
        if outcome is Outcome.OK:
            return AgreedAttempt(attempt, plan, tuple(events), stop, clock)
        if outcome is Outcome.TORN:
            raise TornUpdate(work.step - 1, rank)
        if graphs:
            graphs.clear()
        smaller = plan_after_out_of_memory(ranks.device, plan, failures, shrink)
        events.append(("oom", dict(step=work.step, where="step", rank=rank, before=vars(plan), after=vars(smaller))))
        plan = smaller


def _vote_on(ranks, outcome, step):
    """(Worst Outcome of any rank, a rank that had it, True if any rank was asked to stop, the latest clock in seconds).

    Raises RuntimeError if the ranks are at different steps.
    """
    code = outcome * ranks.world_size + ranks.rank
    worst, stop, clock, last, first = vote(ranks, code, stop_asked(), int(time.monotonic()), step, -step)
    if last != -first:
        raise RuntimeError(f"the ranks are at different steps, {-first} to {last}: resume from the checkpoint")
    return Outcome(worst // ranks.world_size), worst % ranks.world_size, bool(stop), clock


def confirm(ranks, result):
    """Raise TornUpdate on every rank if the update of `result`'s step failed on any.

    All ranks call it before anything but the next step reads the weights; the next step's vote checks it as well.
    """
    (failed,) = vote(ranks, (ranks.rank + 1) * result.torn)
    if failed:
        raise TornUpdate(result.step, failed - 1)


def _try_update(ranks, optimizer, flat, *rest):
    """The UpdateResult of `_reduce_and_update`; torn=True if memory ran out in it."""
    try:
        return _reduce_and_update(ranks, optimizer, flat, *rest)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return UpdateResult(torch.full_like(flat.loss_parts[0], torch.nan), torn=True)


def _reduce_and_update(ranks, optimizer, flat, attempt, work, config, norm_limit):
    """Reduce the gradients, clip them and update the weights.

    If the loss or the gradient is not finite, or its norm exceeds `norm_limit`, all ranks leave weights and optimizer
    unchanged.
    """
    if config.exact:
        add_in_order(ranks, attempt.shards, flat.gradients_and_parts)
    else:
        sum_over_ranks(ranks, flat.gradients_and_parts)
    norm, loss = flat.gradients.norm(), flat.loss_parts.sum()
    if not math.isfinite(norm + loss):  # the step's only wait for the device; the sums are the same on all ranks
        (last,) = vote(ranks, (ranks.rank + 1) * bool(~attempt.norms.isfinite().all()))
        return UpdateResult(norm, NOT_FINITE, last - 1 if last else None)
    if norm_limit < math.inf and vote(ranks, bool(norm > norm_limit))[0]:
        return UpdateResult(norm, f"a gradient norm above {norm_limit:.3g}, {config.spike_guard} times the median")
    scale = (config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if config.max_grad_norm else torch.ones_like(norm)
    fault_injection.fire("optimizer", work.step)
    update(optimizer, flat.gradients, work.learn_rate, scale)
    fault_injection.fire("update", work.step)
    return UpdateResult(norm)
