import json
import subprocess
import sys

import pytest

from model.request import read_request, refuse_early
from tests.ranks import ROOT


@pytest.mark.parametrize(
    "words",
    [["train", "--epochs=0"], ["test", "--epoch=3"], ["train", "stray"], ["doctor", "--save-step=1", "--local-rank=0"]],
)
def test_what_cannot_be_obeyed_ends_early_with_code_2_and_the_reason(words, capsys):
    with pytest.raises(SystemExit) as end:
        refuse_early(words)
    assert end.value.code == 2
    assert words[1].lstrip("-").split("=")[0].replace("-", "_") in capsys.readouterr().err


def test_one_rank_speaks_for_all_of_a_machine(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        refuse_early(["train", "--epochs=0"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [[], ["train"], ["train", "--epochs=3", "--save-steps=5", "--local_rank=0"], ["train", "--epochs", "0"]]
    + [["--help"], ["plan", "--epochs=0"]],
)
def test_what_may_be_right_passes(words):
    assert refuse_early(words) is None


def test_a_refusal_needs_none_of_the_heavy_packages():
    code = "import sys; from model.request import refuse_early; print(*sys.modules)"
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
