"""The optimizers by name."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from config import LORA_OPTIMIZER, with_optimizer
from model.nn.flat_params import FlatParams, runs_kernels
from model.train.adafactor import Adafactor
from model.train.adamw import AdamW
from model.train.adamw_rms import RMSScaledAdamW
from model.train.muon import Muon

OPTIMIZERS = dict(muon=Muon, adamw_rms=RMSScaledAdamW, adamw=AdamW, adafactor=Adafactor)


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
