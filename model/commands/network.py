"""Makes the network of a run on this rank's device, in the way that the options ask for its numbers."""

from concurrent.futures import ThreadPoolExecutor, wait

import torch

from model.commands.recipe import update_options
from model.formats.weights import LoadedWeights, load_into
from model.nn.attention import has_kernels
from model.nn.lora import attach, draw
from model.nn.registry import family_of
from model.runtime.cgroup import num_cpus
from model.runtime.distributed import broadcast
from model.runtime.watchdog import untimed
from model.train.optim import update_works


def make_model(ranks, config, model_config, weights=None, adapter=None):
    """Model on this rank's device, as fill_model gives it."""
    return fill_model(ranks, config, draft_model(ranks, config, model_config, adapter), weights, adapter)


def draft_model(ranks, config, model_config, adapter=None):
    """Model without memory, of the shapes that the run trains; with an AdapterStart only the adapter is trained."""
    build, dtype = family_of(model_config).build, compute_dtype(config.mixed_precision, ranks.device)
    with torch.device("meta"):
        model = build(model_config, config.dropout, dtype).freeze_all_but(config.trainable)
        if adapter:
            attach(model, adapter.lora)
    return model


def fill_model(ranks, config, model, weights=None, adapter=None):
    """Give a model of draft_model memory on this rank's device, with `weights` or random ones; equal on all ranks."""
    model.place(ranks.device)
    if not weights:
        model.initialise(config.seed)
    elif ranks.is_main:  # only rank 0 has the tensors
        load_into(model, weights, config.finetune_from_ckp_file)
    if adapter:
        draw(model, config.seed, config.lora_init)
        if adapter.tensors:  # rank 0 alone has them
            load_into(model, LoadedWeights(adapter.tensors), config.finetune_from_ckp_file)
    broadcast(ranks, model.flat.weights)
    return model


def start_kernels(ranks, config, model):
    """Futures of threads that compile the kernels of network and update, or load them where they were compiled before.

    `model` may be without memory. What fails there fails again, with its message, where the kernel is needed.
    """
    works = update_works(model.flat, update_options(config), ranks.device)
    if has_kernels(ranks.device, model.compute_dtype, *model.config.kernel_sizes):
        works += family_of(model.config).kernel_works(model.config, ranks.device, config.dropout)
    if not works:
        return []
    pool = ThreadPoolExecutor(max(num_cpus() // ranks.world_size, 1))
    ready = pool.submit(_start_triton, ranks.device)
    return [pool.submit(_launch, work, ranks.device, ready) for work in works]


def _start_triton(device):
    from triton.runtime import driver  # a CPU build of torch comes without Triton

    with torch.cuda.device(device):
        driver.active.get_current_target()  # builds its driver once, which threads should not do at the same time


def _launch(work, device, ready):
    ready.result()
    with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):  # backward on this thread too
        work()


def wait_for_kernels(kernels):
    """Wait for the futures of start_kernels, without a time limit."""
    with untimed("compiling the network's kernels"):
        wait(kernels)


def compute_dtype(mixed_precision, device):
    """bfloat16 if `mixed_precision` is bf16, or if it is auto and the GPU supports it natively; else float32."""
    is_native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if mixed_precision == "bf16" or (mixed_precision == "auto" and is_native) else torch.float32
