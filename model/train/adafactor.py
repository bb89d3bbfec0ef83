"""The optimizer Adafactor, without momentum."""

import math
from itertools import groupby

import torch

from model.train.adamw_rms import RMS_FLOOR
from model.train.flat_optimizer import FlatOptimizer

SQUARE_FLOOR = 1e-30  # Adafactor's eps1: avoids a division by zero in a row whose gradients are all zero


class Adafactor(FlatOptimizer):
    """Adafactor without momentum: a tensor's update has RMS at most 1, times max(1e-3, RMS of the tensor).

    The state of a matrix is the row and column means of its squared gradients, averaged over steps with decay
    1 - step^-0.8 (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 to 6). Adjacent tensors of the same shape are
    updated as one batch, without waiting for the device; torch.optim.Adafactor waits twice per tensor.
    """

    fields = frozenset(("count", "rows", "columns", "squares"))
    obeys_scale = False  # its update has no kernel

    def __init__(self, flat, lr, weight_decay=0.0):
        super().__init__(flat.trained, dict(lr=lr, weight_decay=weight_decay))
        self.counts, self.num_steps, self.batches = torch.zeros(len(flat.trained), device=lr.device), 0, []
        kinds = groupby(enumerate(flat.trained), key=lambda item: (item[1].shape, item[0] >= flat.num_others))
        for (shape, decays), same in kinds:
            numbers, params = zip(*same, strict=True)
            batch, start = (len(params), *shape), sum(flat.trained_sizes[: numbers[0]])
            weights, gradients = (
                x[start : start + math.prod(batch)].view(batch) for x in (flat.masters, flat.gradients)
            )
            shapes = dict(rows=batch[:2], columns=batch[::2]) if len(shape) == 2 else dict(squares=batch)
            means = {name: torch.zeros(sizes, device=lr.device) for name, sizes in shapes.items()}
            for place, (number, p) in enumerate(zip(numbers, params, strict=True)):
                self.state[p] = dict(count=self.counts[number]) | {name: mean[place] for name, mean in means.items()}
            self.batches.append((weights, gradients, means, weight_decay if decays else 0.0))

    @staticmethod
    def needed_bytes(trained, matrix_numbers):
        """None: the sums of rows and columns are negligible."""
        return 0, 0

    def next_step(self):
        """Count a step."""
        self.num_steps += 1

    def count_steps(self):
        """Set the number of steps to that of the state."""
        self.num_steps = int(self.counts[0])

    @torch.no_grad()
    def apply(self, scale):
        """The update, after `next_step`; the gradients change."""
        rate = self.param_groups[0]["lr"]
        self.counts += 1
        for weights, gradients, means, weight_decay in self.batches:
            direction = gradients.mul_(scale)
            _divide_by_root_mean_squares(direction, means, self.num_steps**-0.8)
            rates = _rms(weights).clamp(min=RMS_FLOOR) * rate
            of_each = -1, *[1] * (weights.dim() - 1)
            factors = (-rates / _rms(direction).clamp(min=1.0)).view(of_each)
            if weight_decay:
                weights.mul_(1 - weight_decay * rates.view(of_each))
            weights.addcmul_(direction, factors)


def _divide_by_root_mean_squares(gradients, means, share):
    """Divide `gradients` in place by the roots of their averaged squares, to which they contribute a `share`."""
    if "squares" in means:
        means["squares"].lerp_(gradients.square().add_(SQUARE_FLOOR), share)
        gradients.mul_(means["squares"].rsqrt())
        return
    rows, columns = means["rows"], means["columns"]
    for mean, axis in ((rows, 2), (columns, 1)):
        mean.lerp_(gradients.norm(dim=axis).square_().div_(gradients.shape[axis]).add_(SQUARE_FLOOR), share)
    gradients.mul_((rows / rows.mean(dim=1, keepdim=True)).rsqrt_()[:, :, None]).mul_(columns.rsqrt()[:, None, :])


def _rms(batch):
    """Root mean square of each tensor of a batch."""
    return batch.flatten(1).norm(dim=1) / math.prod(batch.shape[1:]) ** 0.5
