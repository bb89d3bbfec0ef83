"""Starts a module of this project as a process of its own, from whatever folder. Standard library only."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start_module(name, *words, env=None, **options):
    """Start `python -m name words` and return its subprocess.Popen, which takes the `options`.

    `env` replaces this process's environment.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", name, *map(str, words)]  # -P: no folder of the user's hides a module
    return subprocess.Popen(command, env=(os.environ if env is None else env) | dict(PYTHONPATH=path), **options)
