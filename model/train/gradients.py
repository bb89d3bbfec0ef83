"""One rank's attempt at a step's gradients, without collectives: one rank can fail alone, and all ranks try again."""

import time
from dataclasses import dataclass
from enum import IntEnum

import torch

from model.runtime import fault_injection
from model.runtime.device_memory import is_out_of_memory
from model.train.loader import pack_work


class Outcome(IntEnum):
    """How an attempt ended; all ranks act on the worst Outcome of any rank."""

    OK = 0
    OUT_OF_MEMORY = 1
    TORN = 2  # the previous update failed after it may have written weights


@dataclass(frozen=True)
class Attempt:
    outcome: Outcome
    micro_batches: int = 0
    data_wait_seconds: float = 0.0
    shards: tuple = ()  # with exact=True, the gradient of each of this rank's shards
    norms: torch.Tensor | None = None  # of this rank's gradient or shards; before the vote: nothing may fail after it


def attempt_gradients(ranks, model, store, plan, config, work, packed=None, graphs=None):
    """Write this rank's gradients of the step to the model's flat gradients, without waiting for the device.

    `packed`: this rank's micro-batches, packed ahead (packed again if for another plan); `graphs`: StepGraphs that
    replay a micro-batch which fits one of their buckets.
    """
    try:
        started = time.perf_counter()
        if packed is None or packed.plan != plan:
            packed = pack_work(model, store, plan, work, graphs)
        waited = time.perf_counter() - started
        model.gradient_checkpointing = plan.gradient_checkpointing
        if config.dropout:
            model.key_dropout(config.seed, work.step)
        shards = tuple(
            _share_gradients(ranks, model, plan, config, work, micro_batches, packed.bucket, graphs)
            for _, micro_batches in packed.shares
        )
        norms = torch.stack([part.norm() for part in shards or (model.flat.gradients_and_parts,)])
        fault_injection.fire("reduce", work.step)
        return Attempt(Outcome.OK, packed.num_micro_batches, waited, shards if config.exact else (), norms)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return Attempt(Outcome.OUT_OF_MEMORY)


def _share_gradients(ranks, model, plan, config, work, micro_batches, bucket, graphs):
    """Gradients and loss parts of a share, in the model's flat tensor; with exact=True a copy of it."""
    model.zero_grad()
    for index, micro_batch in enumerate(micro_batches):
        fault_injection.fire("forward", work.step)
        if bucket:
            scale = _loss_scale(work)
            fault_injection.fire("backward_first", work.step)
            graphs.gradients(micro_batch, bucket, plan.chunk_tokens, config.z_loss, scale)
            continue
        loss, parts = model.loss_and_parts(micro_batch.to(ranks.device), plan.chunk_tokens, config.z_loss)
        scale = _loss_scale(work)
        fault_injection.fire("backward_first" if index == 0 else "backward", work.step)
        (loss * scale).backward()
        model.flat.loss_parts.add_(parts * scale)
    return model.flat.gradients_and_parts.clone() if config.exact else model.flat.gradients_and_parts


def _loss_scale(work):
    """Factor of a micro-batch's loss: turns sums into the mean over the step's target tokens."""
    return float("nan") if fault_injection.fire("loss", work.step) else 1 / work.target_tokens
