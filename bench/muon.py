"""Muon's update alone: its milliseconds in passes and in kernels, and the singular values of both ways' directions.

    python -m bench.muon [--models small,chatlm] [--repeats 50] [--part values,timing] [--variants PATTERN]

Prints one JSON line per case. A time is the median of warm updates of the layers' matrices; the way `rest` is
RMSScaledAdamW's update of the other weights. A variant changes one choice of the kernels' way. On a CPU the kernels
need TRITON_INTERPRET=1 and the model tiny.
"""

import argparse
import json
import re
import time
from contextlib import ExitStack
from functools import partial
from statistics import median
from unittest import mock

import torch

from config import MODELS
from model.commands.option_values import load_config
from model.nn.kernels import muon as kernels
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.train import muon, orthogonal
from model.train.optim import make_optimizer

VOCAB_SIZE = {"cuda": 29_298, "cpu": 500}
WARM_UPDATES = 10
SQUARE = dict(M=128, N=128, K=64, num_warps=8)
SYMMETRIC_TILES = [
    SQUARE | dict(num_warps=4, num_stages=3),
    SQUARE | dict(num_stages=4),
    dict(M=64, N=64, K=64, num_warps=4, num_stages=4),
]
PRODUCT_TILES = [
    *SYMMETRIC_TILES[:2],
    SQUARE | dict(N=256, num_stages=3),
    SQUARE | dict(M=256, num_stages=3),
    dict(M=64, N=256, K=64, num_warps=4, num_stages=3),
]
BATCH_NUMBERS = 2**25, 2**26
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024, github.com/KellerJordan/Muon


def main():
    parser = argparse.ArgumentParser(description="Muon's update: milliseconds and singular values, by way.")
    parser.add_argument("--models", default="small,chatlm")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--part", default="values,timing")
    parser.add_argument("--variants", default="", help="pattern of the variants that are timed")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    for name in options.models.split(","):
        shape = T5ModelConfig(**MODELS[name], vocab_size=VOCAB_SIZE[device.type])
        if "values" in options.part:
            for line in all_values(shape, device):
                print(json.dumps(dict(part="values", model=name) | line), flush=True)
        if "timing" in options.part:
            for line in timings(shape, options, device):
                print(json.dumps(dict(part="timing", model=name) | line), flush=True)


def timings(shape, options, device):
    """One line per way and variant; passes and kernels are repeated at the end, which shows the drift."""
    model = TextToTextModel(shape).initialise(0).to(device)
    optimizer = make_optimizer(model, load_config("pretrain", dict(optimizer="muon")))
    rate, scale = torch.full((), 1e-6, device=device), torch.ones((), device=device)
    numbers = (rate, scale, optimizer.param_groups[0]["momentum"], 0.0)
    ways = dict(
        passes=partial(optimizer.update_in_passes, *numbers),
        kernels=partial(optimizer.update_in_kernels, *numbers),
        rest=partial(optimizer.rest.step, scale),
    )
    optimizer.param_groups[0]["lr"].copy_(rate)
    measure = partial(measured, gradients=model.flat.gradients, repeats=options.repeats)
    for name, way in ways.items():
        yield dict(way=name) | measure(way)
    variants = VARIANTS | tile_variants() | batch_variants(model, optimizer)
    for name, patches in variants.items():
        if not re.search(options.variants, name):
            continue
        yield dict(way="kernels", variant=name) | measure(partial(run_patched, patches, ways["kernels"]))
    for name in ("passes", "kernels"):
        yield dict(way=name, again=True) | measure(ways[name])


def measured(way, gradients, repeats):
    """Median, least and most milliseconds of one call on random gradients, or the error it raised; peak GiB it adds."""
    seconds = []
    try:
        for call in range(WARM_UPDATES + repeats if gradients.is_cuda else 2):
            gradients.normal_()  # the plain path overwrites them
            seconds.append(timed(way, gradients.device))
            if call == 0:
                held = held_bytes(gradients.device)
    except Exception as error:  # a tile size that the GPU has no room for
        return dict(error=f"{type(error).__name__}: {str(error)[:200]}")
    warm = sorted(1e3 * x for x in seconds[-repeats:])
    return dict(ms=round(median(warm), 3), least=round(warm[0], 3), most=round(warm[-1], 3), temporaries_gib=held)


def timed(way, device):
    """Seconds of one call; on a GPU by events, with work queued before it so that launching is not what is timed."""
    if device.type != "cuda":
        start = time.perf_counter()
        way()
        return time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(10_000_000)  # cycles, about 5 ms: the host is ahead, as it is in a run
    events[0].record()
    way()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


def held_bytes(device):
    """GiB at the peak of the last call above what is held after it."""
    if device.type != "cuda":
        return None
    return round((torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2**30, 3)


def run_patched(patches, call):
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        return call()


def whole_gram_(out, x, scales=None):
    x = x.mT if x.shape[1] > x.shape[2] else x
    return kernels.product_(out, x, x.mT, scales=None if scales is None else scales.square())


def cublas_gram_(out, x, scales=None):
    x = x.mT if x.shape[1] > x.shape[2] else x
    out.copy_(torch.bmm(x, x.mT))  # cuBLAS writes the dtype that it reads; Gram matrices have another
    return out if scales is None else out.mul_(scales.square()[:, None, None])


def whole_symmetric_product_(out, left, right, addend, alpha=1.0, beta=0.0):
    return kernels._launch(out, left, right, addend, alpha, beta, None, power=0, symmetric=False)


def cublas_symmetric_product_(out, left, right, addend, alpha=1.0, beta=0.0):
    if out.dtype != left.dtype:
        return out.copy_(torch.baddbmm(addend, left, right, alpha=alpha, beta=beta))
    return torch.baddbmm(addend, left, right, alpha=alpha, beta=beta, out=out)


def cublas_product_(out, left, right, addend=None, beta=0.0, scales=None):
    if isinstance(out, kernels.Subtraction):
        product = left.new_empty(len(left), left.shape[1], right.shape[2])
        cublas_product_(product, left, right, addend, beta, scales)
        return out.weights.addcmul_(product, out.factors[:, None, None], value=-1)
    if addend is None:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(addend, left, right, beta=beta, out=out)
    return out if scales is None else out.mul_(scales[:, None, None])


CUBLAS_PRODUCTS = [(kernels, "product_", cublas_product_)]
CUBLAS_GRAMS = [(kernels, "gram_", cublas_gram_), (kernels, "symmetric_product_", cublas_symmetric_product_)]
VARIANTS = {  # {name: (module, name of a choice, its value)}
    "no products": [(muon, "orthogonalise_", lambda _: None)],
    "long matrices as square ones": [(orthogonal, "LEAST_RATIO", float("inf"))],
    "square matrices as long ones": [(orthogonal, "LEAST_RATIO", 1)],
    "whole symmetric products": [
        (kernels, "gram_", whole_gram_),
        (kernels, "symmetric_product_", whole_symmetric_product_),
    ],
    "cuBLAS for general products": CUBLAS_PRODUCTS,
    "cuBLAS for symmetric products": CUBLAS_GRAMS,
    "cuBLAS for all products": CUBLAS_PRODUCTS + CUBLAS_GRAMS,
}


def tile_variants():
    """{name: patches} of other tile sizes than the kernels' own."""
    choices = dict(SYMMETRIC_TILES=SYMMETRIC_TILES, PRODUCT_TILES=PRODUCT_TILES)
    return {f"{key} {tiles}": [(kernels, key, tiles)] for key, sizes in choices.items() for tiles in sizes}


def batch_variants(model, optimizer):
    """{name: patches} of other numbers of matrix elements that are updated together."""
    variants = {}
    for numbers in BATCH_NUMBERS:
        with mock.patch.object(muon, "BATCH_NUMBERS", numbers):
            other = muon.Muon(model.flat, optimizer.param_groups[0]["lr"])
        patches = [(optimizer, "batches", other.batches), (optimizer, "groups", other.groups)]
        variants[f"batches of {numbers >> 20} M numbers: {other.batches}, {other.groups} together"] = patches
    variants["long batches one by one"] = [(optimizer, "groups", [1] * len(optimizer.batches))]
    return variants


def all_values(shape, device):
    """One line per shape of matrix, spectrum and way: its error and singular values beside exact arithmetic's."""
    generator = torch.Generator().manual_seed(0)
    narrow, wide = shape.d_model, shape.d_ff
    for rows, columns in ((narrow, narrow), (wide, narrow), (narrow, wide)):
        for name, matrix in matrices(rows, columns, generator).items():
            for way, line in values_by_way(matrix[None].to(device)):
                yield dict(shape=[rows, columns], matrix=name, way=way) | line


def values_by_way(batch):
    """(way, statistics) of the direction that each way gives a batch of one matrix."""
    exactly = partial(orthogonal.orthogonal, batch.cpu().double())
    exact, norms = exactly()[0], 1 / batch.norm(dim=(1, 2))
    compute = torch.bfloat16 if batch.is_cuda else batch.dtype

    def in_kernels():
        return orthogonal.orthogonalise_([(batch.to(compute, copy=True), norms, None)])[0]

    ways = dict(passes=partial(orthogonal.orthogonal, batch), kernels=in_kernels)
    ways["five steps of Jordan et al., exact"] = partial(run_patched, [(orthogonal, "COEFFICIENTS", JORDAN)], exactly)
    return [(way, statistics_of(direction()[0], exact)) for way, direction in ways.items()]


def matrices(rows, columns, generator):
    """{name: (rows, columns)}: random, ill-conditioned, of low rank, and like a gradient's."""
    rank = min(rows, columns)

    def randn(*sizes):
        return torch.randn(*sizes, generator=generator)

    left, _, right = torch.linalg.svd(randn(rows, columns), full_matrices=False)
    tokens, errors = randn(4 * rank, columns) * torch.logspace(0, -2, columns), randn(4 * rank, rows)
    return {
        "random": randn(rows, columns),
        "condition 1e4": left * torch.logspace(0, -4, rank) @ right,
        "spectrum 1/k": left * (1 / torch.arange(1, rank + 1)) @ right,
        "rank 16": randn(rows, 16) @ randn(16, columns),
        "rank 1": randn(rows, 1) @ randn(1, columns),
        "like a gradient": (errors * torch.logspace(0, -2, 4 * rank)[:, None]).T @ tokens,  # a sum over tokens
    }


def statistics_of(direction, exact):
    values, expected = torch.linalg.svdvals(direction.float()).cpu(), torch.linalg.svdvals(exact).float()
    quantiles = torch.quantile(values, torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])).tolist()
    error = (direction.cpu().double() - exact).norm() / exact.norm()
    return dict(
        error=round(error.item(), 4),
        mean_difference=round((values - expected).abs().mean().item(), 4),
        quantiles=[round(x, 4) for x in quantiles],
    )


if __name__ == "__main__":
    main()
