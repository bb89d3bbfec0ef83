import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from config import LEARN_RATES, MODELS, PRESETS, TrainConfig
from model.commands.option_values import as_bool, load_config
from model.commands.options import preset_name as name_of
from model.commands.run_length import global_batch
from model.nn.registry import load_model_config
from model.nn.t5.sizes import T5ModelConfig

ROOT = Path(__file__).resolve().parents[1]
SMALL = MODELS["small"]


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError) as refusal:
        load_config("pretrain", dict(epochs="0", learnrate="1", dropout="2", optimizer="sgd", logging_steps="x"))
    assert len(str(refusal.value).splitlines()) == 6
    for word in ("epochs=0", "--learnrate", "dropout=2.0", "optimizer='sgd'", "--logging_steps=x"):
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    "text, expected",
    [("True", True), ("true", True), ("1", True), ("yes", True), (True, True)]
    + [("False", False), ("false", False), ("0", False), ("no", False), (False, False)],
)
def test_true_and_false_can_be_written_in_any_usual_way(text, expected):
    assert load_config("pretrain", dict(deterministic=text)).deterministic is expected
    assert load_config("pretrain", dict(gradient_checkpointing=text)).gradient_checkpointing == str(expected)
    assert as_bool("is_finetune", text) is expected


@pytest.mark.parametrize("name", ["train_file", "output_dir", "optimizer", "prompt_column"])
def test_a_text_option_without_a_value_is_refused(name):
    """The command-line parser passes the text "True" for such an option."""
    with pytest.raises(ValueError, match=f"--{name} has no value: write --{name}=VALUE"):
        load_config("pretrain", {name: "True"})


@pytest.mark.parametrize("name, value", [("epochs", 2**31), ("seed", 2**63), ("save_seconds", 10**30)])
def test_a_whole_number_that_would_overflow_is_refused(name, value):
    assert getattr(load_config("pretrain", {name: value - 1 if value < 10**20 else 9}), name) > 0
    with pytest.raises(ValueError, match=f"{name}={value}: must be at most"):
        load_config("pretrain", {name: value})


@pytest.mark.parametrize(
    "change",
    [dict(d_model=True), dict(d_ff=65_537), dict(num_layers=257), dict(layer_norm_epsilon=float("nan"))]
    + [dict(relative_attention_num_buckets=3), dict(relative_attention_max_distance=16), dict(vocab_size=2**20 + 1)],
)
def test_a_model_that_cannot_be_built_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        T5ModelConfig(**SMALL | change)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"d_model": 8}' + " " * 2**20, "{", "null"])
def test_a_file_that_holds_no_json_object_is_refused_as_a_model(tmp_path, text):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ValueError, match="cannot be read .*write a JSON object"):
        load_model_config(str(tmp_path / "model.json"))


def test_an_unknown_or_missing_size_of_a_model_is_refused_with_the_names_that_its_family_knows(tmp_path):
    (tmp_path / "model.json").write_text('{"d_model": 8}')
    with pytest.raises(ValueError, match="it lacks d_ff, num_heads, .*write a JSON object like"):
        load_model_config(str(tmp_path / "model.json"))
    (tmp_path / "model.json").write_text('{"d_modle": 8}')
    with pytest.raises(ValueError, match='\'d_modle\': known are d_model, d_ff, .*"family": "qwen3"'):
        load_model_config(str(tmp_path / "model.json"))


@pytest.mark.parametrize("text", ["", "2", "maybe", "None", "tru"])
def test_text_other_than_true_or_false_is_refused_for_a_boolean(text):
    with pytest.raises(ValueError, match="takes True or False"):
        load_config("pretrain", dict(deterministic=text))


@pytest.mark.parametrize(
    "name, value",
    [("epochs", "3.5"), ("epochs", "three"), ("epochs", "inf"), ("epochs", "True"), ("epochs", ""), ("seed", None)]
    + [("learn_rate", "fast"), ("learn_rate", "nan"), ("learn_rate", "inf"), ("dropout", "1e999")],
)
def test_a_value_of_the_wrong_type_is_refused(name, value):
    with pytest.raises(ValueError, match=f"--{name}=.*number"):
        load_config("pretrain", {name: value})


def test_numbers_can_be_written_in_any_usual_way():
    config = load_config("pretrain", dict(epochs="1e1", learn_rate="2e-3", max_seq_len=" 64 ", seed=7))
    assert (config.epochs, config.learn_rate, config.max_seq_len, config.seed) == (10, 2e-3, 64, 7)


def test_a_whole_number_that_a_float_cannot_hold_is_kept_exactly():
    assert load_config("pretrain", dict(seed="9007199254740993")).seed == 9007199254740993


def test_fp16_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="fp16.*T5 diverges"):
        load_config("pretrain", dict(mixed_precision="fp16"))


@pytest.mark.parametrize(
    "name, value",
    [("epochs", 0), ("max_seq_len", 7), ("max_seq_len", 65_536), ("keep_latest_n_ckp", 1), ("learn_rate", -1e-3)]
    + [
        ("warmup_steps", -2),
        ("learn_rate", 1.5),
        ("dropout", 1),
        ("dropout", -0.1),
        ("max_grad_norm", -1),
        ("ddp_timeout_s", 29),
    ]
    + [("output_dir", ""), ("model", "huge"), ("lr_schedule", "linear"), ("trainable", "encoder"), ("backend", "mpi")],
)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}[= ]"):
        load_config("pretrain", {name: value})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads_and_changes_only_the_defaults_that_it_lists(preset):
    config, default = load_config(preset, {}), TrainConfig()
    for field in fields(TrainConfig):
        expected = PRESETS[preset].get(field.name, getattr(default, field.name))
        assert getattr(config, field.name) == expected or field.name in ("optimizer", "learn_rate")
    assert (config.optimizer, config.learn_rate) == (("auto", 0) if config.finetune_from_ckp_file else ("muon", 3e-2))
    assert load_model_config(config.model).d_model > 0


def test_an_option_overrides_its_preset():
    assert load_config("sft_fast", dict(batch_size_per_gpu="3")).batch_size_per_gpu == 3


def test_the_flags_choose_the_preset():
    assert name_of() == "pretrain"
    assert name_of(is_finetune=True) == "sft"
    assert name_of(use_small_config=True) == name_of(True, True) == "sft_small"
    assert name_of(use_fast_config=True) == name_of(is_finetune=True, use_fast_config=True) == "sft_fast"
    assert name_of(use_large_config=True) == "pretrain_large"


@pytest.mark.parametrize("flags", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1)])
def test_flags_that_contradict_each_other_are_refused(flags):
    with pytest.raises(ValueError, match="contradict"):
        name_of(*map(bool, flags))


def test_the_global_batch_is_the_product_unless_it_is_given():
    config = TrainConfig(batch_size_per_gpu=20, gradient_accumulation_steps=2)
    assert [global_batch(config, world, ()) for world in (1, 2, 3)] == [40, 80, 120]
    config = TrainConfig(global_batch_size=96)
    assert [global_batch(config, world, ["global_batch_size"]) for world in (1, 2, 3)] == [96, 96, 96]


def test_a_global_batch_that_differs_from_a_typed_product_is_refused():
    config = TrainConfig(global_batch_size=96, batch_size_per_gpu=20, gradient_accumulation_steps=2)
    named = ["global_batch_size", "batch_size_per_gpu", "gradient_accumulation_steps"]
    with pytest.raises(ValueError, match="global_batch_size=96 contradicts .* = 80"):
        global_batch(config, 2, named)
    assert global_batch(config, 2, named[:2]) == 96
    assert global_batch(TrainConfig(global_batch_size=64), 1, named) == 64


@pytest.mark.parametrize(
    "optimizer, scratch, finetuning",
    [("muon", 3e-2, 1.5e-2), ("adamw_rms", 2e-2, 5e-3), ("adamw", 3e-4, 1e-3), ("adafactor", 2e-2, 5e-3)],
)
def test_the_default_learning_rates_of_each_optimizer_are_within_its_range(optimizer, scratch, finetuning):
    rates = [load_config(name, dict(optimizer=optimizer)).learn_rate for name in ("pretrain", "pretrain_large", "sft")]
    assert rates == [scratch, scratch, finetuning]
    assert load_config("pretrain", dict(optimizer=optimizer, finetune_from_ckp_file="best")).learn_rate == finetuning
    assert load_config("sft", dict(optimizer=optimizer, learn_rate="0")).learn_rate == finetuning
    *_, least, most = LEARN_RATES[optimizer]
    assert all(least < rate < most for rate in (finetuning, scratch))


def test_the_default_batch_size_is_set_in_one_line_that_people_can_edit():
    lines = [line for line in (ROOT / "config.py").read_text().splitlines() if "batch_size_per_gpu" in line]
    (default,) = [int(n) for line in lines for n in re.findall(r"^\s+batch_size_per_gpu: int = (\d+)", line)]
    assert default == TrainConfig().batch_size_per_gpu


def test_a_model_can_be_a_json_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SMALL | dict(num_layers=2, relative_attention_num_buckets=16)))
    assert load_config("pretrain", dict(model=str(path))).model == str(path)
    assert load_model_config(str(path)) == T5ModelConfig(
        **SMALL | dict(num_layers=2, relative_attention_num_buckets=16)
    )


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "{", '{"d_model": 512}', json.dumps(SMALL | dict(width=3)), json.dumps(SMALL | dict(d_ff="many"))]
    + [json.dumps(SMALL | dict(num_layers=0)), json.dumps(SMALL | dict(d_model=512.5)), "\udcff"],
)
def test_a_json_file_that_does_not_describe_a_model_is_refused(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="mine.json"):
        load_model_config(str(path))


def test_a_model_file_that_is_missing_is_refused():
    with pytest.raises(ValueError, match="nowhere.json"):
        load_model_config("nowhere.json")


@pytest.mark.parametrize("change", [dict(d_model=0), dict(num_heads=-1), dict(d_kv=1.5), dict(vocab_size=-1)])
def test_a_model_size_out_of_range_is_refused(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        T5ModelConfig(**SMALL | change)


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(share_state=True, optimizer="adafactor"), "share_state=True: .*not that of adafactor"),
        (dict(share_state=True, optimizer="adamw_rms"), "share_state=True: .*not that of adamw_rms"),
        (dict(share_state=True, average=0.1), "average=0.1"),
        (dict(master_dtype="bf16", optimizer="muon"), "muon does not: type --optimizer=adamw too"),
        (dict(master_dtype="bf16", optimizer="adamw", mixed_precision="no"), "contradicts mixed_precision=no"),
        (dict(activation_offload=True, gradient_checkpointing=False), "leave gradient_checkpointing=False out"),
        (dict(activation_offload=True, compile=True), "leave compile=True out"),
        (dict(offload="optimizer", optimizer="muon"), "not of muon: type --optimizer=adamw too"),
        (dict(offload="optimizer", optimizer="adamw", share_state=False), "leave share_state=False out"),
        (dict(teacher=","), "teacher=',': names nothing"),
        (dict(lora_rank=4, lora_targets=" ,"), "lora_targets=' ,': names nothing"),
    ],
)
def test_options_that_say_nothing_or_contradict_how_state_is_held_are_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        load_config("pretrain", given)
