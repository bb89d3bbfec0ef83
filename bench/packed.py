"""The memory and the speed of adapters on Qwens in four bits: steps of 2 x 2,048 tokens, rank 32 on all layers."""

from bench.one_step import Setting, errors
from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.commands.setup import set_memory_limit
from model.memory.plan import choose_plan
from model.nn.decoder.sizes import DecoderModelConfig
from tests.sizes import QWEN_RANK, QWEN_VOCAB_SIZE, QWENS

TINY_QWEN = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
                 num_key_value_heads=2)  # fmt: skip
QWEN_LIMITS = {"qwen1.5-7b": (11, 4096), "qwen3-4b": (8, 4096), "qwen1.5-1.8b": (4, 0)}  # GiB, tokens of a forward
QWEN_STEPS = 100
FLOORS = {"qwen1.5-7b": (7.2, 8901), "qwen3-4b": (3.9, 8149)}  # most GiB reserved, least tokens a second
FLOOR = dict(offload="optimizer", activation_offload="True", gradient_checkpointing="True")


def measure_floor(name, rehearse):
    """The least memory that an adapter on a Qwen in four bits takes, beside FLOORS."""
    most_gib, least_speed = FLOORS[name]
    values = measure_packed(name, rehearse, gpu_memory_limit_gb=most_gib + 1, **FLOOR)  # with the CUDA context
    values |= dict(floor_gib=most_gib, floor_tokens_per_second=least_speed)
    fits = values["measured_bytes"] is not None and values["measured_bytes"] <= most_gib * 2**30
    is_fast = values["tokens_per_second"] >= least_speed and abs(values["error"] or 0) <= 0.05
    return values | dict(held=rehearse or fits and is_fast)


def measure_packed(name, rehearse, **changes):
    """Predicted and measured peak of a Qwen in four bits, cut as the plan cuts it; `changes` are options."""
    sizes, tokens = (TINY_QWEN, 16) if rehearse else (QWENS[name], 1024)
    vocab_size, (limit, forward) = 1000 if rehearse else QWEN_VOCAB_SIZE, QWEN_LIMITS[name]
    options = dict(
        lora_rank=QWEN_RANK, base_precision="nf4", micro_batch_tokens=forward, compile="False", bleu_pairs=0,
        warmup_steps=0, gpu_memory_limit_gb=limit,
    )  # fmt: skip
    config = load_config("pretrain", options | changes)
    setting = Setting(config, DecoderModelConfig(**sizes, vocab_size=vocab_size), rehearse, 2, tokens)
    _, usable = set_memory_limit(setting.device, config.gpu_memory_limit_gb)
    plan = choose_plan(plan_options(config), setting.estimate, usable)
    measured, seconds = setting.run(plan, 2 if rehearse else QWEN_STEPS)
    values = dict(shape=name, rank=QWEN_RANK, recomputed_blocks=int(plan.gradient_checkpointing))
    values |= dict(
        limit_gib=config.gpu_memory_limit_gb, forward_tokens=plan.micro_batch_tokens, chunk_tokens=plan.chunk_tokens
    )
    values["tokens_per_second"] = round(4 * tokens / seconds)
    return values | errors(setting.estimate.peaks(*plan.batching)["step"], measured)
