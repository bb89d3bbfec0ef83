"""What accelerate's launcher was given counts here or is refused; its own defaults change nothing."""

import json
import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT, launcher

CHILD = """
import json, sys
sys.path.insert(0, ROOT)
from model.commands.launcher_options import taken_over
from model.runtime.launcher import command_to_go_on
try:
    print(json.dumps([taken_over(sys.argv[1:]), command_to_go_on("my run")]))
except ValueError as error:
    sys.exit(str(error))
"""
PARENT = "import subprocess, sys\nat = sys.argv.index('train_low_mem.py')\n"
PARENT += "sys.exit(subprocess.run([sys.executable, *sys.argv[at:]]).returncode)\n"
ACCELERATE_SETS = dict(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_DYNAMO_BACKEND="NO")


@pytest.fixture
def ask(tmp_path):
    """Start a script as a child of a program named accelerate, and give its output."""
    (tmp_path / "accelerate").write_text(PARENT)
    (tmp_path / "train_low_mem.py").write_text(CHILD.replace("ROOT", repr(str(ROOT))))

    def started(typed="", own="", **environment):
        line = [sys.executable, "accelerate", "launch", *typed.split(), "train_low_mem.py", "train", *own.split()]
        known = {name: value for name, value in os.environ.items() if name not in ("CHAT_COMMAND", "CHAT_LANG")}
        env = known | ACCELERATE_SETS | dict(CUDA_VISIBLE_DEVICES="") | environment
        return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)

    return started


@pytest.mark.parametrize(
    ("typed", "own", "environment", "taken"),
    [
        ("", "", {}, []),  # accelerate's own defaults
        ("--mixed_precision bf16 --gradient_accumulation_steps 8 --gradient_clipping=0.5", "", {},
         ["--mixed_precision=bf16", "--gradient_accumulation_steps=8", "--max_grad_norm=0.5"]),
        ("--mixed-precision=no --gradient_acc 1", "", {}, ["--mixed_precision=no", "--gradient_accumulation_steps=1"]),
        ("", "", dict(ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"),
         ["--mixed_precision=bf16", "--gradient_accumulation_steps=4"]),  # of a configuration file, and exported
        ("--gradient_clipping 1", "--max-grad-norm 1.0", {}, []),
    ],
)  # fmt: skip
def test_options_that_mean_the_same_are_taken_over_and_defaults_are_not(ask, typed, own, environment, taken):
    done = ask(typed, own, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == taken


@pytest.mark.parametrize(
    ("typed", "own", "parts"),
    [
        ("--mixed_precision fp16 --dynamo_backend inductor", "",
         ("--mixed_precision fp16", "bf16 or no", "--dynamo_backend inductor", "leave it out")),
        ("--gradient_accumulation_steps 8", "--gradient_accumulation_steps=4",
         ("--gradient_accumulation_steps 8 contradicts --gradient_accumulation_steps=4",)),
        ("--mixed_precision bf16", "--mixed_precision=auto", ("bf16 contradicts --mixed_precision=auto",)),
    ],
)  # fmt: skip
def test_other_values_and_contradictions_are_refused_by_name(ask, typed, own, parts):
    done = ask(typed, own)
    assert done.returncode == 1 and all(part in done.stderr for part in parts), done.stderr


def test_the_command_to_go_on_has_the_launcher_s_words_and_none_that_start_a_new_run(ask):
    start = f"CUDA_VISIBLE_DEVICES= {sys.executable} accelerate launch --num_processes 2 train_low_mem.py train"
    done = ask("--num_processes 2", "--overwrite=True --epochs=3")
    assert json.loads(done.stdout)[1] == f"{start} '--output_dir=my run' --is_keep_training=True"
    script = ask(CHAT_COMMAND="./train_sft_custom.sh 4 --overwrite True --epochs=3 --is_keep_training=False")
    assert json.loads(script.stdout)[1] == "CUDA_VISIBLE_DEVICES= ./train_sft_custom.sh 4 --epochs=3"


def test_the_real_launcher_is_read_and_all_its_problems_are_refused_at_once(tmp_path):
    options = ["--num_processes", "1", "--mixed_precision", "fp16", "--gradient_accumulation_steps", "8"]
    line = [launcher("accelerate")[0], "launch", *options, "--dynamo_backend", "inductor", ROOT / "train_low_mem.py"]
    own = ["train", "--gradient_accumulation_steps=4"]
    env = os.environ | dict(CUDA_VISIBLE_DEVICES="", HF_HOME=str(tmp_path), OMP_NUM_THREADS="1")
    done = subprocess.run([*map(str, line), *own], cwd=tmp_path, env=env, capture_output=True, text=True)
    refused = ("--mixed_precision fp16", "--dynamo_backend inductor", "8 contradicts --gradient_accumulation_steps=4")
    assert done.returncode and all(part in done.stderr for part in refused), done.stderr
