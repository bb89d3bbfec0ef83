import re
import subprocess
import sys
from dataclasses import fields

import pytest

from config import TrainConfig
from model.commands.option_values import PATHS
from model.commands.options import exit_early, read_request
from model.commands.run_files import FILE_OPTIONS
from model.commands.usage import COMMANDS
from tests.ranks import ROOT


@pytest.mark.parametrize(
    "words",
    [["train", "--epochs=0"], ["test", "--epoch=3"], ["train", "stray"], ["doctor", "--save-step=1", "--local-rank=0"]],
)
def test_a_wrong_command_line_exits_early_with_code_2_and_the_reason(words, capsys):
    with pytest.raises(SystemExit) as end:
        exit_early(words)
    assert end.value.code == 2
    assert words[1].lstrip("-").split("=")[0].replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("path", ["a" * 5000, "文" * 86, "long/" * 1000])
@pytest.mark.parametrize("name", [*PATHS, *FILE_OPTIONS])
def test_a_path_that_no_file_can_have_is_refused_in_words(name, path):
    with pytest.raises(ValueError, match=f"--{name}[=:].*characters. is too long for a path.*type that of a") as told:
        read_request((), {name: path})
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    "words, code, part",
    [
        ([], 2, "no command is typed"),
        (["--local_rank=0"], 2, "no command is typed"),
        (["trian", "--epochs=0"], 2, "trian: no such command: did you mean train?"),
        (["xyz"], 2, "xyz: no such command\n"),
        (["--help"], 0, "usage: "),
        (["-h"], 0, "usage: "),
    ],
)
def test_the_commands_are_shown_without_a_known_one_or_when_asked_for(words, code, part, capsys):
    with pytest.raises(SystemExit) as end:
        exit_early(words)
    shown = capsys.readouterr()
    assert end.value.code == code and part in (shown.err if code else shown.out)
    assert all(f"\n  {command} " in shown.out + shown.err for command in COMMANDS)


def test_only_the_first_rank_of_a_machine_prints_the_error(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        exit_early(["train", "--epochs=0"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [["train"], ["--epochs=3"], ["train", "--epochs=3", "--save-steps=5", "--local_rank=0"], ["train", "--epochs", "0"]]
    + [["plan", "--epochs=0"]],
)
def test_a_command_line_that_may_be_right_does_not_exit_early(words):
    assert exit_early(words) is None


@pytest.mark.parametrize("command", ["train", "plan", "test", "doctor"])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_each_option_with_its_default_and_comment(command, word, capsys):
    with pytest.raises(SystemExit) as ended:
        exit_early([command, "--epochs=3", word])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: python train_low_mem.py {command} ")
    for f in fields(TrainConfig):
        assert re.search(rf"^  --{f.name}={re.escape(str(f.default))} +\S", shown, re.MULTILINE), f.name
    assert ("--num_processes=" in shown) == (command == "plan")


def test_parsing_options_imports_no_heavy_package_and_a_start_only_those_that_every_run_needs():
    code = "import sys; from model.commands.options import exit_early; print(*sys.modules)"
    code += "; import train_low_mem; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    parsing, starting = (set(line.split()) for line in done.stdout.splitlines())
    assert "config" in parsing and not parsing & {"torch", "transformers", "numpy", "pyarrow", "fire"}
    some_runs = "transformers accelerate datasets peft sacrebleu triton pandas matplotlib fastapi"
    assert "torch" in starting and not starting.intersection(some_runs.split())
