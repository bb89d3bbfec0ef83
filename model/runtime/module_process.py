"""Starts a module of this project as a process of its own, from whatever folder. Standard library only."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start_module(name, *words, env=None, **pipes):
    """The subprocess.Popen of `python -m name words`; `env` stands for this process's environment, `pipes` as there."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", name, *map(str, words)]  # -P: no folder of the user's hides a module
    return subprocess.Popen(command, env=(os.environ if env is None else env) | dict(PYTHONPATH=path), **pipes)
