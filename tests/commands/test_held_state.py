"""How the plan holds weights and state: whole, shared among ranks, in host memory, in bf16."""

import json

import pytest

from model.commands.option_values import load_config
from model.commands.plan_report import preview
from model.commands.plan_table import table
from model.memory.plan import USABLE, NothingFits
from model.runtime.device_memory import CONTEXT_BYTES

GIB = 2**30
QWEN = dict(
    family="qwen3", hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip


def plan(num_processes, vocab_size, **options):
    return preview(load_config("pretrain", options), options, num_processes, vocab_size)


def test_ranks_share_state_where_a_model_fits_in_no_other_way(tmp_path):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    options = dict(model=str(tmp_path / "qwen.json"), max_seq_len=2048, batch_size_per_gpu=1, optimizer="adamw")

    def planned(num_processes, limit, **more):
        return plan(num_processes, 151_936, gpu_memory_limit_gb=limit, mixed_precision="bf16", **options | more)

    with pytest.raises(NothingFits):
        planned(1, 24)
    with pytest.raises(NothingFits):
        planned(2, 24, share_state="False")
    shared, whole = planned(2, 24), planned(2, 48)
    levers = {lever["value"]: lever for lever in shared["levers"] if lever["kind"] == "share_state"}
    assert levers["True"]["fits"] and not levers["False"]["fits"]
    held, all_held = (sum(values["fixed_bytes"].values()) for values in (shared, whole))
    assert 0.6 * all_held < held < 0.7 * all_held, "half of 12 of 18 bytes a weight"


def test_the_plan_takes_the_way_to_hold_state_that_costs_least_of_those_that_it_may_choose(tmp_path):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    options = dict(model=str(tmp_path / "qwen.json"), max_seq_len=2048, batch_size_per_gpu=1, optimizer="adamw")

    def held(num_processes, limit, **more):
        more |= options | dict(gpu_memory_limit_gb=limit, mixed_precision="bf16")
        fixed = plan(num_processes, 151_936, **more)["fixed_bytes"]
        return [round(fixed[part] / GIB, 1) for part in ("weights", "optimizer")]

    auto = dict(offload="auto", master_dtype="auto")
    assert held(1, 40, **auto) == [6.4, 12.8]
    assert held(1, 24, **auto) == [0, 0], "in host memory, where bf16 alone would not do"
    assert held(1, 27, master_dtype="auto") == [0, 12.8]
    assert held(2, 24, **auto) == [3.2, 6.4], "shared"
    assert held(2, 16, **auto) == [0, 0]
    small = plan(2, 40_960, model="small", gpu_memory_limit_gb=6, **auto)
    assert small["fixed_bytes"]["weights"] == 4 * small["parameters"]


def test_inputs_of_recomputed_blocks_are_offloaded_by_themselves_where_recomputing_all_is_not_enough(tmp_path):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    options = dict(model=str(tmp_path / "qwen.json"), max_seq_len=8000, batch_size_per_gpu=1, lora_rank=16)
    options |= dict(base_precision="nf4", mixed_precision="bf16", bleu_pairs=0, gradient_accumulation_steps=1)

    def planned(limit, **more):
        return plan(1, 151_936, gpu_memory_limit_gb=limit, **options | more)

    levers = {lever["value"]: lever for lever in planned(40)["levers"] if lever["kind"] == "activation_offload"}
    inputs = 28 * 2048 * 2 * 8001
    assert levers[False]["peak_bytes"] - levers[True]["peak_bytes"] == pytest.approx(1.02 * inputs * 26 / 28, rel=1e-3)
    assert levers[False]["time_factor"] <= levers[True]["time_factor"] <= 1.35
    between = 1.02 * levers[True]["peak_bytes"] / GIB / USABLE + CONTEXT_BYTES / GIB
    values = planned(between)
    assert values["plan"]["gradient_checkpointing"] and values["host"]["input_bytes"] and not values["plan"]["graphs"]
    assert "wait in" in table(values)
    assert not planned(40)["host"]["input_bytes"]
    forced = planned(40, activation_offload="True", gradient_checkpointing="True")["host"]["input_bytes"]
    assert forced == 28 * 2**25, "of 32 MiB each"
    least = sum(planned(between)["fixed_bytes"].values())
    moved = planned(between - 0.2, offload="auto")
    assert moved["host"]["input_bytes"] and moved["fixed_bytes"]["optimizer"] == 0, "both, where one is not enough"
    assert least - sum(moved["fixed_bytes"].values()) == 12 * moved["trained"], "masters, and two averages"
    for refused in (dict(activation_offload="False"), dict(gradient_checkpointing="False"), dict(compile="True")):
        with pytest.raises(NothingFits):
            planned(between, **refused)
