"""Messages for unknown options and for the option names of other trainers."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from config import TrainConfig
from model.commands.option_names import MISSING_OPTIONS, NEEDLESS, OTHER_NAMES, OWN_NAMES, ScriptParser
from model.commands.options import FLAGS, parse_options


@pytest.mark.parametrize(
    "typed, suggested",
    [
        ("learn_rat", "learn_rate"),
        ("batch_size_gpu", "batch_size_per_gpu"),
        ("save_step", "save_steps"),
        ("is_fine_tune", "is_finetune"),
        ("batch_size", "batch_size_per_gpu"),
        ("lr", "learn_rate"),
    ],
)
def test_the_message_for_an_unknown_option_gives_the_most_similar_name(typed, suggested):
    with pytest.raises(ValueError, match=f"unknown option --{typed}: did you mean --{suggested}\\?"):
        parse_options((), {typed: "1"})


@pytest.mark.parametrize(
    "typed, suggested",
    [("num_train_epochs", "epochs"), ("bf16", "mixed_precision=bf16"), ("data_path", "train_file")]
    + [("resume_from_checkpoint", "is_keep_training=True"), ("train_data", "train_file"), ("max_length", "max_seq_len")]
    + [("per_device_train_batch_size", "batch_size_per_gpu"), ("model_name_or_path", "finetune_from_ckp_file")],
)
def test_the_message_for_a_name_of_another_trainer_gives_the_name_here(typed, suggested):
    with pytest.raises(ValueError, match=f"unknown option --{typed}: did you mean --{suggested}\\?"):
        parse_options((), {typed: "1"})


@pytest.mark.parametrize(
    "typed, instead",
    [
        ("deepspeed", "--gpu_memory_limit_gb=G"),
        ("fsdp_config", "--optimizer=adafactor"),
        ("zero_stage", "--share_state=True"),
    ]
    + [("load_in_4bit", "--lora_rank=16"), ("eval_strategy", "--validation_file= for no evaluation")]
    + [("per_device_eval_batch_size", "leave it out"), ("report_to", "metrics.jsonl"), ("num_gpus", "launcher")],
)
def test_the_message_for_a_missing_feature_says_what_to_do_instead(typed, instead):
    with pytest.raises(ValueError, match=f"unknown option --{typed}: ") as refusal:
        parse_options((), {typed: "1"})
    assert instead in str(refusal.value) and "did you mean" not in str(refusal.value)


@pytest.mark.parametrize("typed", ["depth", "key", "search", "stats", "smart", "train", "step_size", "mu", "beams"])
def test_the_message_for_an_unlike_name_suggests_no_option(typed):
    with pytest.raises(ValueError, match=f"--{typed}; --help shows all options$"):
        parse_options((), {typed: "1"})


@pytest.mark.parametrize(
    "typed, said",
    [("--ouput x", "--ouput: did you mean --output?"), ("--max-cahrs=3 --output x", "did you mean --max_chars?")]
    + [("--output x --depth", "--depth; --help shows all options"), ("--ma 3", "required: --output")]
    + [("--output x -- --ouput", ""), ("--out=x", "")],
)
def test_a_script_answers_a_misspelt_option_with_the_most_similar_one(typed, said, capsys):
    parser = ScriptParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--output", required=True)
    parser.add_argument("--max_chars")
    try:
        assert parser.parse_args(typed.split()).output == "x" and not said
    except SystemExit as ended:
        assert ended.code == 2 and capsys.readouterr().err.endswith(said + "\n") and said


def test_a_script_refuses_a_path_that_no_file_can_have_in_words(capsys):
    parser = ScriptParser()
    parser.add_argument("--output", type=Path)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--output", "a" * 5000])
    assert re.search("--output: a{40}… .5,000 characters. is too long for a path", capsys.readouterr().err)


def test_every_script_answers_so():
    scripts = (Path(__file__).resolve().parents[2] / "scripts").glob("[!d]*.py")  # but those of the demo
    assert not [path.name for path in scripts if "argparse.ArgumentParser(" in path.read_text(encoding="utf-8")]


def test_every_suggested_option_exists():
    known = {f.name for f in fields(TrainConfig)} | set(FLAGS)
    assert not known & OWN_NAMES.keys() and not any(
        re.fullmatch(pattern, name) for pattern in (*MISSING_OPTIONS, *NEEDLESS) for name in known
    )
    suggestions = [*OTHER_NAMES, *re.findall(r"--(\w+=?)", " ".join(MISSING_OPTIONS.values()))]
    assert {name.split("=")[0] for name in suggestions} <= known | {"vocab_size", "validation_share"}
