"""Predicts how long a step takes on a GPU that is known by its data sheet, here or elsewhere.

    seconds = BASE_SECONDS + weights trained x UPDATE_BYTES / bandwidth + products / (EFFICIENCY x peak)

The three constants are fitted to steps of 64 to 1,024 pairs of small and chatlm with Muon (docs/benchmarks.md): those
on an H100 come out within 8 %, those on an H200 within 10 %. Other cards are taken by their data sheets alone.
"""

import re
from dataclasses import dataclass

from model.memory.step_time import step_tokens
from model.nn.memory_spec import count_numbers

BASE_SECONDS = 2.7e-3
UPDATE_BYTES = 140  # moved for a weight, Muon's products counted as bytes
EFFICIENCY = 0.42  # of the peak, that a step of many tokens reaches


@dataclass(frozen=True)
class Gpu:
    """What a data sheet says of a card."""

    tflops: float  # of bf16 products that are added up in float32, dense
    terabytes: float  # a second
    gib: float  # that torch sees


GPUS = {
    "H200": Gpu(989, 4.8, 139.8),
    "H100 PCIe": Gpu(756, 2.0, 79.1),
    "H100": Gpu(989, 3.35, 79.1),
    "A100": Gpu(312, 1.56, 39.4),
    "L40S": Gpu(362, 0.86, 44.4),
    "L4": Gpu(121, 0.3, 22.0),
    "A10": Gpu(125, 0.6, 22.1),
    "A6000": Gpu(155, 0.77, 47.4),
    "RTX 5090": Gpu(210, 1.79, 31.4),
    "RTX 4090": Gpu(165, 1.01, 23.5),
    "RTX 3090": Gpu(71, 0.94, 23.6),
}


def gpu_named(name):
    """(key, Gpu) of the card that `name` contains, as torch or people write it; None if it is not in the table."""
    if re.search(r"laptop|max-q|\bti\b|super", name, re.IGNORECASE):
        return None
    return next(((key, gpu) for key, gpu in GPUS.items() if re.search(rf"\b{key}\b", name, re.IGNORECASE)), None)


def step_seconds(plan, estimate, gpu):
    """Expected seconds of a step with `plan` on a Gpu; None where it does not compute in bf16 with the kernels."""
    spec = estimate.spec
    if spec.number_bytes != 2:
        return None
    flops = _token_flops(spec, estimate.lengths, 4 if spec.lora else 6)
    flops += sum(_token_flops(teacher, estimate.lengths, 2) for teacher in spec.teachers)
    products = step_tokens(plan, estimate) * flops
    updated = spec.own_part.numbers if spec.own_part else spec.trained
    update_bytes = 0 if spec.offloads else updated * UPDATE_BYTES
    return BASE_SECONDS + update_bytes / (gpu.terabytes * 1e12) + products / (EFFICIENCY * gpu.tflops * 1e12)


def _token_flops(spec, lengths, per_weight):
    """Floating-point operations of the products of a token, `per_weight` that it passes, on average over columns."""
    family, config = spec.family, spec.model_config
    matrices = count_numbers(family, config).matrices
    per_column = (lengths.tokens * lengths.counts[:, None]).sum(axis=0) / lengths.counts.sum()
    targets = per_column[-1]
    if family.reads_one_stream:
        passed = matrices * lengths.mean
    else:
        decoder = count_numbers(family, config, "decoder").matrices
        passed = (matrices - decoder) * per_column[:-1].sum() + decoder * targets
    passed += config.vocab_size * config.width * targets
    return per_weight * passed / lengths.mean
