"""Without the project's packages every script and launcher says what to type, in one line."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.ranks import ROOT

BARE = [sys._base_executable, "-S", "-E"]  # an interpreter without any package
WORDS = {  # that get a script as far as its first import of a package
    "scripts/train_lora.py": ["--model_name_or_path", ".", "--data_path", "pairs.jsonl", "--output_dir", "out"],
    "scripts/serve.py": ["."],
    "scripts/export.py": [".", "--to", "ctranslate2"],
    "train_low_mem.py": ["train"],
}
SCRIPTS = sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")) + ["train_low_mem.py"]


def says_what_to_type(done):
    """Whether a process failed with one line that names the command."""
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    return "source " in line and ".venv/bin/activate" in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_packages_says_what_to_type_in_one_line(script, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    done = subprocess.run(
        [*BARE, ROOT / script, *WORDS.get(script, [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert says_what_to_type(done), done.stderr
    assert script == "scripts/train_lora.py" or len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("processes", ("1", "2"))
def test_a_launcher_without_packages_says_so_in_one_line(tmp_path, processes):
    for name in ("model", "scripts"):
        shutil.copytree(
            ROOT / name, tmp_path / "a" / name, ignore=shutil.ignore_patterns("__pycache__", "nn", "kernels")
        )
    for name in ("config.py", "train_low_mem.py"):
        shutil.copy(ROOT / name, tmp_path / "a" / name)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {" ".join(BARE)} "$@"\n')
    python.chmod(0o755)
    env = os.environ | dict(PATH=f"{python.parent}:/usr/bin:/bin", NUM_PROCESSES=processes)
    done = subprocess.run(
        [tmp_path / "a" / "scripts" / "train_sft_custom.sh"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "train_sft_custom.sh: python3 lacks the packages of this project: type bash scripts/demo.sh, which makes "
        ".venv, then source .venv/bin/activate"
    ]
