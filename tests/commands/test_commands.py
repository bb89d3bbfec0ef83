"""The command lines people type: what works, what is refused, and with which words."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from bench.start_eight import start_many
from model.data.tokenizer import train_tokenizer
from tests.ranks import free_port, launch, launcher, wait_for_launch
from tests.tiny import (
    NUM_PAIRS,
    OPTIONS,
    SHAPE,
    SHORT,
    command,
    furnish,
    ids_by_epoch,
    journal,
    refused,
    train,
    words,
)


@pytest.fixture(scope="module")
def done_run(home):
    """A finished run's directory, relative to home."""
    done = train(home, output_dir="done", **SHORT)
    assert done.codes == [0], done.text
    return "done"


# The launchers


@pytest.mark.parametrize(("name", "world"), (("python", 1), ("accelerate", 2), ("torchrun", 2)))
def test_a_run_goes_from_start_to_end_under(home, name, world):
    code, text = wait_for_launch(launch([*launcher(name, world), *words(output_dir=name, **SHORT)], home), home)
    assert code == 0, text
    (begun,) = journal(home / name, "start")
    assert (begun["world"], begun["backend"]) == (world, "gloo" if world > 1 else "none")
    assert ids_by_epoch(home / name) == {1: list(range(NUM_PAIRS))}
    assert list(home.glob("logs/chat_trainer_pretrain_*.log"))
    for kind in ("best", "last"):
        model = AutoModelForSeq2SeqLM.from_pretrained(home / name / kind)
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(home / name / kind))


def test_accelerate_s_cpu_launch_is_refused_with_the_command_that_works(home):
    line = [launcher("accelerate")[0], "launch", "--cpu", "--num_processes", 2, launcher("python")[1]]
    code, text = wait_for_launch(launch([*line, *words(output_dir="cpu", **SHORT)], home), home)
    assert code != 0
    assert "accelerate launch --multi_gpu --num_processes N ./train_low_mem.py" in text
    assert not (home / "cpu").exists()


def test_two_launchers_of_one_job_train_together(home):
    port = free_port()
    processes = [
        launch(
            [
                launcher("accelerate")[0], "launch", "--multi_gpu", "--num_machines", 2, "--num_processes", 2,
                "--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port,
                launcher("python")[1], *words(output_dir="two_machines", **SHORT),
            ],
            home,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        code, text = wait_for_launch(process, home)
        assert code == 0, text
    assert journal(home / "two_machines", "start")[0]["world"] == 2
    assert ids_by_epoch(home / "two_machines") == {1: list(range(NUM_PAIRS))}


def test_eight_processes_start_in_an_empty_directory(tmp_path):
    assert start_many(tmp_path, world=8, use_launcher=False) == ""


@pytest.mark.parametrize(("env", "options"), ((dict(ACCELERATE_USE_GLOO=1), {}), ({}, dict(backend="gloo"))))
def test_gloo_is_used_where_it_is_asked_for(home, env, options):
    name = f"gloo{len(options)}"
    done = train(home, 2, env=env, output_dir=name, **SHORT, **options)
    assert done.codes == [0, 0], done.text
    assert journal(home / name, "start")[0]["backend"] == "gloo"


def test_nccl_without_a_gpu_is_refused(home):
    assert refused(train(home, 2, output_dir="nccl", backend="nccl", env=dict(CUDA_VISIBLE_DEVICES="")), "--backend")


def test_local_rank_is_taken_from_old_launchers_and_ignored(home):
    done = command(home, *words(output_dir="local_rank", **SHORT), "--local_rank=0")
    assert done.codes == [0], done.text


# Options


def test_all_problems_of_a_command_line_are_named_at_once_before_anything_starts(tmp_path):
    wrong = ["epochs=0", "dropout=much", "learn_rte=1", "optimizer=sgd", "is_finetune=maybe", "mixed_precision=fp16"]
    started = time.monotonic()
    line = [*launcher("python"), "train", "stray", *(f"--{word}" for word in wrong)]
    done = subprocess.run([*map(str, line)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert time.monotonic() - started < 30
    for part in ("stray", "epochs=0", "--dropout=much", "did you mean --learn_rate?", "optimizer='sgd'"):
        assert part in done.stderr, done.stderr
    for part in ("--is_finetune=maybe", "T5 diverges"):
        assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "parts"),
    (
        (["train", "--epochs=1.5"], ["--epochs=1.5", "whole number"]),
        (["train", "--epochs"], ["--epochs=True", "whole number"]),
        (["train", "3"], ["'3'", "--name=value"]),
        (["train", "--max_seq_length=3"], ["did you mean --max_seq_len?"]),
        (["train", "--use_small_config=True", "--use_large_config=True"], ["contradict"]),
        (["train", "--is_finetune=True", "--use_large_config=1"], ["contradict"]),
        (["train", "--is_keep_training=perhaps"], ["--is_keep_training=perhaps"]),
        (["train", "--deterministic=2"], ["--deterministic=2", "True or False"]),
        (["--epochs=0"], ["epochs=0"]),
        (["teach"], ["teach"]),
    ),
)
def test_what_cannot_be_obeyed_is_refused(home, line, parts):
    before = {path.name for path in home.iterdir()}
    assert refused(command(home, *line), *parts)
    assert {path.name for path in home.iterdir()} <= before | {"rank0.txt"}


@pytest.mark.parametrize("text", ("false", "False", "0", "no"))
def test_a_flag_can_be_false_in_all_its_spellings(home, text):
    done = train(home, output_dir=f"flag_{text}", is_finetune=text, log_sample_ids=text, **SHORT)
    assert done.codes == [0], done.text
    stored = json.loads((home / f"flag_{text}" / "config.json").read_text())
    assert (stored["preset"], stored["config"]["log_sample_ids"]) == ("pretrain", False)


def test_a_batch_that_contradicts_the_global_batch_or_a_missing_model_is_refused_before_tokenising(tmp_path):
    furnish(tmp_path)
    done = train(tmp_path, 2, output_dir="product", batch_size_per_gpu=4, gradient_accumulation_steps=2)
    assert refused(done, "--global_batch_size=8", "= 16")
    assert refused(train(tmp_path, 2, output_dir="product", model="nowhere.json"), "nowhere.json")
    assert [path.name for path in (tmp_path / "model_save").iterdir()] == ["tokenizer"]


def test_a_micro_batch_smaller_than_an_example_is_refused(home):
    assert refused(train(home, output_dir="narrow", micro_batch_tokens=9), "micro_batch_tokens=9", "max_seq_len")


@pytest.mark.parametrize(
    ("options", "parts"),
    (
        (dict(train_file="nowhere.parquet"), ["nowhere.parquet", "no such file"]),
        (dict(validation_file="nowhere.json"), ["nowhere.json", "no such file"]),
        (dict(tokenizer_dir="nowhere"), ["nowhere", "train_tokenizer.py"]),
        (dict(finetune_from_ckp_file="nowhere"), ["finetune_from_ckp_file=nowhere"]),
        (dict(model="nowhere.json"), ["nowhere.json"]),
        (dict(prompt_column="question"), ["question", "prompt"]),
    ),
)
def test_a_file_or_column_that_is_not_there_is_named(home, options, parts):
    assert refused(train(home, 2, output_dir="missing", **options), *parts)


# The command test


def test_the_test_command_measures_the_best_model(home, done_run):
    done = train(home, 2, command="test", output_dir=done_run, bleu_pairs=2, max_new_tokens=4, **SHORT)
    assert done.codes == [0, 0], done.text
    best = min(line["loss"] for line in journal(home / done_run, "eval"))
    assert f"test {done_run}/best: loss {best:.4f}, bleu" in done.text


def test_the_test_command_without_a_model_is_refused(home):
    assert refused(
        train(home, command="test", output_dir="nothing"), "nothing/best", "train first", "--is_keep_training=True"
    )


def test_what_a_training_was_told_of_its_own_memory_does_not_refuse_a_test(home):
    (home / "long.jsonl").write_text(json.dumps(dict(prompt="x" * 31, response="y" * 31)) + "\n")
    (home / "short.jsonl").write_text(json.dumps(dict(prompt="x", response="y")) + "\n")
    own = dict(train_file="short.jsonl", validation_file="short.jsonl", micro_batch_tokens=40, global_batch_size=1)
    own["warmup_steps"] = 0
    done = train(home, output_dir="cut", **SHORT | own)
    assert done.codes == [0], done.text
    done = command(home, "test", "--output_dir=cut", "--test_file=long.jsonl")
    assert done.codes == [0] and "test cut/best: loss" in done.text, done.text


# Fine-tuning


def first_loss(home, name):
    return journal(home / name, "train")[0]["loss"]


@pytest.mark.parametrize("source", ("done/best", "done", "weights.bin"))
def test_fine_tuning_begins_with_the_weights_it_is_given(home, done_run, source):
    torch.save(load_file(home / done_run / "best" / "model.safetensors"), home / "weights.bin")
    name = "tuned_" + Path(source).name
    done = train(home, output_dir=name, finetune_from_ckp_file=source, use_fast_config=True, **SHORT)
    assert done.codes == [0], done.text
    assert json.loads((home / name / "config.json").read_text())["preset"] == "sft_fast"
    assert first_loss(home, name) < first_loss(home, done_run) - 0.1
    assert f"starting from the weights in {source}" in done.text


def test_fine_tuning_with_another_tokenizer_is_refused(home, done_run):
    train_tokenizer(["这是另外一个词表" * 40, "完全不同的文字" * 40], 300, home / "other_tokenizer")
    done = train(home, output_dir="other", finetune_from_ckp_file=done_run, tokenizer_dir="other_tokenizer")
    assert refused(done, "leave --tokenizer_dir out")


def test_weights_without_a_tokenizer_beside_them_need_the_one_that_is_named(home, done_run):
    shutil.copytree(home / done_run / "best", home / "bare", ignore=lambda *_: ["tokenizer.json"])
    options = dict(output_dir="named", finetune_from_ckp_file="bare", **SHORT)
    assert refused(train(home, **options), "bare has no tokenizer.json", "--tokenizer_dir")
    done = train(home, tokenizer_dir="model_save/tokenizer", **options)
    assert done.codes == [0], done.text


def test_a_fine_tuned_run_keeps_the_shape_of_the_weights_it_began_with(home, done_run):
    options = dict(output_dir="shaped", finetune_from_ckp_file=done_run, model=None, **SHORT)
    done = train(home, 1, "forward:0:2:int", **options)
    assert done.codes == [0], done.text
    done = train(home, 1, is_keep_training=True, **options)
    assert done.codes == [0], done.text


def test_fine_tuning_into_another_shape_than_the_one_named_is_refused(home, done_run):
    (home / "wide.json").write_text(json.dumps(SHAPE | dict(d_model=24)))
    done = train(home, output_dir="wide", finetune_from_ckp_file=done_run, model="wide.json")
    assert refused(done, "wide.json", done_run)


def test_a_bin_file_of_another_shape_is_refused_before_tokenising_with_the_way_out(home, done_run):
    torch.save(load_file(home / done_run / "last" / "model.safetensors"), home / "old.bin")
    options = dict(output_dir="wrong_size", finetune_from_ckp_file="old.bin", model="small", train_file="nothing.jsonl")
    assert refused(train(home, **options), "old.bin does not fit this model", "name it in --model")


def test_weights_that_would_run_code_are_refused(home):
    torch.save(dict(model=shutil.rmtree), home / "code.bin")
    assert refused(train(home, output_dir="code", finetune_from_ckp_file="code.bin"), "code.bin")


def test_the_options_of_these_tests_are_those_of_a_run(home, done_run):
    stored = json.loads((home / done_run / "config.json").read_text())
    assert {name: stored["given"][name] for name in OPTIONS} == {
        name: str(value) for name, value in (OPTIONS | SHORT).items()
    }
