"""Launches the kernels of an update once, on one matrix of each shape: they are compiled, or loaded, by then."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from model.nn.flat_params import FlatParams, runs_kernels
from model.train.optim import make_optimizer, update


def update_works(flat, config, device):
    """Functions that launch the update's kernels for one shape of matrix each, so that threads can compile them.

    `flat` is a network's FlatParams, which may be without memory.
    """
    if config.optimizer not in ("muon", "adamw_rms") or not runs_kernels(torch.empty(0, device=device)):
        return []
    shapes = sorted({p.shape for p in flat.trained[flat.num_others :]})
    shapes = shapes if config.optimizer == "muon" else shapes[:1]  # the other's kernels do not depend on shapes
    return [partial(_update, config, shape, device) for shape in shapes]


def _update(config, shape, device):
    vector, matrix = (nn.Parameter(torch.zeros(sizes, device=device)) for sizes in (shape[-1:], shape))
    network = SimpleNamespace(flat=FlatParams([vector], [matrix], (), torch.float32), device=device)
    update(make_optimizer(network, config), 0.0, torch.zeros((), device=device))
