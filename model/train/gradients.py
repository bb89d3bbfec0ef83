"""One rank's attempt at a step's gradients, without collectives: one rank can fail alone, and all ranks try again."""

import time
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from model.nn.flat_params import norm
from model.runtime import fault_injection
from model.runtime.device_memory import within_memory
from model.train.weighted_loss import weighted_loss


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
    norms: torch.Tensor | None = None  # `_norms`, or a CapturedStep's; held before the vote: nothing may fail after it
    ready: dict = field(default_factory=dict)  # of a CapturedStep; empty: nothing tells when a part is written


def attempt_gradients(context, plan, work, packed=None):
    """Write this rank's gradients of the step to the model's flat gradients, without waiting for the device.

    `packed`: this rank's micro-batches, packed ahead (packed again if for another plan).
    """
    _, attempt = within_memory(_gradients, context, plan, work, packed)
    return attempt or Attempt(Outcome.OUT_OF_MEMORY)


def _gradients(context, plan, work, packed):
    started, model = time.perf_counter(), context.model
    if packed is None or packed.plan != plan:
        packed = context.loader.pack(work, plan)
    waited = time.perf_counter() - started
    model.gradient_checkpointing = plan.gradient_checkpointing
    if model.has_dropout:
        model.key_dropout(context.loader.schedule.seed, work.step)
    if packed.bucket and context.graphs:
        graph = _replay(context, plan, work, packed)
        norms, ready = graph.norms, graph.ready
    else:
        _compute_gradients(context, plan, work, packed)
        norms, ready = _norms(context), {}
    if context.graphs and context.optimizer.obeys_scale:
        context.graphs.capture_update(context.optimizer)  # here, because memory may run out
    fault_injection.fire("reduce", work.step)
    return Attempt(Outcome.OK, len(packed.micro_batches), waited, norms, ready)


def _replay(context, plan, work, packed):
    """Write the gradients of a step of one micro-batch by a replay; returns its CapturedStep."""
    (micro_batch,), graphs, scales = packed.micro_batches, context.graphs, _scales(work)
    context.model.zero_grad()
    _begin(context, work, 0)
    for site in ("forward", "backward_first"):
        fault_injection.fire(site, work.step)
    if not graphs.captured:
        graphs.reserve(context.loader.in_largest_bucket(work, plan), plan.chunk_tokens, scales)
    return graphs.gradients(micro_batch, packed.bucket, plan.chunk_tokens, scales)


def _norms(context):
    """Norms (2,) of this rank's gradient and of its metrics; None for a rank alone, whose gradient is the sum."""
    flat = context.model.flat
    return None if context.ranks.world_size == 1 else torch.stack([norm(flat.gradients), norm(flat.beside)])


def _compute_gradients(context, plan, work, packed):
    """Write the gradients and metrics of the micro-batches to the model's flat tensor."""
    graphs = context.graphs
    context.model.zero_grad()
    for index, micro_batch in enumerate(packed.micro_batches):
        fault_injection.fire("forward", work.step)
        _begin(context, work, index)
        arguments = context, micro_batch, plan.chunk_tokens, _scales(work)
        arguments += (("backward" if index else "backward_first", work.step),)
        if graphs:
            graphs.run(_add_gradients, *arguments)
        else:
            _add_gradients(*arguments)


def _begin(context, work, number):
    """Key the rounding of gradients in bf16 to this rank's micro-batch `number` of the step."""
    if rounding := context.model.flat.rounding:
        rounding.begin(context.loader.schedule.seed, work.step, context.ranks.rank, number)


def _add_gradients(context, micro_batch, chunk_tokens, scales, fault):
    """Add the gradients and metrics of a micro-batch to the model's flat tensors; `fault` may fire before backward."""
    model = context.model
    scales = [_on_device(part, model.device) for part in scales]
    loss = weighted_loss(model, context.objective, micro_batch.to(model.device), chunk_tokens, scales)
    fault_injection.fire(*fault)
    loss.backward()


def _scales(work):
    """Factors of a micro-batch's loss sums and metric sums, which turn them into the step's means."""
    fails = fault_injection.fire("loss", work.step)
    return tuple(
        tuple(float("nan") if fails else 1 / weight for weight in part)
        for part in (work.loss_weights, work.metric_weights)
    )


def _on_device(numbers, device):
    """A tensor of these numbers, made by kernels: copying it from the host would wait for the device."""
    return torch.cat([torch.full((1,), number, device=device) for number in numbers])
