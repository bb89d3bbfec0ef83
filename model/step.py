"""The training loop: one optimizer step at a time, handed out as a StepResult.

A step is a transaction. Local gradients are computed with no collective inside; all ranks vote on the outcome on the
CPU; only then are gradients reduced, once, and weights changed. A step that runs out of memory on any rank is done
again on every rank: same examples, same loss, same gradient.
"""

import hashlib
import math
import time
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch

from model import faults
from model.batches import collate, cut, share_of, step_at
from model.exact import NUM_SHARDS, add_in_order, shards_of_rank
from model.memory import MemoryPlan, is_out_of_memory, release_memory, shrink_plan
from model.optim import learn_rate_at, set_learn_rate
from model.ranks import stop_asked, sum_over_ranks, vote
from model.spikes import MAX_SKIPPED_STEPS, WINDOW, spike_limit, too_many_skipped


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
    skipped: bool  # its numbers were not finite twice, or its gradient a spike: the weights are as before
    recent_norms: tuple  # gradient norms of the last steps that were not skipped, under the spike guard
    stop: bool  # some rank was asked to stop


def train_steps(ranks, model, optimizer, store, plan, config, course, step=0, pairs_seen=0, recent_norms=()):
    """Yield a StepResult after each optimizer step from `pairs_seen` to the end of the course.

    Raises RuntimeError when a step does not fit with the smallest plan, or too many in a row are skipped.
    """
    flat = model.flat
    skipped_in_a_row = 0
    while pairs_seen < course.total_pairs:
        started = time.perf_counter()
        examples = step_at(pairs_seen, len(store), course.global_batch, config.seed)
        lengths = store.lengths[examples.ids].astype("int64")
        rate = learn_rate_at(pairs_seen + len(examples.ids) / 2, config, course.warmup_pairs, course.total_pairs)
        work = _work(ranks, step + 1, examples.ids, lengths, course.start_id, config.exact)
        attempt, plan, events, stop = _until_voted(ranks, model, store, plan, config, work)
        skipped = "numbers that were not finite twice" if attempt.outcome is not Outcome.OK else ""
        if not skipped:
            limit = spike_limit(recent_norms, config.spike_guard)
            grad_norm = _commit(ranks, optimizer, flat, attempt, rate, config.max_grad_norm, limit, work.step)
            if grad_norm is None:
                skipped = f"a gradient norm above {limit:.3g}, {config.spike_guard} times the median"
            elif config.spike_guard:
                recent_norms = (*recent_norms, float(grad_norm))[-WINDOW:]
        if skipped:
            events.append(("skip", dict(step=work.step, why=skipped, ids=examples.ids.tolist())))
        skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
        if skipped_in_a_row > MAX_SKIPPED_STEPS:
            raise RuntimeError(too_many_skipped(skipped_in_a_row, work.step, skipped, examples.ids, config))
        step, pairs_seen = work.step, pairs_seen + len(examples.ids)
        yield StepResult(
            step=step, epoch=examples.epoch, ends_epoch=pairs_seen % len(store) == 0, pairs_seen=pairs_seen,
            loss=torch.full_like(flat.loss, torch.nan) if skipped else flat.loss.clone(),
            grad_norm=torch.full_like(flat.loss, torch.nan) if skipped else grad_norm,
            learn_rate=rate, target_tokens=work.target_tokens, tokens=int(lengths.sum()),
            micro_batches=attempt.micro_batches, ids=work.ids.tolist(), plan=plan, events=tuple(events),
            step_seconds=time.perf_counter() - started, data_wait_seconds=attempt.data_wait_seconds,
            skipped=bool(skipped), recent_norms=tuple(recent_norms), stop=stop,
        )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One rank's part of a step."""

    step: int  # as the journal numbers it
    share: int  # which part it is: what seeds its dropout
    ids: object  # its examples
    target_tokens: int  # of the whole step, over all ranks: what its loss is divided by
    start_id: int
    shards: tuple = ()  # under exact, the Work of each logical shard


def _work(ranks, step, ids, lengths, start_id, exact):
    """This rank's Work in the step of the examples `ids`, whose `lengths` are (len(ids), 2) in tokens."""
    numbers, count = (shards_of_rank(ranks), NUM_SHARDS) if exact else ([ranks.rank], ranks.world_size)
    target_tokens = int(lengths[:, 1].sum())
    parts = tuple(Work(step, n, share_of(ids, lengths, n, count), target_tokens, start_id) for n in numbers)
    if not exact:
        return parts[0]
    mine = np.concatenate([ids[:0], *(part.ids for part in parts)])
    return Work(step, ranks.rank, mine, target_tokens, start_id, parts)


@dataclass(frozen=True)
class Attempt:
    outcome: Outcome
    micro_batches: int = 0
    data_wait_seconds: float = 0.0
    shards: tuple | None = None  # under exact, the gradient of each of this rank's shards


def _until_voted(ranks, model, store, plan, config, work):
    """Attempt the step until all ranks have succeeded or agreed to skip it.

    Returns the attempt, the plan it fitted in, the journal's events, and whether some rank was asked to stop.
    """
    events, failures = [], {Outcome.NOT_FINITE: 0, Outcome.OUT_OF_MEMORY: 0}
    while True:
        attempt = _attempt(ranks, model, store, plan, config, work)
        # outside the except block: the traceback no longer holds the failed attempt's tensors
        mine = attempt.outcome * ranks.world_size + ranks.rank
        worst, stop, last, first = vote(ranks, mine, stop_asked(), work.step, -work.step)
        if last != -first:
            raise RuntimeError(f"the ranks are at different steps, {-first} to {last}: restart from the checkpoint")
        outcome, rank = Outcome(worst // ranks.world_size), worst % ranks.world_size
        if outcome is Outcome.OK:
            return attempt, plan, events, bool(stop)
        failures[outcome] += 1
        if outcome is Outcome.NOT_FINITE:
            events.append(("not_finite", dict(step=work.step, rank=rank)))
            if failures[outcome] > 1:
                return replace(attempt, outcome=outcome), plan, events, bool(stop)
            continue
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


def _attempt(ranks, model, store, plan, config, work):
    """Fill the gradient buffer with this rank's part of the step; no collective inside."""
    try:
        attempt = _shard_gradients if config.exact else _local_gradients
        return attempt(ranks, model, store, plan, config, work)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return Attempt(Outcome.OUT_OF_MEMORY)


def _shard_gradients(ranks, model, store, plan, config, work):
    """As _local_gradients, each logical shard by itself and kept apart."""
    attempts, kept = [], []
    for shard in work.shards:
        attempts.append(_local_gradients(ranks, model, store, plan, config, shard))
        kept.append(model.flat.gradients_and_loss.clone())
    return Attempt(
        max((attempt.outcome for attempt in attempts), default=Outcome.OK),
        sum(attempt.micro_batches for attempt in attempts),
        sum(attempt.data_wait_seconds for attempt in attempts),
        tuple(kept),
    )


def _local_gradients(ranks, model, store, plan, config, work):
    model.zero_grad()
    model.gradient_checkpointing = plan.gradient_checkpointing
    parts = cut(work.ids, store.lengths[work.ids], plan.micro_batch_tokens)
    data_wait_seconds = 0.0
    for index, part in enumerate(parts):
        started = time.perf_counter()
        micro_batch = collate(store, part, work.start_id, ranks.device, model.uses_kernels)
        data_wait_seconds += time.perf_counter() - started
        if config.dropout:
            torch.manual_seed(_dropout_seed(config.seed, work.step, work.share, index))
        faults.fire("forward", work.step)
        loss = model(micro_batch, plan.chunk_tokens, config.z_loss) / work.target_tokens
        if faults.fire("loss", work.step):
            loss = loss * torch.nan
        faults.fire("backward_first" if index == 0 else "backward", work.step)
        loss.backward()
        model.flat.loss.add_(loss.detach())
    faults.fire("reduce", work.step)
    finite = torch.isfinite(model.flat.gradients_and_loss.norm()).item()  # the step's one wait for the device
    return Attempt(Outcome.OK if finite else Outcome.NOT_FINITE, len(parts), data_wait_seconds)


def _dropout_seed(*numbers):
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


def _commit(ranks, optimizer, flat, attempt, rate, max_grad_norm, norm_limit, step):
    """Reduce, clip and update the weights; returns the gradient's norm before clipping, on the device.

    A norm above `norm_limit` leaves weights and optimizer alone on all ranks: None is returned. A sum over ranks that
    is not finite though every part was leaves the weights alone: gradient and rate become 0.
    """
    if attempt.shards is None:
        sum_over_ranks(ranks, flat.gradients_and_loss)
    else:
        add_in_order(ranks, attempt.shards, flat.gradients_and_loss)
    norm = flat.gradients.norm()
    if norm_limit < math.inf and vote(ranks, bool(norm > norm_limit))[0]:
        return None
    finite = torch.isfinite(norm)
    scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if max_grad_norm else torch.ones_like(norm)
    flat.gradients.nan_to_num_(0.0, 0.0, 0.0).mul_(torch.where(finite, scale, 0.0))
    faults.fire("optimizer", step)
    set_learn_rate(optimizer, torch.where(finite, rate, 0.0))
    optimizer.step()
    return norm
