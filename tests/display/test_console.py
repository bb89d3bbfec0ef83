"""Log lines are readable, and the progress bar never ends a run."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from model.display import console
from model.display.catalogue import CATALOGUE, texts_here
from model.display.console import (
    EPOCH_FIELDS,
    TRAIN_FIELDS,
    Progress,
    epoch_line,
    human_bytes,
    human_seconds,
    memory_text,
    sample_line,
    train_line,
)
from model.display.view import is_shown

ROOT = Path(__file__).resolve().parents[2]
DRAW = """
import time
from model.display.log_file import open_log
from model.display.console import Progress, progress_note
log = open_log({logs!r}, "tiny", "run")
with Progress("training [a]", total=4000) as progress:
    for step in range(1, 5):
        progress.update(step * 1000, progress_note(2.5, 45120.0, 12 * 2**30, 20 * 2**30))
        log.info("step %d", step)
        time.sleep(0.12)
print("survived", flush=True)
"""


def run_under_terminal(code):
    """The output of a child process whose stdout and stderr are a pseudo terminal."""
    terminal, child_side = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=child_side, stderr=child_side, env=environment)
    os.close(child_side)
    drawn = b""
    while chunk := _read(terminal):
        drawn += chunk
    os.close(terminal)
    assert child.wait(timeout=30) == 0, drawn.decode()
    return drawn.decode()


def _read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises EIO once the child has closed its side
        return b""


def test_a_train_line_shows_the_known_fields_of_the_record():
    record = {"epoch": 1.5, "step": 20, "loss": 3.0, "learn_rate": 2e-4, "tokens_per_second": 45120.4}
    record |= {"peak_bytes": 13 * 2**30, "grad_norm": None, "unknown": 1}
    expected = "epoch:1.5, step:20, loss:3.0000, lr:2.000e-04, grad_norm:none, tokens/s:45120, peak_memory:13.0 GiB"
    assert train_line(record) == "training loss: " + expected


def test_a_nan_loss_is_shown_as_nan():
    assert "loss:nan" in train_line({"step": 1, "loss": float("nan")})


def test_an_epoch_line_shows_the_epoch_and_the_best():
    record = {"epoch": 2, "val_loss": 3.2, "cur_bleu4": 0.11, "best_val_loss": 3.1, "best_step": 100}
    expected = "epoch:2, val_loss:3.2000, cur_bleu4:0.1100, best_val_loss:3.1000, best_step:100"
    assert epoch_line(record) == "epoch log: " + expected


def test_log_lines_are_chinese_where_the_reader_is_and_the_screen_knows_them_in_both_languages(monkeypatch):
    log = "[2026-01-02 03:04:05.678] [INFO]: "
    for language in CATALOGUE:
        monkeypatch.setenv("CHAT_LANG", language)
        lines = [
            train_line({key: 1.0 for key, _ in TRAIN_FIELDS.values()}),
            sample_line(dict(question="问", answer="答")),
        ]
        lines.append(epoch_line({key: 1.0 for key, _ in EPOCH_FIELDS.values()} | {"averaged": False, "loss": None}))
        assert all(is_shown(log + line) for line in lines)
    assert lines[0].startswith("训练：轮:1, 步:1.0, 损失:1.0000, ") and "所评:权重, " in lines[2]
    assert not re.search("[a-z_]{4}", "".join(lines).replace("distinct", "")), lines


@pytest.mark.parametrize(
    ("percent", "level"), [(0, "safe"), (84.9, "safe"), (85, "edge"), (90, "edge"), (90.1, "dangerous")]
)
def test_memory_is_safe_below_85_percent_and_dangerous_above_90(percent, level):
    cap_bytes = 20 * 2**30
    assert memory_text(round(cap_bytes * percent / 100), cap_bytes).endswith(f"{percent:.0f}% {level}")


def test_bytes_and_seconds_are_readable():
    assert [human_bytes(count) for count in (512, 3 * 2**20, 2**30)] == ["0.5 KiB", "3.0 MiB", "1.0 GiB"]
    shown = [human_seconds(seconds) for seconds in (0.4, 59.6, 192, 18240, 183600)]
    assert shown == ["0s", "1m 00s", "3m 12s", "5h 04m", "2d 03h"]


def test_no_progress_bar_is_drawn_if_stderr_is_not_a_terminal(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}
    command = [sys.executable, "-c", DRAW.format(logs=str(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "survived\n"
    assert re.fullmatch(r"(\[[^]]+\] \[INFO\]: step \d\n){4}", done.stderr)


def test_without_a_terminal_progress_is_one_log_line_per_minute_with_the_time_left(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("CHAT_LANG", "zh")
    now = iter([0, 30, 40, 70, 100, 131, 0, 30, 90])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(now)))
    tokenising = texts_here()("progress.tokenising", names="a.jsonl")
    note = console.progress_note(2.5, 45120.0, 12 * 2**30, 20 * 2**30)
    with caplog.at_level("INFO", "chat_trainer"), Progress("training", 90) as progress:
        for done in (1, 2, 5, 8, 11):  # a slow first step, then ten seconds each
            progress.update(done, note)
    with caplog.at_level("INFO", "chat_trainer"), Progress(tokenising, None, "rows") as progress:
        for done in (5, 65):
            progress.update(done)
    said = "损失 2.5000, 12.0/20.0 GiB 60% 安全, 45,120 词元/秒, 剩余 "
    assert caplog.messages == [
        f"训练中: 5/90 步, {said}14 分 10 秒", f"训练中: 11/90 步, {said}13 分 18 秒", "分词 a.jsonl: 65 行, 1 行/秒"
    ]  # fmt: skip


def test_a_terminal_shows_a_live_progress_bar_and_intact_log_lines(tmp_path):
    drawn = run_under_terminal(DRAW.format(logs=str(tmp_path)))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert "training [a]" in plain and "1,000/4,000 steps" in plain and "4,000/4,000 steps" in plain
    assert "loss 2.5000, 12.0/20.0 GiB 60% safe, 45,120 tokens/s" in plain
    assert re.search(r"1,000/4,000 steps +\S+ ", plain)
    assert len(re.findall(r"\r\[[^]]+\] \[INFO\]: step \d *\r\n", plain)) == 4
    assert "\x1b[2K" in drawn and drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l"), "the cursor comes back"


def test_a_hidden_progress_bar_draws_nothing_on_a_terminal():
    code = "from model.display.console import Progress\nwith Progress('a', 10, shown=False) as p: p.update(5)\n"
    code += "print('end')"
    assert run_under_terminal(code) == "end\r\n"


def test_a_progress_bar_of_unknown_total_shows_the_count():
    code = "from model.display.console import Progress\nwith Progress('tokenising', None, 'rows') as p: p.update(12345)"
    assert "12,345 rows" in run_under_terminal(code)
    twice = "import time\nwith Progress('tokenising', None, 'rows') as p: p.update(5); time.sleep(0.2); p.update(1005)"
    assert re.search(r"1,005 rows.* [\d,]+ rows/s", run_under_terminal(code.splitlines()[0] + "\n" + twice))


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}])
def test_a_run_goes_on_after_its_terminal_is_closed(tmp_path, forced):
    terminal, child_side = pty.openpty()
    code = DRAW.format(logs=str(tmp_path / "logs"))
    output = tmp_path / "stdout"
    with output.open("w") as stdout:
        # With FORCE_COLOR, rich keeps drawing on a closed terminal.
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | forced
        child = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=child_side, env=environment)
    os.close(child_side)
    os.read(terminal, 1)
    os.close(terminal)
    assert child.wait(timeout=30) == 0
    assert output.read_text() == "survived\n"
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().count("[INFO]: step") == 4
