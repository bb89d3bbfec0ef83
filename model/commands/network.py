"""Makes the network of a run on this rank's device, in the way that the options ask for its numbers."""

from concurrent.futures import ThreadPoolExecutor

import torch

from model.formats.weights import LoadedWeights, load_into
from model.nn.lora import attach, draw
from model.runtime.cgroup import num_cpus
from model.runtime.distributed import broadcast
from model.train.optim import update_works


def draft_model(recipe):
    """The network of a Recipe without memory; with an adapter, only that is trained."""
    spec = recipe.spec
    with torch.device("meta"):
        model = spec.family.build(spec.model_config, recipe.config.dropout, recipe.dtype).freeze_all_but(spec.part)
        if spec.lora:
            attach(model, spec.lora)
    return model


def fill_model(ranks, model, recipe, origin):
    """Give a model of draft_model memory on this rank's device, with the weights of its Origin or random ones.

    They are equal on all ranks.
    """
    seed, source = recipe.config.seed, recipe.config.finetune_from_ckp_file
    is_shared = recipe.update.share_state and ranks.world_size > 1
    model.offloads_inputs = recipe.spec.offloads_inputs
    model.place(ranks.device, is_shared or recipe.spec.offloads, will_round=not recipe.spec.has_masters)
    if not origin.weights:
        model.initialise(seed)
    elif ranks.is_main:  # only rank 0 has the tensors
        load_into(model, origin.weights, source)
    if origin.adapter:
        draw(model, seed, recipe.config.lora_init)
        if origin.adapter.tensors:  # rank 0 alone has them
            load_into(model, LoadedWeights(origin.adapter.tensors), source)
    broadcast(ranks, model.flat.weights)
    return model


def refill_model(ranks, model, origin, source):
    """Give a model that has memory the weights of its Origin, read from the path `source`, once more."""
    if ranks.is_main:
        load_into(model, origin.weights, source)
    broadcast(ranks, model.flat.weights)


def start_kernels(ranks, model, recipe):
    """Futures of threads that compile the kernels of network and update, or load them where they were compiled before.

    `model` may be without memory. What fails there fails again, with its message, where the kernel is needed.
    """
    works = update_works(model.flat, recipe.update, ranks.device)
    if recipe.spec.kernels:
        works += recipe.family.kernel_works(model.config, ranks.device, recipe.config.dropout)
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
