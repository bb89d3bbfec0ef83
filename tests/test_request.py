import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from config import TrainConfig
from model.request import answer_early, read_request
from tests.ranks import ROOT


@pytest.mark.parametrize(
    "words",
    [["train", "--epochs=0"], ["test", "--epoch=3"], ["train", "stray"], ["doctor", "--save-step=1", "--local-rank=0"]],
)
def test_what_cannot_be_obeyed_ends_early_with_code_2_and_the_reason(words, capsys):
    with pytest.raises(SystemExit) as end:
        answer_early(words)
    assert end.value.code == 2
    assert words[1].lstrip("-").split("=")[0].replace("-", "_") in capsys.readouterr().err


def test_one_rank_speaks_for_all_of_a_machine(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        answer_early(["train", "--epochs=0"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [[], ["train"], ["train", "--epochs=3", "--save-steps=5", "--local_rank=0"], ["train", "--epochs", "0"]]
    + [["--help"], ["plan", "--epochs=0"]],
)
def test_what_may_be_right_passes(words):
    assert answer_early(words) is None


@pytest.mark.parametrize("command", ["train", "plan", "test", "doctor"])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_each_option_with_its_default_and_meaning(command, word, capsys):
    with pytest.raises(SystemExit) as ended:
        answer_early([command, "--epochs=3", word])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: python train_low_mem.py {command} ")
    for f in fields(TrainConfig):
        assert re.search(rf"^  --{f.name}={re.escape(str(f.default))} +\S", shown, re.MULTILINE), f.name
    assert ("--num_processes=" in shown) == (command == "plan")


def test_a_refusal_needs_none_of_the_heavy_packages():
    code = "import sys; from model.request import answer_early; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "config" in loaded and not loaded & {"torch", "transformers", "numpy", "pyarrow", "fire"}


@pytest.mark.parametrize(
    "stored",
    [dict(preset="sft"), dict(preset="nonsense", given={}), dict(preset=[], given={}), dict(preset="sft", given=[])]
    + [dict(preset="sft", given=dict(output_dir=None)), dict(preset="sft", given=dict(epochs=[3])), [], "x"],
)
def test_a_damaged_config_json_is_named_with_the_way_out(tmp_path, stored):
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="config.json cannot be read .*delete it"):
        read_request((), dict(output_dir=str(tmp_path), is_keep_training="True"))
