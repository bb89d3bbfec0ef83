"""The optimizers by name."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from model.nn.bf16_gradients import hold_in_bf16
from model.nn.flat_params import FlatParams, runs_kernels
from model.nn.weight_parts import share
from model.train.adafactor import Adafactor
from model.train.adamw import AdamW
from model.train.adamw_rms import RMSScaledAdamW
from model.train.average import WeightAverage
from model.train.host_adamw import HostAdamW
from model.train.muon import Muon

OPTIMIZERS = dict(muon=Muon, adamw_rms=RMSScaledAdamW, adamw=AdamW, adafactor=Adafactor)


@dataclass(frozen=True)
class UpdateOptions:
    """How a step's gradients become weights; the fields are those of TrainConfig."""

    optimizer: str
    learn_rate: float
    weight_decay: float
    max_grad_norm: float
    spike_guard: float
    reduce_dtype: str
    share_state: bool
    master_dtype: str
    offload: str
    seed: int
    average: float


def make_optimizer(model, options, place=(0, 1)):
    """The optimizer of these UpdateOptions, over the trainable weights, of the process `place` (rank, ranks).

    Their average, if one is wanted, is a state of it. Its learning rate is a tensor on the weights' device, which
    `update` writes. With `share_state` this rank keeps its part of the masters alone, and with `master_dtype` bf16 none
    but the weights in bf16, and its gradients are in bf16 too. With `offload` its masters and state are in host memory.
    """
    (rank, num_ranks), optimizer_class = place, OPTIMIZERS[options.optimizer]
    offloads = options.offload == "optimizer"
    optimizer_class = HostAdamW if offloads else optimizer_class
    rate = torch.tensor(options.learn_rate, device=model.device)
    num_ranks, rounds = num_ranks if options.share_state else 1, options.master_dtype == "bf16"
    if num_ranks > 1 or rounds or offloads:
        ends = optimizer_class.part_ends(model.flat.trained_sizes, num_ranks)
        share(model.flat, ends, rank if num_ranks > 1 else 0, not rounds, offloads)
    if rounds and not model.flat.rounding:
        hold_in_bf16(model.flat)
    seed = dict(seed=options.seed) if rounds else {}
    optimizer = optimizer_class(model.flat, rate, weight_decay=options.weight_decay, **seed)
    optimizer.average = WeightAverage(model.flat, options.average) if options.average else None
    return optimizer


def update_works(flat, options, device):
    """Functions that launch the update's kernels for one shape of matrix each, so that threads can compile them.

    `flat` is a network's FlatParams, which may be without memory.
    """
    if not runs_kernels(torch.empty(0, device=device)):
        return []
    shapes = sorted({p.shape for p in flat.trained[flat.num_others :]})
    shapes = OPTIMIZERS[options.optimizer].kernel_shapes(shapes)
    return [partial(_update_one, options, shape, device) for shape in shapes]


def _update_one(options, shape, device):
    vector, matrix = (nn.Parameter(torch.zeros(sizes, device=device)) for sizes in (shape[-1:], shape))
    network = SimpleNamespace(flat=FlatParams([vector], [matrix], (), torch.float32), device=device)
    make_optimizer(network, options).update(0.0, torch.zeros((), device=device))
