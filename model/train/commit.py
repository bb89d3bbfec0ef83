"""The end of a step's transaction: the gradients are summed over ranks, checked to be finite, and the weights updated.

Where an optimizer's kernels obey a scale on the device, the update is queued before its check is read: the host waits
while the device updates, and the device never waits for the host.
"""

import math
from dataclasses import dataclass, replace

import torch

from model.runtime import fault_injection
from model.runtime.device_memory import within_memory
from model.runtime.distributed import vote
from model.train.reduction import gradient_norm, publish, sum_gradients

FINITE_TRIES = 2  # attempts at a step whose numbers are not finite, before it is skipped
NOT_FINITE = f"numbers that were not finite {FINITE_TRIES} times"


@dataclass(frozen=True)
class UpdateResult:
    """How a step's update ended."""

    grad_norm: torch.Tensor  # before clipping; on the device
    skipped: str = ""  # why the weights were left unchanged; "": they were updated
    rank: int | None = None  # the rank with numbers that are not finite; None: only the sum over ranks is not finite
    torn: bool = False  # memory ran out on this rank after weights may have been written


class OnHost:
    """A number of the device on its way to the host; `read` waits for it, and not for work queued after it."""

    def __init__(self, tensor):
        self.number, self.arrival = tensor.to("cpu", non_blocking=True), None
        if tensor.is_cuda:
            self.arrival = torch.cuda.Event()
            self.arrival.record()

    def read(self):
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.number.item()


def try_commit(context, attempt, work, norm_limit):
    """The UpdateResult of `reduce_and_update`; torn=True if memory ran out in it."""
    _, updated = within_memory(reduce_and_update, context, attempt, work, norm_limit)
    return updated or UpdateResult(torch.full_like(context.model.flat.sums[0], torch.nan), torn=True)


def reduce_and_update(context, attempt, work, norm_limit):
    """Reduce the gradients, clip them and update the weights.

    If the loss or the gradient is not finite, or its norm exceeds `norm_limit`, all ranks leave weights and optimizer
    unchanged.
    """
    ranks, flat, options = context.ranks, context.model.flat, context.options
    sum_gradients(ranks, context.model, options.reduce_dtype, attempt.ready)
    norm, metrics = gradient_norm(ranks, flat), flat.sums.sum()
    is_finite = (norm + metrics).isfinite()
    finite = OnHost(is_finite)  # the same on all ranks, as the sums are
    obeys = context.optimizer.obeys_scale
    reads_later = obeys and norm_limit == math.inf
    if not reads_later and not finite.read():
        return _not_finite(ranks, attempt, norm)
    if norm_limit < math.inf and vote(ranks, bool(norm > norm_limit))[0]:
        return UpdateResult(norm, f"a gradient norm above {norm_limit:.3g}, {options.spike_guard} times the median")
    scale = (options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if options.max_grad_norm else torch.ones_like(norm)
    scale, apply = (scale * is_finite, context.graphs and context.graphs.update) if obeys else (scale, None)
    done, _ = within_memory(_update, context, work, scale, apply)
    publish(ranks, flat)  # whatever became of a rank's own part: none waits for another
    if context.optimizer.average:
        context.optimizer.average.update(work.step, scale)
    if reads_later and not finite.read():  # the step's only wait for the device; a rank whose update failed votes too
        context.optimizer.count_steps()
        return replace(_not_finite(ranks, attempt, norm), torn=not done)
    return UpdateResult(norm, torn=not done)


def _update(context, work, scale, apply):
    fault_injection.fire("optimizer", work.step)
    context.optimizer.update(work.learn_rate, scale, apply)
    fault_injection.fire("update", work.step)


def _not_finite(ranks, attempt, norm):
    """The UpdateResult of a step that is not finite, with the last rank whose own numbers are not."""
    is_own = attempt.norms is None or not attempt.norms.isfinite().all()
    (last,) = vote(ranks, (ranks.rank + 1) * bool(is_own))
    return UpdateResult(norm, NOT_FINITE, last - 1 if last else None)
