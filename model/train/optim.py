"""The optimizers by name."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from model.nn.flat_params import FlatParams, runs_kernels
from model.train.adafactor import Adafactor
from model.train.adamw import AdamW
from model.train.adamw_rms import RMSScaledAdamW
from model.train.muon import Muon

OPTIMIZERS = dict(muon=Muon, adamw_rms=RMSScaledAdamW, adamw=AdamW, adafactor=Adafactor)


def make_optimizer(model, config, place=(0, 1)):
    """The optimizer that `config.optimizer` names, over the trainable weights, of the process `place` (rank, ranks).

    Its learning rate is a tensor on the weights' device, which `update` writes.
    """
    rate = torch.tensor(config.learn_rate, device=model.device)
    shared = dict(place=place) if config.share_update else {}
    return OPTIMIZERS[config.optimizer](model.flat, rate, weight_decay=config.weight_decay, **shared)


def update_works(flat, config, device):
    """Functions that launch the update's kernels for one shape of matrix each, so that threads can compile them.

    `flat` is a network's FlatParams, which may be without memory.
    """
    if not runs_kernels(torch.empty(0, device=device)):
        return []
    shapes = sorted({p.shape for p in flat.trained[flat.num_others :]})
    return [partial(_update_one, config, shape, device) for shape in OPTIMIZERS[config.optimizer].kernel_shapes(shapes)]


def _update_one(config, shape, device):
    vector, matrix = (nn.Parameter(torch.zeros(sizes, device=device)) for sizes in (shape[-1:], shape))
    network = SimpleNamespace(flat=FlatParams([vector], [matrix], (), torch.float32), device=device)
    make_optimizer(network, config).update(0.0, torch.zeros((), device=device))
