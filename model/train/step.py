"""The training loop: it yields a StepResult after each optimizer step.

A step is a transaction. Each rank computes its local gradients without collectives; all ranks then vote on the outcome
on the CPU, while their devices still compute. Only after the vote are the gradients reduced, once, checked to be
finite, and the weights updated. When any rank runs out of memory, all ranks compute the step again: same examples, same
loss, same gradient.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from model.memory.oom_policy import PlanRecovery, plans_to_try, shrink_plan
from model.memory.plan import MemoryPlan
from model.nn.base import LanguageModel
from model.runtime.distributed import Ranks, vote
from model.runtime.watchdog import stop_asked
from model.train.commit import FINITE_TRIES, NOT_FINITE, try_commit
from model.train.cuda_graphs import StepGraphs
from model.train.gradients import Attempt, Outcome, attempt_gradients
from model.train.loader import Loader
from model.train.optim import UpdateOptions
from model.train.spike_guard import MAX_SKIPPED_STEPS, WINDOW, TooManySkipped, spike_limit, too_many_skipped
from model.train.weighted_loss import means_by_name


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
class StepContext:
    """What the functions of a step share."""

    ranks: Ranks
    model: LanguageModel
    optimizer: object | None  # of model/train/optim.py
    loader: Loader
    options: UpdateOptions
    graphs: StepGraphs | None = None  # replay a micro-batch that fits one of their buckets

    @property
    def objective(self):
        return self.loader.examples.objective

    def with_graphs(self):
        """This StepContext with a StepGraphs, for plans that capture steps."""
        in_parts = self.ranks.world_size > 1
        return self if self.graphs else replace(self, graphs=StepGraphs(self.model, self.objective, in_parts))


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps."""

    plan: MemoryPlan  # of the next step
    step: int = 0  # optimizer steps done
    pairs_seen: int = 0  # over all epochs
    recovery: PlanRecovery | None = None
    recent_norms: tuple = ()  # gradient norms of the last steps that were not skipped; empty without the spike guard


@dataclass(frozen=True)
class StepResult:
    position: Position  # after this step
    epoch: int  # from 1
    ends_epoch: bool
    metrics: dict  # {name of an objective's metric: its mean over all ranks}; on the device
    weights: tuple  # what each metric's sum was divided by
    grad_norm: torch.Tensor  # before clipping; on the device
    learn_rate: float
    tokens: int  # of sources and targets, over all ranks
    micro_batches: int  # of this rank
    ids: list  # this rank's examples
    events: tuple  # (kind, values) journal lines of what failed in this step
    step_seconds: float
    data_wait_seconds: float
    skipped: bool  # not finite twice, or a gradient spike: the weights are unchanged
    in_doubt: bool  # the step was not finite, and the weights may be the cause
    stop: bool  # any rank was asked to stop
    clock_seconds: int  # the latest clock of any rank, the same on all
    torn: bool  # memory ran out on this rank after weights may have been written; `confirm` tells the other ranks

    @property
    def step(self):
        return self.position.step

    @property
    def pairs_seen(self):
        return self.position.pairs_seen

    @property
    def plan(self):
        """The plan of the next step: this step's, or one level larger after many steps without out of memory."""
        return self.position.plan

    @property
    def loss(self):
        """The objective's first metric."""
        return next(iter(self.metrics.values()))


def train_steps(context, position):
    """Yield a StepResult after each optimizer step, from the Position to the end of the schedule.

    Raises NothingFits if a step does not fit with the smallest plan, TornUpdate if a rank failed while it wrote
    weights, TooManySkipped if too many steps in a row are skipped.
    """
    plan, pairs_seen, norms = position.plan, position.pairs_seen, position.recent_norms
    recovery, torn, in_doubt, skipped_in_a_row = position.recovery or PlanRecovery(plan), False, False, 0
    if recovery.full.graphs:
        context = context.with_graphs()
    loader, total_pairs = context.loader, context.loader.schedule.total_pairs
    with loader.ahead() as upcoming:
        upcoming.start(plan, position.step, pairs_seen)
        while pairs_seen < total_pairs:
            started = time.perf_counter()
            work, packed, waited = upcoming.take()
            pairs_seen += len(work.all_ids)
            agreed = _until_agreed(context, plan, work, packed, torn)
            # not before the device is busy: two threads take turns in Python, and it would wait for both
            upcoming.start(agreed.plan, work.step, pairs_seen)
            agreed, updated = _until_finite(context, agreed, work, packed, norms)
            torn, waited = updated.torn, waited + agreed.attempt.data_wait_seconds
            plan, recovery = recovery.after_step(agreed.plan, shrunk=agreed.plan != plan)
            if context.options.spike_guard and not updated.skipped and not torn:
                norms = (*norms, float(updated.grad_norm))[-WINDOW:]
            skipped_in_a_row = skipped_in_a_row + 1 if updated.skipped else 0
            ended = pairs_seen >= total_pairs
            # if only the run's last step fails, its examples are blamed: no later step can test the weights
            in_doubt = updated.skipped == NOT_FINITE and (in_doubt or not ended)
            yield StepResult(
                **_step_values(context, work, agreed, updated), in_doubt=in_doubt,
                ends_epoch=pairs_seen % loader.examples.epoch_pairs == 0,
                position=Position(plan, work.step, pairs_seen, recovery, tuple(norms)),
                step_seconds=time.perf_counter() - started, data_wait_seconds=waited,
            )  # fmt: skip
            if skipped_in_a_row > MAX_SKIPPED_STEPS or (ended and in_doubt):  # after the caller has journaled the step
                message = too_many_skipped(skipped_in_a_row, work, updated.skipped, context.options)
                raise TooManySkipped(message)


def _step_values(context, work, agreed, updated):
    """The StepResult fields of this step alone; the metrics are copied: the next step overwrites the model's."""
    sums = context.model.flat.sums[: len(context.objective.metrics)]
    metrics = torch.full_like(sums, torch.nan) if updated.skipped else sums.clone()
    return dict(
        epoch=work.epoch, learn_rate=work.learn_rate, weights=work.metric_weights, tokens=work.tokens,
        ids=work.ids.tolist(), micro_batches=agreed.attempt.micro_batches, events=agreed.events, stop=agreed.stop,
        clock_seconds=agreed.clock_seconds, skipped=bool(updated.skipped), torn=updated.torn,
        metrics=means_by_name(context.objective.metrics, metrics.unbind()),
        grad_norm=torch.full_like(sums[0], torch.nan) if updated.skipped else updated.grad_norm,
    )  # fmt: skip


def _until_finite(context, agreed, work, packed, recent_norms):
    """(AgreedAttempt, UpdateResult) of the step, tried until its numbers are finite, at most FINITE_TRIES times."""
    limit, events = spike_limit(recent_norms, context.options.spike_guard), []
    for tries_left in reversed(range(FINITE_TRIES)):
        updated = try_commit(context, agreed.attempt, work, limit)
        events += agreed.events
        if updated.skipped != NOT_FINITE:
            break
        events.append(("not_finite", dict(step=work.step, rank=updated.rank)))
        if tries_left:
            agreed = _until_agreed(context, agreed.plan, work, packed, updated.torn)
    if updated.skipped:
        events.append(("skip", dict(step=work.step, why=updated.skipped, ids=work.all_ids.tolist())))
    return replace(agreed, events=tuple(events)), updated


def _until_agreed(context, plan, work, packed, torn):
    """AgreedAttempt: attempt the step until it succeeds on all ranks.

    `torn`: this rank's last update was; all ranks then raise TornUpdate. Raises NothingFits if the smallest plan fails.
    """
    events, failed = [], None
    examples = context.loader.examples
    sizes = dict(longest_tokens=examples.histogram.longest, num_blocks=context.model.config.num_blocks)
    for tried in plans_to_try(plan, partial(shrink_plan, **sizes)):
        if failed is not None:
            values = dict(step=work.step, where="step", rank=failed, before=vars(plan), after=vars(tried))
            events.append(("oom", values))
        plan, attempt = tried, Attempt(Outcome.TORN)
        if not torn:
            attempt = attempt_gradients(context, plan, work, packed)
        outcome, failed, stop, clock = _vote_on(context.ranks, attempt.outcome, work.step)
        if outcome is Outcome.OK:
            return AgreedAttempt(attempt, plan, tuple(events), stop, clock)
        if outcome is Outcome.TORN:
            raise TornUpdate(work.step - 1, failed)
        if context.graphs:
            context.graphs.clear()


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
        raise TornUpdate(result.position.step, failed - 1)
