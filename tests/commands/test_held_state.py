"""How the plan holds weights and state: whole, shared among ranks, in host memory, in bf16."""

import json
import re

import pytest

from model.commands import plan_report
from model.commands.machine import Machine
from model.commands.option_values import load_config
from model.commands.plan_report import planned_recipe, preview
from model.commands.plan_table import table
from model.commands.recipe import _ways, with_config
from model.memory.plan import USABLE, NothingFits
from model.memory.transfers import ASSUMED, transfer_seconds
from model.runtime.device_memory import CONTEXT_BYTES
from tests.sizes import QWENS

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
    assert held(1, 24, **auto) == [0, 0], "in host memory: fewer bits come last"
    assert held(1, 24, master_dtype="auto") == [0, 12.8]
    assert held(1, 24, share_state="False", **auto) == [0, 12.8], "what is not shared is not offloaded"
    assert held(2, 24, **auto) == [3.2, 6.4], "shared"
    assert held(2, 16, **auto) == [0, 0]
    small = plan(2, 40_960, model="small", gpu_memory_limit_gb=6, **auto)
    assert small["fixed_bytes"]["weights"] == 4 * small["parameters"]


def test_all_weights_of_a_qwen_of_1_7b_fit_two_three_or_one_small_cards(tmp_path):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    options = dict(model=str(tmp_path / "qwen.json"), max_seq_len=2048, batch_size_per_gpu=1, optimizer="adamw")
    bf16, host = dict(master_dtype="bf16"), dict(offload="optimizer")
    for num_processes, limit, most, more in (
        (2, 23.5, 21, {}), (2, 18, 18, bf16), (3, 15, 15, bf16), (1, 16, 16, host), (1, 12, 12, host | bf16),
        (1, 9, 8, host | bf16),
    ):  # fmt: skip
        held = more | options | dict(gpu_memory_limit_gb=limit, mixed_precision="bf16")
        values = plan(num_processes, 151_936, **held)
        assert values["phases"]["step"] <= most * GIB, more
        gradients = 2 if "master_dtype" in more else 4
        assert values["fixed_bytes"]["gradients"] == gradients * values["parameters"]


def test_all_weights_of_a_qwen_of_4b_fit_one_card_of_24_gb_or_eight(tmp_path):
    sizes = QWENS["qwen3-4b"] | dict(family="qwen3")
    del sizes["model_type"]
    (tmp_path / "qwen.json").write_text(json.dumps(sizes))
    options = dict(model=str(tmp_path / "qwen.json"), max_seq_len=2048, batch_size_per_gpu=1, optimizer="adamw")
    options |= dict(master_dtype="bf16", mixed_precision="bf16", gpu_memory_limit_gb=23.5)
    for num_processes, more in ((1, dict(offload="optimizer")), (8, dict(share_state="True"))):
        phases = plan(num_processes, 151_936, **options | more)["phases"]
        assert phases["load"] < 16 * GIB < phases["step"] < 22 * GIB
    both, only = (
        "type --offload=optimizer and --master_dtype=bf16 with AdamW, or --opt",
        "8), type --optimizer=adafactor,",
    )
    for more, named in (
        (dict(master_dtype="float32"), both),
        (dict(offload="optimizer", gpu_memory_limit_gb=12), only),
    ):
        with pytest.raises(NothingFits, match=re.escape(named)):
            plan(1, 151_936, **options | more)


def test_each_lever_says_its_memory_and_its_time_with_what_is_sent_over_links_that_are_said(tmp_path, monkeypatch):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    options = dict(model=str(tmp_path / "qwen.json"), max_seq_len=2048, batch_size_per_gpu=1, optimizer="adamw")
    config = load_config("pretrain", options | dict(gpu_memory_limit_gb=24, mixed_precision="bf16"))
    values = preview(config, options, 2, 151_936, "RTX 4090")
    rows = {(lever["kind"], lever["value"]): lever for lever in values["levers"]}
    shared, host, rounded = rows["share_state", "True"], rows["offload", "optimizer"], rows["master_dtype", "bf16"]
    assert shared["time_factor"] == 1 and shared["peak_bytes"] < rows["share_state", "False"]["peak_bytes"]
    assert host["time_factor"] > 1.3 > 1 > rounded["time_factor"] > 0.5
    assert host["peak_bytes"] < rounded["peak_bytes"] < shared["peak_bytes"]
    # half of 4 bytes a gradient and of 2 a weight over 10 GB/s
    assert shared["sent_seconds"] == pytest.approx(3 * values["trained"] / 10e9)
    assert "20 GB/s to host memory (assumed), 10 GB/s between GPUs (assumed)" in table(values)
    assert f"{1000 * host['sent_seconds']:,.0f} ms of a step are transfers" in table(values)
    monkeypatch.setattr(plan_report, "measured_links", lambda: dict(host=50e9))
    unknown = preview(config, options, 2, 151_936)
    assert {lever["time_factor"] for lever in unknown["levers"] if lever["kind"] == "offload"} == {1}
    assert "50 GB/s to host memory (measured), 10 GB/s between GPUs (assumed)" in table(unknown)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_ways_to_hold_state_are_tried_by_what_they_send_and_fewer_bits_last(tmp_path, num_processes):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    options = dict(model=str(tmp_path / "qwen.json"), optimizer="adamw", offload="auto", master_dtype="auto")
    config, machine = load_config("pretrain", options), Machine(num_processes, "cuda", True)
    recipe, _ = planned_recipe(config, options, machine, 151_936)
    ways = [with_config(recipe, config).spec for config in _ways(recipe) if config.activation_offload == "auto"]
    assert [(spec.own_part is not None, spec.offloads, spec.has_masters) for spec in ways] == [
        (False, False, True), *[(True, False, True)] * (num_processes > 1), (num_processes > 1, True, True),
        (num_processes > 1, False, False), (num_processes > 1, True, False),
    ]  # fmt: skip
    for masters in (True, False):
        moved = [spec for spec in ways if spec.has_masters == masters and (spec.own_part or num_processes == 1)]
        seconds = [transfer_seconds(spec, ASSUMED, False) for spec in moved]
        assert seconds == sorted(seconds) and seconds[0] < 0.6 < seconds[-1]


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
