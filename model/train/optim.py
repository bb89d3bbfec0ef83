"""The optimizers: Adafactor, and what all have in common, AdamW, RMSScaledAdamW and Muon too."""

import math
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import torch
from torch import nn

from config import LORA_OPTIMIZER, with_optimizer
from model.nn.flat_params import FlatParams, runs_kernels
from model.train.adamw import AdamW
from model.train.adamw_rms import RMS_FLOOR, RMSScaledAdamW
from model.train.flat_optimizer import FlatOptimizer
from model.train.muon import Muon

SQUARE_FLOOR = 1e-30  # Adafactor's eps1: avoids a division by zero in a row whose gradients are all zero


class Adafactor(FlatOptimizer):
    """Adafactor without momentum: a tensor's update has RMS at most 1, times max(1e-3, RMS of the tensor).

    The state of a matrix is the row and column means of its squared gradients, averaged over steps with decay
    1 - step^-0.8 (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 to 6). Adjacent tensors of the same shape are
    updated as one batch, without waiting for the device; torch.optim.Adafactor waits twice per tensor.
    """

    def __init__(self, flat, lr, weight_decay=0.0):
        super().__init__(flat.trained, dict(lr=lr, weight_decay=weight_decay))
        self.counts, self.num_steps, self.batches = torch.zeros(len(flat.trained), device=lr.device), 0, []
        for shape, same in groupby(enumerate(flat.trained), key=lambda item: item[1].shape):
            numbers, params = zip(*same, strict=True)
            batch, start = (len(params), *shape), sum(flat.trained_sizes[: numbers[0]])
            weights, gradients = (
                x[start : start + math.prod(batch)].view(batch) for x in (flat.masters, flat.gradients)
            )
            shapes = dict(rows=batch[:2], columns=batch[::2]) if len(shape) == 2 else dict(squares=batch)
            means = {name: torch.zeros(sizes, device=lr.device) for name, sizes in shapes.items()}
            for place, (number, p) in enumerate(zip(numbers, params, strict=True)):
                self.state[p] = dict(count=self.counts[number]) | {name: mean[place] for name, mean in means.items()}
            self.batches.append((weights, gradients, means))

    @torch.no_grad()
    def step(self, scale=None):
        """Update the weights with `scale` (0-dim, on the device; None: 1) times the gradients, which are changed."""
        rate, weight_decay = (self.param_groups[0][name] for name in ("lr", "weight_decay"))
        self.counts += 1
        self.num_steps += 1
        for weights, gradients, means in self.batches:
            direction = gradients if scale is None else gradients.mul_(scale)
            _divide_by_root_mean_squares(direction, means, self.num_steps**-0.8)
            factors = _rms(weights).clamp(min=RMS_FLOOR) * -rate / _rms(direction).clamp(min=1.0)
            if weight_decay:
                weights.mul_(1 - rate * weight_decay)
            weights.addcmul_(direction, factors.view(-1, *[1] * (weights.dim() - 1)))


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


STATE_FIELDS = {  # of each weight's state, by optimizer
    RMSScaledAdamW: {"count", "exp_avg", "exp_avg_sq"},
    Muon: {"count", "exp_avg", "exp_avg_sq", "momentum"},
    AdamW: {"step", "exp_avg", "exp_avg_sq"},
    Adafactor: {"count", "rows", "columns", "squares"},
}


OPEN = ("absent", "muon", "others")  # reasons of a choice that waits for the weights


def choose_optimizer(config, typed, is_resumed, trained_by):
    """(`config` with an optimizer and its rate, why it has this one: a key of the catalogue of texts after `why.`).

    - One that was typed, or that a resumed run began with, stays.
    - Random weights get Muon, an adapter AdamW; `load_config` knows both before any file is read.
    - Weights that are all trained further keep the kind of update that made them, because orthogonalised updates
      degrade weights that AdamW made (arXiv 2605.10468). `trained_by` is the optimizer of this trainer that trained all
      of them last, as its exports say. Muon's keep Muon; so do weights that are not on this machine (None), which plan
      takes for made here. All others get AdamW: downloaded models, state dicts, what another optimizer trained last. A
      merged adapter changes nothing: its base's optimizer counts.
    """
    if config.optimizer == "auto":
        why = "absent" if trained_by is None else "muon" if trained_by == "muon" else "others"
        return with_optimizer(config, "adamw" if why == "others" else "muon"), why
    if is_resumed:
        return config, "resumed"
    if "optimizer" in typed or (config.lora_rank and config.optimizer != LORA_OPTIMIZER):
        return config, "typed"
    if config.lora_rank:
        return config, "adapter"
    return config, "typed" if config.finetune_from_ckp_file else "scratch"


def make_optimizer(model, config, place=(0, 1)):
    """The optimizer that `config.optimizer` names, over the trainable weights, of the process `place` (rank, ranks).

    Its learning rate is a tensor on the weights' device, which `update` writes.
    """
    decay, rate = config.weight_decay, torch.tensor(config.learn_rate, device=model.device)
    if config.optimizer == "adamw_rms":
        return RMSScaledAdamW(model.flat, rate, weight_decay=decay)
    if config.optimizer == "muon":
        return Muon(model.flat, rate, weight_decay=decay, place=place if config.share_update else (0, 1))
    if config.optimizer == "adamw":
        return AdamW(model.flat, rate, weight_decay=decay)
    return Adafactor(model.flat, rate, weight_decay=decay)


def reset_state(optimizer):
    """Zero the optimizer's state in place, as before the first update."""
    for fields in optimizer.state.values():
        for value in fields.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    count_steps(optimizer)


def count_steps(optimizer):
    """Set the host's step count of an optimizer from its state; AdamW has none."""
    if not isinstance(optimizer, AdamW):
        counter = getattr(optimizer, "rest", optimizer)
        counter.num_steps = int(counter.counts[0])


def is_shared(optimizer):
    """True if each rank updates only its own part of the matrices."""
    return len(getattr(optimizer, "parts", ())) > 1


def obeys_scale(optimizer):
    """True if the update runs in kernels that change nothing unless their scale is above 0, and can be recorded."""
    return isinstance(optimizer, (AdamW, RMSScaledAdamW, Muon)) and runs_kernels(optimizer.weights)


def update(optimizer, rate, scale, apply=None):
    """Update the weights at learning rate `rate` with `scale` times the flat gradients, which may change.

    `scale` is a 0-dim tensor on the device, so the host does not wait for it. `apply` replaces the optimizer's own, as
    a recording of it does.
    """
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
    if apply:
        optimizer.next_step()
        apply(scale)
    else:
        optimizer.step(scale)


def update_works(flat, config, device):
    """Functions that launch the update's kernels for one shape of matrix each, so that threads can compile them.

    `flat` is a network's FlatParams, which may be without memory.
    """
    if config.optimizer not in ("muon", "adamw_rms") or not runs_kernels(torch.empty(0, device=device)):
        return []
    shapes = sorted({p.shape for p in flat.trained[flat.num_others :]})
    shapes = shapes if config.optimizer == "muon" else shapes[:1]  # the other's kernels do not depend on shapes
    return [partial(_update_one, config, shape, device) for shape in shapes]


def _update_one(config, shape, device):
    vector, matrix = (nn.Parameter(torch.zeros(sizes, device=device)) for sizes in (shape[-1:], shape))
    network = SimpleNamespace(flat=FlatParams([vector], [matrix], (), torch.float32), device=device)
    update(make_optimizer(network, config), 0.0, torch.zeros((), device=device))
