"""transformers 4.57 in a folder of its own, in front of the environment's other packages, and what it reads."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PACKAGES = "transformers==4.57.*", "tokenizers>=0.22,<0.23", "huggingface_hub>=0.34,<1"  # torch is the environment's
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "chat_trainer_tests" / "transformers-4.57"
READ = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoTokenizer, __version__
from tests.published import ASKED, TEXT, logits_of
assert __version__.startswith("4.57")
found = {}
for directory in map(Path, sys.argv[2:]):
    found[str(directory)] = logits_of(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found[f"{directory} ids"] = torch.tensor(tokenizer(TEXT).input_ids)
    if tokenizer.chat_template:
        found[f"{directory} asked"] = torch.tensor(tokenizer.apply_chat_template(ASKED, add_generation_prompt=True))
save_file(found, sys.argv[1])
"""


def install():
    """Install it unless it is there; skips the test with pip's reason if that fails."""
    if (FOLDER / "transformers").is_dir():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as draft:
        line = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{draft}/site", *PACKAGES]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip("pip did not install transformers 4.57 within two minutes")
        if done.returncode:
            pytest.skip(f"pip cannot install transformers 4.57: {done.stderr.strip()[-300:]}")
        if not FOLDER.exists():
            os.rename(f"{draft}/site", FOLDER)


def read_by_older(directories, path):
    """What transformers 4.57 reads in these directories, written to `path`: {directory: logits, "… ids": of TEXT,
    "… asked": ids of ASKED}."""
    from safetensors.torch import load_file

    install()
    env = os.environ | dict(PYTHONPATH=f"{FOLDER}{os.pathsep}{Path(__file__).parents[1]}", OMP_NUM_THREADS="1")
    line = [sys.executable, "-c", READ, str(path), *map(str, directories)]
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return load_file(path)
