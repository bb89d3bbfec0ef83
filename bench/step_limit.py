"""What a step would take if each group of its kernels ran at the GPU's own speed: the limit beside bench.step_profile.

    python -m bench.step_limit [--models small,chatlm] [--pairs 64,256] [--tflops 800] [--terabytes 4.8]

Computed, on any machine. A product takes its FLOPs at `--tflops` or its bytes at `--terabytes` a second, whichever is
more; what passes over memory takes its bytes, each tensor read or written once. Lengths are those of bench.corpus.
Padding to a bucket, launches and tiles that are not full are not counted, so no step reaches it.
"""

import argparse

import numpy as np

from bench.corpus import VOCAB_SIZE, draw_lengths
from config import MODELS
from model.nn.memory_spec import count_numbers
from model.nn.t5.family import T5
from model.nn.t5.sizes import T5ModelConfig

# Multiply-adds of Muon's four steps, in cubes of a matrix's shorter side, symmetric products by half. Square matrices:
# 4 x (1/2 + 1/2 + 1). Those four times as long: 2 x (1/2 + 1) x 4 for two parts of steps, and ten symmetric products of
# their Gram matrices. See model/train/orthogonal.py.
SQUARE_CUBES, LONG_CUBES = 8, 17


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="small,chatlm")
    parser.add_argument("--pairs", default="64,256", help="per step")
    parser.add_argument("--tflops", type=float, default=800, help="of bf16 products, dense")
    parser.add_argument("--terabytes", type=float, default=4.8, help="of memory traffic, per second")
    options = parser.parse_args()
    lengths = draw_lengths(100_000, np.random.default_rng(0)).astype(float)
    for model in options.models.split(","):
        for pairs in map(int, options.pairs.split(",")):
            sizes = T5ModelConfig(**MODELS[model], vocab_size=VOCAB_SIZE)
            groups = limits(sizes, lengths, pairs, options.tflops * 1e9, options.terabytes * 1e9)
            line = ", ".join(f"{name} {ms:.2f}" for name, ms in groups.items())
            print(f"{model}, {pairs} pairs: {sum(groups.values()):.2f} ms: {line}")


def limits(sizes, lengths, pairs, flops_per_ms, bytes_per_ms):
    """{group: milliseconds of a step} of a T5 with Muon in bf16, under the names of bench.step_profile."""
    prompt, response = pairs * lengths.mean(axis=0)
    d, blocks = sizes.d_model, (sizes.num_layers, sizes.num_decoder_layers)
    numbers = count_numbers(T5, sizes)
    matrices, weights = numbers.matrices, numbers.weights
    norms = prompt * (2 * blocks[0] + 1) + response * (3 * blocks[1] + 1)
    passes = {  # bytes
        "cross-entropy": 4 * response * VOCAB_SIZE,  # bf16 logits in, gradient out
        "norms": 16 * d * norms,  # forward and backward: four bf16 tensors each
        "adamw's kernels": 28 * (weights - matrices) + 4 * weights,  # moments, weight, gradient; norm of the gradient
        "copies and zeros": 6 * weights,  # float32 gradients set to zero, bf16 weights written
        "embedding": 14 * d * (prompt + response),
    }
    return {
        "products": sum(
            count * max(6 * tokens * rows * columns / flops_per_ms, product_bytes(tokens, rows, columns) / bytes_per_ms)
            for count, tokens, rows, columns in products(sizes, prompt, response)
        ),
        "attention": sum(
            count * max(flops / flops_per_ms, traffic / bytes_per_ms)
            for count, flops, traffic in attentions(sizes, lengths, pairs)
        ),
        "muon's kernels": muon_flops(sizes) / flops_per_ms + 20 * matrices / bytes_per_ms,
    } | {name: traffic / bytes_per_ms for name, traffic in passes.items()}


def products(sizes, prompt, response):
    """(number, tokens, inputs, outputs) of the linear layers."""
    d, inner, f = sizes.d_model, sizes.num_heads * sizes.d_kv, sizes.d_ff
    for blocks, tokens, attentions in ((sizes.num_layers, prompt, 1), (sizes.num_decoder_layers, response, 2)):
        yield blocks, tokens, d, 3 * inner
        yield blocks * attentions, tokens, inner, d
        yield blocks, tokens, d, f
        yield blocks, tokens, f, d
    yield sizes.num_decoder_layers, response, d, inner
    yield sizes.num_decoder_layers, prompt, d, 2 * inner
    yield 1, response, d, VOCAB_SIZE


def product_bytes(tokens, rows, columns):
    """Bytes of forward and both products of backward: bf16 tensors, a float32 gradient that is added to."""
    return 3 * 2 * tokens * (rows + columns) + (2 * 2 + 8) * rows * columns


def attentions(sizes, lengths, pairs):
    """(number, FLOPs, bytes) of the attention layers: two products forward, five backward; exponentials not counted."""
    prompt, response = lengths.T
    inner = sizes.num_heads * sizes.d_kv
    for blocks, queries, keys, share in (
        (sizes.num_layers, prompt, prompt, 1),
        (sizes.num_decoder_layers, response, response, 0.5),
        (sizes.num_decoder_layers, response, prompt, 1),
    ):
        traffic = 2 * inner * (6 * queries + 6 * keys)  # forward q, k, v, out; backward these and their gradients
        yield blocks, pairs * 7 * 2 * inner * share * (queries * keys).mean(), pairs * traffic.mean()


def muon_flops(sizes):
    """FLOPs of the orthogonalisation of all matrices of a T5 whose d_ff is four times d_model."""
    square = 4 * (sizes.num_layers + 2 * sizes.num_decoder_layers)
    long = 2 * (sizes.num_layers + sizes.num_decoder_layers)
    return 2 * (SQUARE_CUBES * square + LONG_CUBES * long) * sizes.d_model**3


if __name__ == "__main__":
    main()
