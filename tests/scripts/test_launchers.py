import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from tests.tiny import command

ROOT = Path(__file__).resolve().parents[2]
USAGE = "usage: train_sft_custom.sh [N=16]"
SECONDS = 120
ADAPTER = dict(is_finetune="True", lora_rank="16", gpu_memory_limit_gb="0", gradient_checkpointing="auto")


@pytest.fixture
def copy(tmp_path):
    """A copy of the project, because a run writes model_save/ and logs/ into it."""
    root = tmp_path / "a project"
    shutil.copytree(ROOT / "model", root / "model", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("config.py", "train_low_mem.py", "train_sft_custom.sh", "quick_start_sft_fast.sh", "run_train.sh"):
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    return root


@pytest.fixture
def elsewhere(tmp_path):
    """A directory outside the project with pairs.jsonl and start/, a tiny Hugging Face directory."""
    folder = tmp_path / "else where"
    train_tokenizer([PROBE] * 3, 407, folder / "start")
    tokenizer = load_tokenizer(folder / "start")
    shape = dict(d_model=32, d_ff=64, num_heads=2, d_kv=16, num_layers=1, num_decoder_layers=1)
    config = T5Config(
        **shape, vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id, decoder_start_token_id=tokenizer.pad_id,
    )  # fmt: skip
    torch.manual_seed(0)
    T5ForConditionalGeneration(config).save_pretrained(folder / "start")
    pairs = [{"prompt": PROBE[i : i + 5], "response": PROBE[i + 5 : i + 12]} for i in range(12)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def add_python(root, body):
    """Write .venv/bin/python, a shell script that holds `body`."""
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)


def launch(script, *words, cwd, **environment):
    own = {"CUDA_VISIBLE_DEVICES": "", "NUM_PROCESSES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [script, *words], cwd=cwd, env={**os.environ, **own, **environment}, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip


def options(epochs):
    values = dict(
        finetune_from_ckp_file="start", train_file="pairs.jsonl", validation_file="pairs.jsonl",
        output_dir="out", epochs=epochs, bleu_pairs=0, gradient_accumulation_steps=1,
    )  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


def journal(folder):
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_started_through_the_link_resumes_with_more_processes_and_says_when_it_is_finished(copy, elsewhere):
    add_python(copy, f'exec {sys.executable} "$@"')
    script = copy / "train_sft_custom.sh"
    done = launch(script, "4", *options(epochs=1), cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    start, *_, stop = journal(elsewhere)
    assert (start["preset"], start["world"], start["global_batch"]) == ("sft_fast", 1, 4)
    assert (stop["kind"], stop["reason"], stop["step"]) == ("stop", "finished", 3)

    done = launch(copy / "scripts" / script.name, "3", *options(epochs=2), cwd=elsewhere, NUM_PROCESSES="2")
    assert done.returncode == 0, done.stderr
    stop = journal(elsewhere)[-1]
    assert (stop["kind"], stop["step"]) == ("stop", 3 + 2)
    starts = [line for line in journal(elsewhere) if line["kind"] == "start"]
    assert [(line["world"], line["global_batch"]) for line in starts] == [(1, 4), (2, 6)]

    again = launch(script, "3", *options(epochs=2), cwd=elsewhere)
    assert again.returncode == 0, again.stderr
    assert "is finished: 2 epochs done" in again.stdout + again.stderr
    assert journal(elsewhere)[-1] == stop


@pytest.mark.parametrize(
    "words",
    (["0"], ["-3"], ["abc"], ["1.5"], [""], ["8", "9"], ["8", "epochs=1"], ["--epochs=1", "8"], ["-h"], ["--help"]),
)
def test_arguments_that_are_neither_batch_size_nor_option_print_the_usage_and_exit_with_2(copy, words):
    done = launch(copy / "train_sft_custom.sh", *words, cwd=copy)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(USAGE) and (words[-1] in ("-h", "--help") or repr(words[-1]) in done.stderr)


@pytest.mark.parametrize(
    "words", (["demo.sh", "--help"], ["demo.sh", "tiny"], ["demo.sh", ""], ["test.sh", "-h"], ["test.sh", "--help"])
)
def test_a_script_that_installs_prints_its_usage_and_exits_with_2_before_it_installs_anything(copy, words):
    done = launch(copy / "scripts" / words[0], *words[1:], cwd=copy)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: {words[0]}")
    assert not (copy / ".venv").exists()


def test_the_test_script_passes_its_arguments_to_pytest(copy):
    add_python(copy, '[ "$1" = -m ] && printf "%s|" "$@"; exit 0')
    (copy / "scripts" / "setup_venv.sh").write_text('export PATH="$PWD/.venv/bin:$PATH"\n')
    done = launch(copy / "scripts" / "test.sh", "-k", "two words", "tests/nn", cwd=copy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "-m|pytest|-n|3|--dist|worksteal|-k|two words|tests/nn|"


@pytest.mark.parametrize("number", ("0", "-1", "two"))
@pytest.mark.parametrize("words", (["train_sft_custom.sh"], ["run_train.sh", "-t", "stage3"]))
def test_an_invalid_number_of_processes_prints_the_usage_and_exits_with_2(copy, words, number):
    done = launch(copy / words[0], *words[1:], cwd=copy, NUM_PROCESSES=number)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: {words[0]}")


def test_options_are_passed_on_unchanged_and_the_exit_code_is_returned(copy):
    add_python(copy, 'printf "%s|" "$@"; exit 7')
    done = launch(copy / "train_sft_custom.sh", "--epochs=1", "--model=tiny", "--prompt_column=my question", cwd=copy)
    assert done.returncode == 7
    launched, passed = done.stdout.splitlines()
    assert passed.split("|")[:-1] == [
        "./train_low_mem.py", "train", "--is_finetune=True", "--use_fast_config=True", "--batch_size_per_gpu=16",
        "--is_keep_training=auto", "--epochs=1", "--model=tiny", "--prompt_column=my question",
    ]  # fmt: skip
    assert launched.startswith(".venv/bin/python ./train_low_mem.py train")


def test_the_quick_start_is_the_custom_launcher_with_16_pairs(copy):
    add_python(copy, 'printf "%s|" "$@"')
    quick = launch(copy / "quick_start_sft_fast.sh", "--epochs=1", cwd=copy.parent)
    assert (quick.returncode, quick.stderr) == (0, "")
    assert quick.stdout == launch(copy / "train_sft_custom.sh", "16", "--epochs=1", cwd=copy.parent).stdout


def test_a_run_knows_the_words_that_were_typed_to_the_script(copy):
    add_python(copy, 'printf "%s" "$CHAT_COMMAND"')
    done = launch("./run_train.sh", "-t", "stage3", "--model=my model.json", cwd=copy, NUM_PROCESSES="2")
    assert shlex.split(done.stdout.splitlines()[-1]) == [
        "NUM_PROCESSES=2", "./run_train.sh", "-t", "stage3", "--model=my model.json",
    ]  # fmt: skip


def test_relative_paths_count_from_the_current_directory(copy, elsewhere):
    add_python(copy, 'printf "%s|" "$@"')
    words = ["--train_file=a b.csv", "--output-dir=../out", "--model=my.json", "--test_file=/t.csv", "--test_file="]
    expected = [
        f"--train_file={elsewhere}/a b.csv", f"--output-dir={elsewhere}/../out", f"--model={elsewhere}/my.json",
        "--test_file=/t.csv", "--test_file=",
    ]  # fmt: skip
    assert launch(copy / "train_sft_custom.sh", *words, cwd=elsewhere).stdout.split("|")[-6:-1] == expected
    assert launch(copy / "train_sft_custom.sh", *words, cwd=copy).stdout.split("|")[-6:-1] == words


@pytest.mark.parametrize(
    "visible, processes", ((None, 3), ("0,2", 2), ("1, GPU-1a-1b", 2), ("0,-1,2", 1), ("", 1), ("-1", 1), ("5", 1))
)
def test_each_visible_gpu_gets_one_process(copy, tmp_path, visible, processes):
    add_python(copy, 'printf "%s|" "$@"')
    lister = tmp_path / "bin" / "nvidia-smi"
    lister.parent.mkdir()
    lister.write_text("#!/bin/sh\nfor i in 0 1 2; do echo \"GPU $i: RTX (UUID: GPU-$i)\"; echo '  MIG 1g'; done\n")
    lister.chmod(0o755)
    path = f"{lister.parent}:{os.environ['PATH']}"
    unset = ["env", "-u", "CUDA_VISIBLE_DEVICES"] if visible is None else ["env"]
    done = launch(*unset, copy / "train_sft_custom.sh", cwd=copy, PATH=path, CUDA_VISIBLE_DEVICES=visible or "")
    words = done.stdout.splitlines()[0].split()
    assert ("torch.distributed.run" in words) == (processes > 1)
    assert processes == 1 or words[words.index("--nproc_per_node") + 1] == str(processes)


MINIMAL = dict(gpu_memory_limit_gb="4", gradient_checkpointing="True", optimizer="adafactor", offload="none")


@pytest.mark.parametrize(
    "profile, levers",
    (
        ("deepspeed", dict(gpu_memory_limit_gb="0", gradient_checkpointing="auto", offload="none")),
        ("stage2_offload", dict(gpu_memory_limit_gb="12", gradient_checkpointing="auto", offload="auto")),
        ("stage3", dict(gpu_memory_limit_gb="6", gradient_checkpointing="auto", offload="auto", master_dtype="auto")),
        ("minimal", MINIMAL),
        ("lora", ADAPTER),
        ("qlora", ADAPTER | dict(base_precision="nf4")),
    ),
)  # fmt: skip
def test_a_profile_is_a_set_of_memory_options(copy, profile, levers):
    add_python(copy, 'printf "%s|" "$@"')
    done = launch(copy / "run_train.sh", "-t", profile, "--epochs=1", cwd=copy.parent, NUM_PROCESSES="1")
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split("|")[:-1]
    assert words[1:] == ["train", *(f"--{k}={v}" for k, v in levers.items()), "--is_keep_training=auto", "--epochs=1"]


def test_a_run_resumed_with_another_profile_keeps_no_memory_option_of_the_earlier_one(copy, elsewhere):
    add_python(copy, 'printf "%s|" "$@"')
    for epochs, profile in enumerate(("minimal", "stage3"), start=1):
        words = ["-t", profile, "--tokenizer_dir=start", *options(epochs)]
        given = launch(copy / "run_train.sh", *words, cwd=elsewhere, NUM_PROCESSES="1").stdout.split("|")[1:-1]
        done = command(elsewhere, *given)
        assert done.codes == [0], done.text
    stored = json.loads((elsewhere / "out" / "config.json").read_text())
    assert (stored["given"]["gradient_checkpointing"], float(stored["given"]["gpu_memory_limit_gb"])) == ("auto", 6)


@pytest.mark.parametrize(
    "words, said",
    (([], ""), (["-t"], ""), (["stage3"], ""), (["-t", "qlra"], "-t 'qlra': no such profile"))
    + ((["-t", "stage3", "epochs=1"], "cannot read 'epochs=1': options are written --name=value"),),
)
def test_an_unknown_profile_prints_the_usage_and_what_was_typed_and_exits_with_2(copy, words, said):
    done = launch(copy / "run_train.sh", *words, cwd=copy)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: run_train.sh -t PROFILE")
    assert f"run_train.sh: {said}" in done.stderr.splitlines()[-1] if said else "run_train.sh: " not in done.stderr


def test_the_shell_scripts_parse_and_name_no_address():
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]
    assert len(scripts) >= 4
    for script in scripts:
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0, script
        assert not re.search(r"https?:|index-url|find-links", script.read_text()), script
