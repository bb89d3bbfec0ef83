"""The progress script, run as a user runs it, reports the state of a run from its journal."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.display.test_live import Terminal

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_training_progress.py"
MINUTE = 60


def check(*args, folder):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)], cwd=folder, capture_output=True, text=True, timeout=60
    )


def rows_of(done):
    assert done.returncode == 0, done.stderr
    return {name: text.strip() for name, text in (line.split("  ", 1) for line in done.stdout.splitlines())}


def train(step, time_, loss=None):
    return {
        **{"kind": "train", "time": time_, "step": step, "epoch": step / 500, "loss": loss or 5 - step / 1000},
        **{"learn_rate": 2e-4, "grad_norm": 1.0, "pairs_seen": step * 64, "tokens_per_second": 45120.4},
        **{"step_seconds": 9.9, "peak_bytes": (13 if step == 300 else 12) * 2**30},
    }


def run_lines(now):
    """A run of 1,000 steps at 2 s per step, resumed at step 300 after a crash at 340, now at step 500."""
    start = {"kind": "start", "time": now - 2000, "total_steps": 1000, "total_pairs": 64000, "epochs": 7.41121495}
    start["epoch_pairs"] = 21622  # max_steps ends the run within an epoch
    yield start
    yield {"kind": "resume", "time": now - 2000, "step": 0}
    yield from (train(step, now - 2000 + 2 * step) for step in range(20, 341, 20))
    yield {"kind": "oom", "time": now - 1500, "step": 260, "where": "backward", "rank": 1}
    yield {"kind": "save", "time": now - 1400, "step": 300, "path": "checkpoints/step_00000300", "seconds": 2.0}
    yield {"kind": "eval", "time": now - 1400, "step": 300, "loss": 3.9, "bleu": 10.5, "chrf": 20.25}
    yield start | {"time": now - 900}
    yield {"kind": "resume", "time": now - 900, "step": 300}
    yield from (train(step, now - 500 * 2 + 2 * step) for step in range(320, 501, 20))
    answered = {"loops": 0.44, "ended": 0.81, "length_ratio": 0.5, "distinct_2": 0.4, "nats_per_char": 2.75}
    answered["samples"] = [{"question": "how\nmany?", "answer": "two", "reference": "2"}]
    yield {"kind": "eval", "time": now, "step": 500, "loss": 4.1, "bleu": None, "chrf": None} | answered


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "model_save" / "pretrain"


def write(run_dir, lines):
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_of_a_running_run_has_every_row(run_dir, tmp_path):
    write(run_dir, run_lines(time.time()))
    rows = rows_of(check(run_dir, folder=tmp_path))
    assert rows.pop("state").startswith("training, last line ")
    assert rows.pop("checkpoint").startswith("checkpoints/step_00000300 (step 300, 23m ")
    assert rows == {
        "run": str(run_dir),
        "step": "500 of 1,000 (50.0%)",
        "epochs": "1.48 of 7.41",
        "pairs seen": "32,000 of 64,000 (50.0%)",
        "training loss": "4.5000 (step 400: 4.6000)",
        "learning rate": "2.000e-04",
        "speed": "45,120 tokens/s",
        "time left": "16m 40s",
        "peak memory": "13.0 GiB (by step 300)",
        "validation loss": "best 3.9000 (step 300), last 4.1000 (step 500)",
        "BLEU": "10.5000 (step 300)",
        "chrF": "20.2500 (step 300)",
        "answers": "loops 44.0%, ended 81.0%, length/ref 0.50, distinct-2 0.400",
        "nats/character": "2.7500",
        "answer 1": "how many? → two",
        "out of memory": "1, last at step 260 in backward",
        "skipped steps": "0",
        "resumes": "1, last at step 300",
    }


@pytest.mark.parametrize(
    ("reason", "text"), [("finished", "finished"), ("asked", "stopped on request"), ("failed", "failed")]
)
def test_the_state_of_a_run_that_ended_is_the_reason(run_dir, tmp_path, reason, text):
    now = time.time() - 90 * MINUTE
    write(run_dir, [*run_lines(now), {"kind": "stop", "time": now, "step": 500, "reason": reason}])
    rows = rows_of(check(run_dir, folder=tmp_path))
    assert rows["state"] == f"{text} at step 500"
    assert "time left" not in rows


def test_a_run_that_was_stopped_and_resumed_is_training(run_dir, tmp_path):
    now = time.time()
    lines = [{"kind": "start", "time": now - 99}, train(20, now - 60)]
    lines += [{"kind": "stop", "time": now - 50, "step": 20, "reason": "asked"}]
    lines += [{"kind": "start", "time": now - 9}, {"kind": "resume", "time": now - 8, "step": 20}]
    write(run_dir, lines)
    assert rows_of(check(run_dir, folder=tmp_path))["state"].startswith("training")


def test_a_run_that_was_never_stopped_has_no_resumes(run_dir, tmp_path):
    start = [{"kind": "start", "time": time.time()}, {"kind": "resume", "time": time.time(), "step": 0}]
    write(run_dir, [*start, train(20, time.time())])
    assert rows_of(check(run_dir, folder=tmp_path))["resumes"] == "0"


def test_a_run_that_wrote_nothing_for_30_minutes_is_silent(run_dir, tmp_path):
    write(run_dir, run_lines(time.time() - 30 * MINUTE))
    assert rows_of(check(run_dir, folder=tmp_path))["state"].startswith("silent for 30m ")


def test_a_run_that_always_writes_rarely_is_not_silent(run_dir, tmp_path):
    now = time.time() - 30 * MINUTE
    write(run_dir, [{"kind": "start", "time": now - 3600}, train(20, now - 1800), train(40, now)])
    assert rows_of(check(run_dir, folder=tmp_path))["state"].startswith("training")


def test_a_run_without_a_train_line_has_a_report(run_dir, tmp_path):
    write(run_dir, [{"kind": "start", "time": time.time(), "total_steps": 10}])
    rows = rows_of(check(run_dir, folder=tmp_path))
    assert rows["state"].startswith("training") and rows["checkpoint"] == "none yet"


def test_the_error_of_a_failed_save_is_shown_beside_the_last_checkpoint(run_dir, tmp_path):
    full = {"kind": "save", "time": time.time(), "step": 500, "error": "[Errno 28] the disk is full"}
    write(run_dir, [{"kind": "start", "time": time.time()}, full])
    row = rows_of(check(run_dir, folder=tmp_path))["checkpoint"]
    assert row == "none yet; the save of step 500 failed: " + full["error"]
    write(run_dir, [*run_lines(time.time()), full])
    row = rows_of(check(run_dir, folder=tmp_path))["checkpoint"]
    assert row.startswith("checkpoints/step_00000300 (step 300, 23m ") and row.endswith("failed: " + full["error"])


def test_a_loss_of_null_is_shown_as_not_finite(run_dir, tmp_path):
    write(run_dir, [{"kind": "start", "time": time.time()}, train(20, time.time()) | {"loss": None}])
    assert rows_of(check(run_dir, folder=tmp_path))["training loss"] == "not finite"


def test_an_incomplete_last_line_is_ignored(run_dir, tmp_path):
    write(run_dir, run_lines(time.time()))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"tra')
    assert rows_of(check(run_dir, folder=tmp_path))["step"] == "500 of 1,000 (50.0%)"


def test_without_an_argument_the_run_with_the_newest_journal_is_shown(run_dir, tmp_path):
    write(run_dir, run_lines(time.time()))
    write(run_dir.parent / "sft", run_lines(time.time()))
    newest = time.time() + 10 * 365 * 86400
    os.utime(run_dir / "metrics.jsonl", (newest, newest))
    assert rows_of(check(folder=tmp_path))["run"] == str(run_dir)


def refused(done):
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr


def test_a_missing_journal_is_exit_2_and_the_message_says_what_to_type(tmp_path):
    assert "name a run directory" in refused(check(tmp_path / "nowhere", folder=tmp_path))


def test_a_run_that_has_not_written_its_first_line_is_starting(run_dir, tmp_path):
    run_dir.mkdir(parents=True)
    assert "name a run directory" in refused(check(run_dir, folder=tmp_path))
    (run_dir / "run.lock").touch()
    assert rows_of(check(folder=tmp_path))["state"].startswith("no line in the journal yet; started ")
    write(run_dir, [])
    assert rows_of(check(run_dir, folder=tmp_path))["state"].startswith("no line in the journal yet; started ")


def test_several_runs_are_a_table_and_one_picture(run_dir, tmp_path):
    other, out = run_dir.parent / "sft", tmp_path / "both.png"
    write(run_dir, run_lines(time.time()))
    write(other, [{"kind": "start", "time": time.time(), "total_steps": 40}, train(20, time.time())])
    done = check(run_dir, other, "--plot", out, folder=tmp_path)
    said, titles, *lines = done.stdout.splitlines()
    assert done.returncode == 0 and said == str(out) and titles.split()[:3] == ["run", "state", "step"]
    assert [line.split()[0] for line in lines] == [str(run_dir), str(other)]
    assert "500 of 1,000 (50.0%)" in lines[0] and "20 of 40 (50.0%)" in lines[1]
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "no run in" in refused(check(run_dir, tmp_path, "--plot", out, folder=tmp_path))
    assert "--plot=a.foo: no picture" in (said := refused(check(run_dir, "--plot", "a.foo", folder=tmp_path)))
    assert said.endswith("type --plot=a.png\n")


def test_a_damaged_journal_is_exit_2_and_the_message_names_the_line(run_dir, tmp_path):
    write(run_dir, run_lines(time.time()))
    journal = run_dir / "metrics.jsonl"
    journal.write_text("{\n" + journal.read_text())
    assert "line 1 is damaged" in refused(check(run_dir, folder=tmp_path))


@pytest.mark.parametrize(
    "line",
    (
        {"kind": "train", "step": 510, "time": 0},
        train(510, 0) | {"loss": "low"},
        {"kind": "eval", "step": 510, "time": -1e308 * 10},
    ),
)
def test_a_line_with_missing_or_wrong_fields_is_exit_2(run_dir, tmp_path, line):
    write(run_dir, [*run_lines(time.time()), line])
    assert "metrics.jsonl has a line that no run writes" in refused(check(run_dir, folder=tmp_path))


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e"


def test_control_characters_in_a_journal_or_a_path_are_escaped(tmp_path):
    run_dir, now = tmp_path / f"run{HOSTILE}", time.time()
    start = {"kind": "start", "time": now, "epochs": HOSTILE}
    events = [{"kind": "oom", "step": 20, "where": HOSTILE}, {"kind": "save", "step": 20, "error": HOSTILE}]
    stop = {"kind": "stop", "step": 20, "reason": HOSTILE}
    write(run_dir, [start, train(20, now), *(line | {"time": now} for line in (*events, stop))])
    done = check(run_dir, folder=tmp_path)
    assert done.returncode == 0 and done.stdout.count(r"\x1b]0;title\x07\x1b[2J\u202e") == 5, done.stdout + done.stderr
    write(run_dir, [start, train(20, now) | {"loss": HOSTILE}])
    lines = done.stdout + refused(check(run_dir, folder=tmp_path)) + refused(check(HOSTILE, folder=tmp_path))
    assert all(c.isprintable() or c == "\n" for c in lines)


@pytest.mark.parametrize("options", ([], ["--watch", "0.01"]))
def test_a_closed_pipe_ends_the_script_without_an_error(run_dir, tmp_path, options):
    write(run_dir, run_lines(time.time()))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, SCRIPT, run_dir, *options], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_watch_interval_of_zero_is_exit_2(run_dir, tmp_path):
    write(run_dir, run_lines(time.time()))
    assert "--watch=0" in refused(check(run_dir, "--watch", "0", folder=tmp_path))


def test_watching_shows_new_lines_until_interrupted(run_dir, tmp_path):
    write(run_dir, run_lines(time.time()))
    command = [sys.executable, "-u", SCRIPT, run_dir, "--watch", "0.2"]
    watcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    shown = iter(watcher.stdout.readline, "")
    assert any("500 of 1,000" in line for line in shown)
    write(run_dir, [*run_lines(time.time()), train(520, time.time())])
    assert any("520 of 1,000" in line for line in shown)
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=30)
    assert watcher.returncode == 0


def run_command(*line):
    os.execv(str(line[0]), list(map(str, line)))


def test_the_same_screen_serves_another_terminal_after_the_run(tmp_path):
    train = dict(kind="train", time=time.time(), step=9, epoch=1, loss=2.5, learn_rate=1e-3, pairs_seen=72)
    start = dict(kind="start", time=time.time(), total_steps=9, epochs=1)
    stop = dict(kind="stop", time=time.time(), step=9, reason="finished")
    lines = [json.dumps(line) + "\n" for line in (start, train | dict(tokens_per_second=5.0), stop)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    line = (sys.executable, SCRIPT, tmp_path, "--watch")
    with closing(Terminal(tmp_path, run_command, *line, env=dict(CHAT_LANG="zh"))) as shell:
        shell.wait_for(" ?".join("已完成，第 9 步"))  # pyte puts an empty cell after a wide character
        assert shell.is_covered
        shell.type("\x03")
        assert shell.wait_for(r"code=(-?\d+)\.", 10)[1] == "0"
        shell.wait_for("状 ?态 +" + " ?".join("已完成，第 9 步"))
        shell.check_usable()
