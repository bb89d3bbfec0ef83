"""The command line of a LoRA guide, on a tiny Qwen and Alpaca's rows: it trains, goes on, merges and answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from model.data.tokenizer import PROBE
from scripts.merge_lora import main as merge_lora
from tests.commands.test_guide_flags import CAREFUL, SCHEMES
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.guide_cases import CASES, row_of
from tests.ranks import free_port
from tests.tiny import journal

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_lora.py"
GUIDE = SCHEMES.format(**CAREFUL).replace("MODEL", "models/qwen").replace("DATA", "./data/dataset").split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a Qwen2 of transformers (biases, grouped heads, an untied head) and a folder of Alpaca's rows."""
    home = tmp_path_factory.mktemp("guide")
    tokenizer = make_qwen_tokenizer(home / "models" / "qwen")
    config = Qwen2Config(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=tokenizer.eos_id, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(home / "models" / "qwen")
    rows = [
        dict(instruction=PROBE[i : i + 4], input="" if i % 2 else PROBE[i : i + 5], output=PROBE[i + 2 : i + 9])
        for i in range(40)
    ]
    (home / "data" / "dataset").mkdir(parents=True)
    (home / "data" / "dataset" / "alpaca.json").write_text(json.dumps(rows, ensure_ascii=False))
    return home


def run(home, *words, fault="", asked=None):
    """Run a Python command in `home`; returns the completed process."""
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CHAT_FAULT=fault, CUDA_VISIBLE_DEVICES="")
    words = [sys.executable, *map(str, words)]
    return subprocess.run(words, cwd=home, env=env, input=asked, capture_output=True, text=True, timeout=120)


def test_the_command_of_a_guide_trains_goes_on_under_torchrun_merges_and_answers(home):
    killed = run(home, SCRIPT, *GUIDE, fault="update:0:8:kill")  # there is a checkpoint after each epoch of three steps
    assert killed.returncode == -9, killed.stderr
    torchrun = "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()
    done = run(home, *torchrun, SCRIPT, *GUIDE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--use_4bit: base_precision=nf4\n") == 1
    assert ": resuming, the newest checkpoint is step_" in done.stdout + done.stderr
    stop = journal(home / "output", "stop")[-1]
    assert (stop["step"], stop["reason"]) == (6 + 2, "finished")  # the last epoch in two steps of 32
    again = run(home, SCRIPT, *GUIDE)
    text = "3 asked for; raise --epochs to train longer, or start another run"
    assert again.returncode == 0 and text in again.stdout + again.stderr, again.stderr
    assert merge_lora([str(home / "output"), str(home / "merged")]) == 0
    before, after = (load_file(home / name / "model.safetensors") for name in ("models/qwen", "merged"))
    name = "model.layers.1.mlp.down_proj.weight"
    assert before.keys() == after.keys() and not torch.equal(before[name], after[name])
    answered = run(home, ROOT / "scripts" / "chat.py", "merged", "--max_new_tokens", "4", asked="你好\n")
    assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr


def test_the_table_of_the_guides_is_what_the_plan_predicts():
    for language in ("en", "zh"):
        rows = (ROOT / "docs" / "guide" / language / "lora.md").read_text(encoding="utf-8").splitlines()
        table = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows if row.startswith("| ")]
        cells = table[-len(CASES)], table[-1]
        expected = [row_of(case) for case in (CASES[0], CASES[-1])]
        for found, predicted in zip(cells, expected, strict=True):
            assert (found[1:4], found[5], found[7]) == (predicted[1:4], predicted[5], predicted[7])
