"""The training loop: one optimizer step at a time, handed out as a StepResult.

A step is a transaction. Local gradients are computed with no collective inside; all ranks vote on the outcome on the
CPU; only then are gradients reduced, once, and weights changed. A step that runs out of memory on any rank is done
again on every rank: same examples, same loss, same gradient.
"""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import torch

from model import faults
from model.batches import Room, collate, cut, rooms_for, share_of, step_at
from model.graphs import StepGraphs
from model.memory import MemoryPlan, is_out_of_memory, release_memory, shrink_plan
from model.optim import learn_rate_at, update
from model.ranks import sum_over_ranks, vote
from model.watch import stop_asked

MAX_SKIPPED_STEPS = 10  # steps in a row that may be left out for numbers that are not finite


class Outcome(IntEnum):
    """What an attempt came to; all ranks act on the worst."""

    OK = 0
    NOT_FINITE = 1
    OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class Course:
    """What fixes the steps of a run, beside the configuration."""

    total_pairs: int  # over all epochs
    warmup_pairs: int
    global_batch: int  # pairs in a step
    start_id: int  # token that begins a decoder's input


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
    plan: MemoryPlan  # the plan that this step fitted in
    events: tuple  # what went wrong on the way, for the journal
    step_seconds: float
    data_wait_seconds: float
    skipped: bool  # its numbers were not finite twice: the weights are as before
    stop: bool  # some rank was asked to stop
    clock_seconds: int  # a clock that all ranks agree on


def train_steps(ranks, model, optimizer, store, plan, config, course, step=0, pairs_seen=0):
    """Yield a StepResult after each optimizer step from `pairs_seen` to the end of the course.

    Raises RuntimeError when a step does not fit with the smallest plan, or too many in a row are not finite.
    """
    flat, skipped_in_a_row = model.flat, 0
    pairs = -(-course.global_batch // ranks.world_size)
    graphs = StepGraphs(model, rooms_for(store.lengths, pairs)) if plan.graphs else None
    with ThreadPoolExecutor(1) as thread:
        prepare = partial(thread.submit, _prepared, ranks, model, store, config, course, graphs)
        upcoming = prepare(plan, step, pairs_seen)
        while pairs_seen < course.total_pairs:
            started = time.perf_counter()
            work, packed = upcoming.result()
            waited = time.perf_counter() - started
            pairs_seen += work.step_pairs
            upcoming = prepare(plan, work.step, pairs_seen)
            attempt, plan, events, stop, clock_seconds = _until_voted(
                ranks, model, store, plan, config, work, packed, graphs
            )
            skipped = attempt.outcome is not Outcome.OK
            if not skipped:
                grad_norm = _commit(ranks, optimizer, flat, work.learn_rate, config.max_grad_norm, work.step)
            skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
            if skipped_in_a_row > MAX_SKIPPED_STEPS:
                raise RuntimeError(
                    f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite, the last at step "
                    f"{work.step} with examples {work.ids[:8].tolist()} …: lower --learn_rate (now {config.learn_rate})"
                )
            yield StepResult(
                step=work.step, epoch=work.epoch, ends_epoch=pairs_seen % len(store) == 0, pairs_seen=pairs_seen,
                loss=torch.full_like(flat.loss, torch.nan) if skipped else flat.loss.clone(),
                grad_norm=torch.full_like(flat.loss, torch.nan) if skipped else grad_norm,
                learn_rate=work.learn_rate, target_tokens=work.target_tokens, tokens=work.tokens,
                micro_batches=attempt.micro_batches, ids=work.ids.tolist(), plan=plan, events=tuple(events),
                step_seconds=time.perf_counter() - started, data_wait_seconds=waited + attempt.data_wait_seconds,
                skipped=skipped, stop=stop, clock_seconds=clock_seconds,
            )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A step, and one rank's part of it."""

    step: int  # as the journal numbers it
    epoch: int  # from 1
    step_pairs: int  # over all ranks
    target_tokens: int  # of the whole step, over all ranks: what its loss is divided by
    tokens: int  # of both sides, over all ranks
    learn_rate: float
    ids: object  # this rank's examples
    start_id: int


@dataclass(frozen=True)
class Packed:
    """A rank's part of a step, cut and packed in host memory."""

    plan: MemoryPlan  # that it is cut for
    room: Room | None  # what its one micro-batch is padded to, for a recorded step
    micro_batches: list


def _prepared(ranks, model, store, config, course, graphs, plan, step, pairs_seen):
    """(Work, Packed) of the step that begins after `pairs_seen` pairs; runs beside the step before it."""
    if pairs_seen >= course.total_pairs:
        return None
    examples = step_at(pairs_seen, len(store), course.global_batch, config.seed)
    lengths = store.lengths[examples.ids].astype("int64")
    rate = learn_rate_at(pairs_seen + len(examples.ids) / 2, config, course.warmup_pairs, course.total_pairs)
    share = share_of(examples.ids, lengths, ranks.rank, ranks.world_size)
    sizes = (len(examples.ids), int(lengths[:, 1].sum()), int(lengths.sum()))
    work = Work(step + 1, examples.epoch, *sizes, rate, share, course.start_id)
    try:
        return work, _pack(model, store, plan, work, graphs)
    except MemoryError:
        return work, None  # the attempt tries again, and answers for it


def _pack(model, store, plan, work, graphs):
    lengths = store.lengths[work.ids]
    parts = cut(work.ids, lengths, plan.micro_batch_tokens)
    room = graphs.room_of(lengths) if graphs and len(parts) == 1 else None
    return Packed(plan, room, [collate(store, p, work.start_id, "cpu", model.uses_kernels, room) for p in parts])


@dataclass(frozen=True)
class Attempt:
    outcome: Outcome
    micro_batches: int = 0
    data_wait_seconds: float = 0.0


def _until_voted(ranks, model, store, plan, config, work, packed, graphs):
    """Attempt the step until all ranks have succeeded or agreed to skip it.

    Returns the attempt, the plan it fitted in, the journal's events, whether some rank was asked to stop, and the time.
    """
    events, failures = [], {Outcome.NOT_FINITE: 0, Outcome.OUT_OF_MEMORY: 0}
    while True:
        attempt = _attempt(ranks, model, store, plan, config, work, packed, graphs)
        # outside the except block: the traceback no longer holds the failed attempt's tensors
        mine = attempt.outcome * ranks.world_size + ranks.rank
        clock = int(time.monotonic())
        worst, stop, clock, last, first = vote(ranks, mine, stop_asked(), clock, work.step, -work.step)
        if last != -first:
            raise RuntimeError(f"the ranks are at different steps, {-first} to {last}: restart from the checkpoint")
        outcome, rank = Outcome(worst // ranks.world_size), worst % ranks.world_size
        if outcome is Outcome.OK:
            return attempt, plan, events, bool(stop), clock
        failures[outcome] += 1
        if outcome is Outcome.NOT_FINITE:
            events.append(("not_finite", dict(step=work.step, rank=rank)))
            if failures[outcome] > 1:
                return replace(attempt, outcome=outcome), plan, events, bool(stop), clock
            continue
        if graphs:
            graphs.clear()
        smaller = _after_out_of_memory(ranks, store, plan, failures[outcome])
        events.append(("oom", dict(step=work.step, where="step", rank=rank, before=vars(plan), after=vars(smaller))))
        plan = smaller


def _after_out_of_memory(ranks, store, plan, failures):
    """The plan to try next: the same one once, the cache being free now, then smaller ones."""
    release_memory(ranks.device)
    if failures == 1:
        return plan
    smaller = shrink_plan(plan, longest_tokens=2 * store.meta["source"]["max_seq_len"])
    if smaller is None:
        raise RuntimeError(
            f"out of memory with the smallest plan ({plan}): lower --max_seq_len, or free memory and go on with "
            "--is_keep_training=True"
        )
    return smaller


def _attempt(ranks, model, store, plan, config, work, packed, graphs):
    """Fill the flat gradients with this rank's part of the step; no collective inside."""
    try:
        started = time.perf_counter()
        if packed is None or packed.plan != plan:
            packed = _pack(model, store, plan, work, graphs)
        waited = time.perf_counter() - started
        _local_gradients(ranks, model, plan, config, work, packed, graphs)
        finite = torch.isfinite(model.flat.gradients_and_loss.norm()).item()  # the step's one wait for the device
        return Attempt(Outcome.OK if finite else Outcome.NOT_FINITE, len(packed.micro_batches), waited)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return Attempt(Outcome.OUT_OF_MEMORY)


def _local_gradients(ranks, model, plan, config, work, packed, graphs):
    model.zero_grad()
    model.gradient_checkpointing = plan.gradient_checkpointing
    for index, micro_batch in enumerate(packed.micro_batches):
        if config.dropout:
            torch.manual_seed(_dropout_seed(config.seed, work.step, ranks.rank, index))
        faults.fire("forward", work.step)
        if packed.room:
            scale = _scale(work)
            faults.fire("backward_first", work.step)
            graphs.gradients(micro_batch, packed.room, plan.chunk_tokens, config.z_loss, scale)
            continue
        loss = model(micro_batch.to(ranks.device), plan.chunk_tokens, config.z_loss) * _scale(work)
        faults.fire("backward_first" if index == 0 else "backward", work.step)
        loss.backward()
        model.flat.loss.add_(loss.detach())
    faults.fire("reduce", work.step)


def _scale(work):
    """What a micro-batch's loss is multiplied by: sums become the mean over the step's target tokens."""
    return float("nan") if faults.fire("loss", work.step) else 1 / work.target_tokens


def _dropout_seed(*numbers):
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


def _commit(ranks, optimizer, flat, rate, max_grad_norm, step):
    """Reduce, clip and update the weights; returns the gradient's norm before clipping, on the device.

    A sum over ranks that is not finite though every part was leaves the weights alone: gradient and rate become 0.
    """
    sum_over_ranks(ranks, flat.gradients_and_loss)
    norm = flat.gradients.norm()
    scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if max_grad_norm else torch.ones_like(norm)
    finite = torch.isfinite(norm)
    faults.fire("optimizer", step)
    update(optimizer, flat.gradients, torch.where(finite, rate, 0.0), torch.where(finite, scale, 0.0))
    return norm
