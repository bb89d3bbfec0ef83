"""Options by the names that they have elsewhere, as a command line answers them."""

import re
from dataclasses import fields

import pytest

from config import FLAGS, TrainConfig
from model.commands.option_names import MISSING_OPTIONS, OTHER_NAMES, OWN_NAMES
from model.commands.options import parse_options


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("learn_rat", "learn_rate"),
        ("batch_size_gpu", "batch_size_per_gpu"),
        ("save_step", "save_steps"),
        ("is_fine_tune", "is_finetune"),
        ("batch_size", "batch_size_per_gpu"),
        ("lr", "learn_rate"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_name(typed, meant):
    with pytest.raises(ValueError, match=f"unknown option --{typed}: did you mean --{meant}\\?"):
        parse_options((), {typed: "1"})


@pytest.mark.parametrize(
    "typed, meant",
    [("num_train_epochs", "epochs"), ("bf16", "mixed_precision=bf16"), ("data_path", "train_file")]
    + [("resume_from_checkpoint", "is_keep_training=True"), ("train_data", "train_file"), ("max_length", "max_seq_len")]
    + [("per_device_train_batch_size", "batch_size_per_gpu"), ("model_name_or_path", "finetune_from_ckp_file")],
)
def test_a_name_from_elsewhere_is_answered_with_ours(typed, meant):
    with pytest.raises(ValueError, match=f"unknown option --{typed}: did you mean --{meant}\\?"):
        parse_options((), {typed: "1"})


@pytest.mark.parametrize(
    "typed, instead",
    [("deepspeed", "--gpu_memory_limit_gb=G"), ("fsdp_config", "--optimizer=adafactor"), ("zero_stage", "`plan`")]
    + [("max_steps", "--epochs=N"), ("lora_rank", "--trainable=decoder"), ("warmup_ratio", "--warmup_steps=N")]
    + [("per_device_eval_batch_size", "leave it out"), ("report_to", "metrics.jsonl"), ("num_gpus", "launcher")],
)
def test_what_there_is_not_is_answered_with_what_to_do_instead(typed, instead):
    with pytest.raises(ValueError, match=f"unknown option --{typed}: ") as refusal:
        parse_options((), {typed: "1"})
    assert instead in str(refusal.value) and "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("typed", ["depth", "key", "search", "stats", "smart", "train", "step_size", "mu", "top_k"])
def test_a_name_like_none_of_ours_is_answered_with_none(typed):
    with pytest.raises(ValueError, match=f"--{typed}; --help shows all options$"):
        parse_options((), {typed: "1"})


def test_what_is_told_of_other_names_can_be_typed():
    known = {f.name for f in fields(TrainConfig)} | set(FLAGS)
    assert not known & OWN_NAMES.keys() and not any(
        re.fullmatch(pattern, name) for pattern in MISSING_OPTIONS for name in known
    )
    told = [*OTHER_NAMES, *re.findall(r"--(\w+=?)", " ".join(MISSING_OPTIONS.values()))]
    assert {name.split("=")[0] for name in told} <= known | {"vocab_size", "validation_share"}
