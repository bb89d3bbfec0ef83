"""Flags of LoRA guides become options of a run, or are refused with what to type."""

import shlex

import pytest

from model.commands.guide_flags import VALUES, read_guide
from model.commands.option_names import NEEDLESS, OWN_NAMES
from model.commands.option_values import load_config
from model.commands.scripts_zh import NEEDLESS_ZH
from tests.english import english_of

SCHEMES = """\
--model_name_or_path MODEL --data_path DATA --output_dir ./output --use_4bit --bf16 --num_train_epochs 3
--per_device_train_batch_size {batch} --gradient_accumulation_steps {steps} --learning_rate 2e-4 --lora_rank {rank}
--lora_alpha {alpha} --save_steps 500 --max_seq_length {length} --logging_steps 10 --dataloader_num_workers {workers}
"""
CAREFUL = dict(batch=1, steps=16, rank=32, alpha=64, length=1024, workers=2)
SMALLEST = dict(batch=1, steps=32, rank=16, alpha=32, length=512, workers=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with a model and a folder of data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").mkdir()
    (tmp_path / "DATA").mkdir()
    (tmp_path / "DATA" / "train.json").write_text("[]")
    return tmp_path


def read(words, given="--model_name_or_path MODEL --data_path DATA "):
    return read_guide(shlex.split(given + words))


def problems(words, **given):
    with pytest.raises(ValueError) as refusal:
        read(words, **given)
    return str(refusal.value)


@pytest.mark.parametrize("scheme", [CAREFUL, SMALLEST])
def test_each_flag_of_a_scheme_is_used_and_told_in_one_line(folder, scheme, monkeypatch):
    options, told = read(SCHEMES.format(**scheme), given="")
    monkeypatch.setenv("CHAT_LANG", "zh")
    assert not english_of("\n".join(read(SCHEMES.format(**scheme), given="")[1]))
    assert NEEDLESS_ZH.keys() == set(NEEDLESS.values())
    assert options == dict(
        finetune_from_ckp_file="MODEL", train_file="DATA", output_dir="./output", base_precision="nf4",
        mixed_precision="bf16", epochs="3", batch_size_per_gpu="1",
        gradient_accumulation_steps=str(scheme["steps"]), learn_rate="2e-4", lora_rank=str(scheme["rank"]),
        lora_alpha=str(scheme["alpha"]), save_steps="500", max_seq_len=str(scheme["length"]), logging_steps="10",
        validation_file="", is_keep_training="auto",
    )  # fmt: skip
    assert len(told) == 15 + 2 and not any("\n" in line for line in told)
    assert "--dataloader_num_workers" in told[14] and "nothing to set here" in told[14]
    assert told[3] == "--use_4bit: base_precision=nf4"


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--optim paged_adamw_8bit", dict(optimizer="adamw")),
        ("--optim=adafactor --learning_rate 1e-2", dict(optimizer="adafactor")),
        ("--lora_target_modules q_proj v_proj", dict(lora_targets="q_proj,v_proj")),
        ("--target_modules q_proj v_proj --r 4 --bias none --modules_to_save []", dict(lora_rank="4")),
        ("--lora_target_modules all-linear --lora-r 8", dict(lora_targets="", lora_rank="8")),
        ("--use_4bit False --bf16 False", dict(base_precision="auto", mixed_precision="no")),
        ("--save_total_limit 1", dict(keep_latest_n_ckp="2")),
        ("--resume_from_checkpoint", dict(is_keep_training="True")),
        ("--overwrite_output_dir", dict(overwrite="True")),
        ("--gradient_checkpointing --max_grad_norm 1.0", dict(gradient_checkpointing="True", max_grad_norm="1.0")),
        ("--fp16 False --evaluation_strategy no", dict(validation_file="")),
        ("--max_steps 100 --report_to none", dict(max_steps="100", tracker="")),
        ("--init_lora_weights gaussian --fp16_full_eval --use_dora False", dict(lora_init="gaussian")),
        ("--gpu_memory_limit_gb=12 --seed 1", dict(gpu_memory_limit_gb="12", seed="1")),
    ],
)
def test_other_flags_and_own_options_are_taken_too(folder, words, expected):
    options, _ = read(words)
    assert options.items() >= expected.items() and options.get("is_keep_training") != "False"


def test_all_problems_are_named_at_once_with_what_to_type(folder):
    text = problems(
        "--lora_rnk 3 --fp16 --zero_stage 3 --lora_alpha x --torch_dtype bfloat16 --bf16 False --epochs 2 3 -v"
    )
    for part in (
        "unknown option --lora_rnk: did you mean --lora_rank?", "--fp16: type --bf16", "--zero_stage: GPUs share",
        "--lora_alpha=x: this option takes a number", "--bf16 False is --mixed_precision=no, and another flag",
        "--epochs 2 3: give it one value", "cannot read '-v'",
    ):  # fmt: skip
        assert part in text, text
    assert len(text.splitlines()) == 1 + 7
    text = problems("--use_dora")
    assert "--use_dora: DoRA is not supported: leave it out for LoRA, or type --use_rslora" in text
    text = problems("--load_in_8bit --qlora --num_train_epochs x")
    assert "--num_train_epochs=x: this option takes" in text
    assert "--load_in_8bit: the base is held in four bits with --use_4bit" in text and text.count("--use_4bit") == 2
    assert "--base_precision" not in text, "no option of another command"


def test_a_missing_model_or_data_is_named_with_its_flag(folder):
    text = problems("", given="--output_dir x")
    assert "--model_name_or_path is missing" in text and "--data_path is missing" in text
    text = problems("", given=f"--model_id {'a' * 250}/b --data_path {'a' * 250}/b")  # no names of a hub
    assert "--model_id aaa" in text and "--data_path aaa" in text and text.count("no such file or") == 2
    assert "--train_file nothing.json: no such file" in problems("--train_file nothing.json", given="--model_id MODEL ")


def test_files_of_a_folder_that_are_named_for_validation_or_test_are_not_trained_on(folder):
    for name in ("dev.jsonl", "my_test.json", "latest.json"):
        (folder / "DATA" / name).write_text("[]")
    options, told = read("")
    assert options["train_file"] == "DATA/latest.json,DATA/train.json"
    assert (options["validation_file"], options["test_file"]) == ("DATA/dev.jsonl", "DATA/my_test.json")
    assert any("DATA/dev.jsonl, not trained on" in line for line in told)


def test_every_value_stands_for_an_option_that_can_be_loaded():
    for known, _ in VALUES.values():
        for option in filter(None, known.values()):
            name, value = option.split("=")
            if name not in ("is_keep_training", "overwrite"):
                load_config("pretrain", dict(lora_rank=1) | {name: value})
    assert all(name in OWN_NAMES or known for name, (known, _) in VALUES.items())
