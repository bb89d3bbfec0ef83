"""Fixture: runs scripts/prepare_data.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"


@pytest.fixture
def prepare(tmp_path):
    """A function that runs the script in tmp_path and returns (exit code, stdout, stderr)."""

    def run(*words):
        command = [sys.executable, SCRIPT, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
        return done.returncode, done.stdout, done.stderr

    return run
