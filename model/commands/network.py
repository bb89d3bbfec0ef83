"""Makes the network of a run on this rank's device."""

import torch

from model.nn.lora import attach, draw
from model.nn.registry import family_of
from model.nn.weights_io import load_into
from model.runtime.distributed import broadcast


def make_model(ranks, config, model_config, weights=None, adapter=None):
    """Model on this rank's device with `weights` or random ones; equal on all ranks.

    With an AdapterStart these are frozen, and the adapter is trained.
    """
    build, dtype = family_of(model_config).build, compute_dtype(config.mixed_precision, ranks.device)
    with torch.device("meta"):
        model = build(model_config, config.dropout, dtype).freeze_all_but(config.trainable)
        if adapter:
            attach(model, adapter.lora)
    model.place(ranks.device)
    if not weights:
        model.initialise(config.seed)
    elif ranks.is_main:  # only rank 0 has the tensors
        load_into(model, weights, config.finetune_from_ckp_file)
    if adapter:
        draw(model, config.seed)
        if adapter.tensors:  # rank 0 alone has them
            load_into(model, adapter, config.finetune_from_ckp_file)
    broadcast(ranks, model.flat.weights)
    return model


def compute_dtype(mixed_precision, device):
    """bfloat16 if `mixed_precision` is bf16, or if it is auto and the GPU supports it natively; else float32."""
    is_native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if mixed_precision == "bf16" or (mixed_precision == "auto" and is_native) else torch.float32
