"""Command lines as people type them: launchers, options, the command test; and which modules read the configuration."""

import json
import subprocess
import sys
import time

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import train_low_mem
from config import TrainConfig
from tests.ranks import free_port, launch, launcher, wait_for, wait_for_launch
from tests.tiny import NUM_PAIRS, SHORT, command, furnish, ids_by_epoch, journal, refused, start, train, words


@pytest.fixture(scope="module")
def done_run(home):
    """A finished run's directory, relative to home."""
    done = train(home, output_dir="done", **SHORT)
    assert done.codes == [0], done.text
    return "done"


# Launchers


@pytest.mark.parametrize(("name", "world"), (("python", 1), ("torchrun", 2)))
def test_a_run_trains_from_start_to_end_under(home, name, world):
    code, text = wait_for_launch(launch([*launcher(name, world), *words(output_dir=name, **SHORT)], home), home)
    assert code == 0, text
    check_whole_run(home, name, world)


def check_whole_run(home, name, world):
    """All `world` ranks trained on every pair, and what they wrote can be read."""
    (begun,) = journal(home / name, "start")
    assert (begun["world"], begun["backend"]) == (world, "gloo" if world > 1 else "none")
    assert ids_by_epoch(home / name) == {1: list(range(NUM_PAIRS))}
    assert list(home.glob("logs/chat_trainer_pretrain_*.log"))
    for kind in ("best", "last"):
        model = AutoModelForSeq2SeqLM.from_pretrained(home / name / kind)
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(home / name / kind))


def test_a_cpu_launch_of_accelerate_is_refused_with_a_command_that_works(home):
    line = [launcher("accelerate")[0], "launch", "--cpu", "--num_processes", 2, launcher("python")[1]]
    code, text = wait_for_launch(launch([*line, *words(output_dir="cpu", **SHORT)], home), home)
    assert code != 0
    assert "accelerate launch --multi_gpu --num_processes N ./train_low_mem.py" in text
    assert not (home / "cpu").exists()


def test_two_launchers_of_accelerate_for_one_job_train_together_from_start_to_end(home):
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
    check_whole_run(home, "two_machines", 2)


def test_eight_processes_start_in_an_empty_directory(tmp_path):
    done = train(furnish(tmp_path), 8, seconds=300, output_dir="run", **SHORT)
    assert done.codes == [0] * 8, done.text
    assert ids_by_epoch(tmp_path / "run") == {1: list(range(NUM_PAIRS))}


@pytest.mark.parametrize(("env", "options"), ((dict(ACCELERATE_USE_GLOO=1), {}), ({}, dict(backend="gloo"))))
def test_gloo_is_used_if_it_is_requested(home, env, options):
    name = f"gloo{len(options)}"
    done = train(home, 2, env=env, output_dir=name, **SHORT, **options)
    assert done.codes == [0, 0], done.text
    assert journal(home / name, "start")[0]["backend"] == "gloo"


def test_nccl_without_a_gpu_is_refused(home):
    assert refused(train(home, 2, output_dir="nccl", backend="nccl", env=dict(CUDA_VISIBLE_DEVICES="")), "--backend")


def test_the_option_local_rank_of_old_launchers_is_ignored(home):
    done = command(home, *words(output_dir="local_rank", **SHORT), "--local_rank=0")
    assert done.codes == [0], done.text


# Options


def test_all_problems_of_a_command_line_are_reported_at_once_before_anything_starts(tmp_path):
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
        (["train", "--is_finetune=True", "--use_large_config=1"], ["options:\n  --is_finetune=True and --use_large"]),
        (["train", "--is_keep_training=perhaps"], ["--is_keep_training=perhaps", "True or False, or auto"]),
        (["train", "--deterministic=2"], ["--deterministic=2", "True or False"]),
        (["--epochs=0"], ["epochs=0"]),
        (["teach"], ["teach"]),
    ),
)
def test_a_wrong_command_line_is_refused_and_writes_nothing(home, line, parts):
    before = {path.name for path in home.iterdir()}
    assert refused(command(home, *line), *parts)
    assert {path.name for path in home.iterdir()} <= before | {"rank0.txt"}


@pytest.mark.parametrize("text", ("false", "False", "0", "no"))
def test_a_flag_can_be_false_in_any_usual_spelling(home, text):
    done = train(home, output_dir=f"flag_{text}", is_finetune=text, log_sample_ids=text, **SHORT)
    assert done.codes == [0], done.text
    stored = json.loads((home / f"flag_{text}" / "config.json").read_text())
    assert (stored["preset"], stored["config"]["log_sample_ids"]) == ("pretrain", False)


def test_a_contradicting_batch_size_and_a_missing_model_file_are_refused_before_tokenising(tmp_path):
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
        (
            dict(finetune_from_ckp_file="Qwen/Qwen0-7B"),
            ["finetune_from_ckp_file=Qwen/Qwen0-7B: no model", "hf download Qwen/Qwen0-7B --local-dir models/Qwen0-7B"],
        ),
        (dict(model="nowhere.json"), ["nowhere.json"]),
        (dict(prompt_column="question"), ["question", "prompt"]),
    ),
)
def test_a_missing_file_or_column_is_named(home, options, parts):
    assert refused(train(home, 2, output_dir="missing", **options), *parts)


# The command test


@pytest.mark.parametrize("kind", ["best", "last"])
def test_the_card_of_an_export_says_what_it_is_of(home, done_run, kind):
    card = ModelCard.load(home / done_run / kind / "README.md")
    (scored,) = journal(home / done_run, "eval")
    results = card.data.eval_results
    assert card.data.model_name == "done" and {result.dataset_name for result in results} == {"valid.jsonl"}
    told = {result.metric_type: result.metric_value for result in results}
    assert told == {name: pytest.approx(scored[name], rel=1e-5) for name in ("loss", "nats_per_char")}
    assert f"train.jsonl, {NUM_PAIRS} pairs" in card.text and f"after {scored['step']} of" in card.text
    assert str(home) not in card.text


def test_the_test_command_measures_the_best_model(home, done_run):
    done = train(home, 2, command="test", output_dir=done_run, bleu_pairs=2, max_new_tokens=4, **SHORT)
    assert done.codes == [0, 0], done.text
    best = min(line["loss"] for line in journal(home / done_run, "eval"))
    assert f"test {done_run}/best: loss {best:.4f}, nats_per_char" in done.text and "rouge_l" in done.text


def test_the_test_command_without_a_model_is_refused(home):
    assert refused(
        train(home, command="test", output_dir="nothing"), "nothing/best", "train first", "--is_keep_training=True"
    )


def test_the_memory_options_of_a_training_do_not_limit_a_test(home):
    (home / "long.jsonl").write_text(json.dumps(dict(prompt="x" * 31, response="y" * 31)) + "\n")
    (home / "short.jsonl").write_text(json.dumps(dict(prompt="x", response="y")) + "\n")
    own = dict(train_file="short.jsonl", validation_file="short.jsonl", micro_batch_tokens=40, global_batch_size=1)
    own["warmup_steps"] = 0
    done = train(home, output_dir="cut", **SHORT | own)
    assert done.codes == [0], done.text
    done = command(home, "test", "--output_dir=cut", "--test_file=long.jsonl")
    assert done.codes == [0] and "test cut/best: loss" in done.text, done.text


# Where the configuration is read


def count_readers(line):
    """`main`, which prints the modules that read the configuration up to the first step's end."""
    readers, read, steps = set(), TrainConfig.__getattribute__, train_low_mem.train_steps

    def noting(config, name):
        module = sys._getframe(1).f_globals["__name__"]
        readers.update([module] if module.startswith(("model.", "train_low_mem")) else [])
        return read(config, name)

    def first_step(context, position):
        taken = steps(context, position)
        yield next(taken)
        TrainConfig.__getattribute__ = read
        print("READERS", *sorted(readers))
        yield from taken

    TrainConfig.__getattribute__, train_low_mem.train_steps = noting, first_step
    return train_low_mem.main(line)


def test_the_configuration_is_read_in_at_most_12_modules_up_to_the_first_step(home):
    done = wait_for(start(home, output_dir="read", function=count_readers, **SHORT), home)
    (line,) = [line for line in done.text.splitlines() if line.startswith("READERS")]
    assert 6 < len(line.split()) - 1 <= 12, line
