"""Train Qwens with random weights in four bits, and compare their peak of memory with the plan's.

    python -m bench.nf4 [--models qwen1.5-7b,qwen3-4b,qwen1.5-1.8b]     on one GPU, about 3 minutes
    python -m bench.nf4 --rehearse                                      on the CPU, with a tiny Qwen

Each takes 100 steps of 2 x 2,048 tokens, rank 32 on all layers, under its limit of 11, 8 and 4 GiB, the first two in
one forward. Prints one JSON line for each.
"""

import argparse
import json
import sys

from bench.lora import Setting, errors
from config import load_config
from model.commands.recipe import plan_options
from model.commands.setup import set_memory_limit
from model.memory.plan import choose_plan
from model.nn.decoder.sizes import DecoderModelConfig

QWENS = {  # the published sizes of Qwen1.5-7B, Qwen3-4B and Qwen1.5-1.8B
    "qwen1.5-7b": dict(hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32),
    "qwen3-4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                     num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, model_type="qwen3"),
    "qwen1.5-1.8b": dict(hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16),
}  # fmt: skip
TINY_QWEN = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
                 num_key_value_heads=2)  # fmt: skip
QWEN_LIMITS = {"qwen1.5-7b": (11, 4096), "qwen3-4b": (8, 4096), "qwen1.5-1.8b": (4, 0)}  # GiB, tokens of a forward
QWEN_VOCAB_SIZE, QWEN_RANK, QWEN_STEPS = 151_936, 32, 100


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(QWENS))
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    for name in options.models.split(","):
        print(json.dumps(measure_packed(name, options.rehearse)), flush=True)


def measure_packed(name, rehearse):
    """The same for a Qwen in four bits, cut as the plan cuts it."""
    sizes, tokens = (TINY_QWEN, 16) if rehearse else (QWENS[name], 1024)
    vocab_size, (limit, forward) = 1000 if rehearse else QWEN_VOCAB_SIZE, QWEN_LIMITS[name]
    options = dict(
        lora_rank=QWEN_RANK, base_precision="nf4", micro_batch_tokens=forward, compile="False", bleu_pairs=0,
        warmup_steps=0, gpu_memory_limit_gb=limit,
    )  # fmt: skip
    config = load_config("pretrain", options)
    setting = Setting(config, DecoderModelConfig(**sizes, vocab_size=vocab_size), rehearse, 2, tokens)
    _, usable = set_memory_limit(config, setting.device)
    plan = choose_plan(plan_options(config), setting.estimate, usable)
    measured, seconds = setting.run(plan, 2 if rehearse else QWEN_STEPS)
    values = dict(shape=name, rank=QWEN_RANK, recomputed_blocks=int(plan.gradient_checkpointing))
    values |= dict(
        limit_gib=limit,
        forward_tokens=plan.micro_batch_tokens,
        chunk_tokens=plan.chunk_tokens,
        tokens_per_second=round(4 * tokens / seconds),
    )
    return values | errors(setting.estimate.peaks(*plan.cutting)["step"], measured)


if __name__ == "__main__":
    sys.exit(main())
