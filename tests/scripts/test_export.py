"""scripts/export.py as people type it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.formats.weights import export_model

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "export.py"


@pytest.fixture
def run_dir(tmp_path, model, tokenizer):
    export_model(model, tokenizer, tmp_path / "run" / "best")
    return tmp_path / "run"


def export(*words):
    line = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_a_run_is_written_beside_itself_and_not_over_what_is_there(run_dir):
    ended = export(run_dir, "--to", "ctranslate2")
    assert ended.returncode == 0, ended.stderr
    target = run_dir.with_name("run-ctranslate2")
    assert ended.stdout.startswith(f"{target}: ") and "README.md" in ended.stdout
    assert (target / "model.bin").is_file() and (target / "tokenizer.json").is_file()
    again = export(run_dir, "--to", "ctranslate2")
    assert again.returncode == 2 and "add --overwrite" in again.stderr
    other = export(run_dir, "--to", "gguf", "--type", "q8_0")
    assert other.returncode == 2 and "run no encoder: --to ctranslate2" in other.stderr
    over = export(run_dir / "best", "--to", "bf16", "--output_dir", run_dir / "best", "--overwrite")
    assert over.returncode == 2 and "the model itself lies there" in over.stderr
    assert not list(run_dir.parent.glob(".*"))
    weights = run_dir / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    damaged = export(run_dir, "--to", "bf16")
    assert damaged.returncode == 2 and "model.safetensors cannot be read as weights" in damaged.stderr
    assert not list(run_dir.parent.glob(".*")) and not run_dir.with_name("run-bf16").exists()
