"""Scripts that work for minutes show it: a bar on a terminal, lines elsewhere."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pyte
import pytest

from model.data.tokenizer import PROBE
from model.display import meanwhile
from scripts import prepare_data, train_tokenizer
from tests.display.test_console import _read

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with 20,000 pairs."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps(dict(prompt=f"{PROBE[i % 50 : i % 50 + 4]} {i}", response="r")) for i in range(20_000)]
    Path("a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "script, words, said",
    [
        (prepare_data, ["--output=o.parquet", "--report"], ["reading a.jsonl (1 of 1): ", "measuring o.parquet: "]),
        (train_tokenizer, ["--output_dir=t", "--vocab_size=457"], ["reading a.jsonl (1 of 1): ", "learning the merg"]),
    ],
)
def test_without_a_terminal_a_script_prints_lines_with_rows_and_time(folder, monkeypatch, capsys, script, words, said):
    monkeypatch.setattr(meanwhile, "LINE_SECONDS", 0.001)  # in place of ten
    monkeypatch.setattr(sys, "argv", ["script", "a.jsonl", *words])
    assert not script.main()
    name, lines = script.__name__.split(".")[1], capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"{name}: ") and line.endswith("s") for line in lines)
    assert all(any(f"{name}: {part}" in line for line in lines) for part in said), lines[:3]


def test_on_a_terminal_a_script_draws_a_bar_which_is_gone_at_its_end(folder):
    terminal, child_side = pty.openpty()
    words = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "a.jsonl", "--output=o.parquet"]
    env = os.environ | dict(TERM="xterm", COLUMNS="120", CHAT_LANG="en")
    child = subprocess.Popen(words, stdout=child_side, stderr=child_side, env=env)
    os.close(child_side)
    drawn = b""
    while chunk := _read(terminal):
        drawn += chunk
    os.close(terminal)
    assert child.wait(timeout=30) == 0
    assert b"reading a.jsonl (1 of 1)" in drawn and b"rows" in drawn and "━".encode() in drawn
    screen = pyte.Screen(120, 24)
    pyte.ByteStream(screen).feed(drawn)
    shown = [line.rstrip() for line in screen.display if line.strip()]
    assert shown[-1].startswith("o.parquet: 20,000 pairs written") and len(shown) == 4, shown
