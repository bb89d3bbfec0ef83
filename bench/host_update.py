"""Milliseconds of an update of AdamW's masters and state in host memory, and of its parts alone.

    python -m bench.host_update [--master_dtype bf16]     a Qwen3-1.7B with random weights, on one GPU
    python -m bench.host_update --rehearse                on the CPU, a tiny one

Prints a JSON line: the whole update, its transfers both ways without the computation, and that without transfers.
"""

import argparse
import json
import time

import torch

from bench.whole_networks import QWEN_1_7B, TINY_QWEN
from model.nn.registry import config_from, family_of
from model.train.optim import make_optimizer
from tests.parts import make_config
from tests.sizes import QWEN_VOCAB_SIZE


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--master_dtype", default="float32", choices=("float32", "bf16"))
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    device = torch.device("cpu" if given.rehearse else "cuda")
    sizes = QWEN_1_7B | dict(vocab_size=QWEN_VOCAB_SIZE) | (TINY_QWEN if given.rehearse else {})
    sizes = config_from(sizes | dict(family=sizes.pop("model_type")))
    with torch.device("meta"):
        model = family_of(sizes).build(sizes, 0.0, torch.bfloat16)
    model.place(device, True)
    options = dict(optimizer="adamw", offload="optimizer", mixed_precision="bf16", master_dtype=given.master_dtype)
    optimizer = make_optimizer(model, make_config(**options))
    values = dict(master_dtype=given.master_dtype, weights=len(model.flat.gradients))
    values |= dict(update_ms=update_ms(optimizer, device))
    computation, optimizer.update_part = optimizer.update_part, lambda *_: None
    values |= dict(transfers_ms=update_ms(optimizer, device))
    optimizer.update_part, optimizer.fetch, optimizer.give_back = computation, lambda *_: None, lambda *_: None
    print(json.dumps(values | dict(computation_ms=update_ms(optimizer, device))))


def update_ms(optimizer, device):
    """Of the second of two updates."""
    for _ in range(2):
        started = time.perf_counter()
        optimizer.update(1e-4, torch.ones((), device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return round(1e3 * (time.perf_counter() - started), 1)


if __name__ == "__main__":
    main()
