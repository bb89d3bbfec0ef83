"""The journal survives kills and resumes; logs and progress reach a person without ever stopping a run."""

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from model.run import console, plots
from model.run.console import Progress, epoch_line, human_bytes, human_seconds, memory_text, train_line
from model.run.journal import Journal, read_journal
from model.run.log import open_log
from model.run.plots import plot_run
from model.runtime.terminal import printable

ROOT = Path(__file__).resolve().parents[2]
DRAW = """
import time
from model.run.log import open_log
from model.run.console import Progress, progress_note
log = open_log({logs!r}, "tiny", "run")
with Progress("training [a]", total=4000) as progress:
    for step in range(1, 5):
        progress.update(step * 1000, progress_note(2.5, 45120.0, 12 * 2**30, 20 * 2**30))
        log.info("step %d", step)
        time.sleep(0.12)
print("survived", flush=True)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def log_folder(tmp_path):
    yield tmp_path / "logs"
    for handler in list(console.LOGGER.handlers):
        console.LOGGER.removeHandler(handler)
        handler.close()


def steps(path):
    return [(record["kind"], record.get("step")) for record in read_journal(path)]


def write_all(path, *lines):
    with Journal(path) as journal:
        for kind, step in lines:
            journal.write(kind, step=step)


def run_under_terminal(code):
    """What the child draws on a pseudo terminal that is its stdout and stderr."""
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
    except OSError:  # Linux answers EIO once the child has closed its side
        return b""


def test_what_is_written_is_read_back(path):
    values = {"step": 7, "loss": 3.25, "plan": {"micro": [1, 2]}, "path": "模型/step_7", "ok": True, "bleu": None}
    with Journal(path) as journal:
        journal.write("train", **values)
    (record,) = read_journal(path)
    assert {key: record[key] for key in values} == values
    assert record["kind"] == "train" and abs(record["time"] - os.path.getmtime(path)) < 5
    assert len(str(record["time"]).split(".")[1]) <= 3


def test_each_line_reaches_the_file_at_once(path):
    with Journal(path) as journal:
        journal.write("train", step=1)
        assert steps(path) == [("train", 1)]


def test_reopening_appends(path):
    write_all(path, ("start", None), ("train", 1))
    write_all(path, ("train", 2))
    assert steps(path) == [("start", None), ("train", 1), ("train", 2)]


def test_ranks_without_a_path_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Journal(None) as journal:
        journal.write("train", step=1)
    assert list(tmp_path.iterdir()) == []


def test_floats_that_json_cannot_hold_become_null(path):
    with Journal(path) as journal:
        journal.write("train", loss=float("nan"), grad_norm=float("inf"), ranks=[1.0, float("-inf")])
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["loss"], record["grad_norm"], record["ranks"]) == (None, None, [1.0, None])


def test_floats_keep_every_bit_of_a_float32_and_no_more_digits(path):
    value = np.float32(0.1) + np.float32(0.2)
    with Journal(path) as journal:
        journal.write("train", loss=float(value))
    text = re.search(r'"loss":([^,}]+)', path.read_text()).group(1)
    assert np.float32(text) == value
    assert len(text) <= 11


def test_a_file_name_that_is_no_text_still_gives_json(path):
    with Journal(path) as journal:
        journal.write("save", path=os.fsdecode(b"model_\xff"))
    assert json.loads(path.read_bytes())["path"] == "model_\udcff"


@pytest.mark.parametrize("tail", [b'{"kind":"tr', b'{"kind":"train","step":3}', "中".encode()[:2], b"\0\0\0"])
def test_a_torn_last_line_is_ignored_and_cut_on_reopening(path, tail):
    write_all(path, ("train", 1), ("train", 2))
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [("train", 1), ("train", 2)]
    write_all(path, ("train", 4))
    assert steps(path) == [("train", 1), ("train", 2), ("train", 4)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


NO_LINES = [b'{"kind":"tr', b"\0\0", b"", b"[1]", b'{"step":1}', b'{"kind":"resume"}', b"\xff"]
NO_LINES += [b'{"kind":2,"step":1}', b'{"kind":[]}', b'{"kind":"eval","step":"1"}', b'{"kind":"resume","step":null}']


@pytest.mark.parametrize("damage", NO_LINES)
def test_a_damaged_line_in_the_middle_is_named(path, damage):
    write_all(path, ("start", None), ("train", 1))
    with path.open("ab") as file:
        file.write(damage + b"\n")
    write_all(path, ("train", 2))
    with pytest.raises(ValueError, match="line 3 "):
        read_journal(path)


def test_a_resume_voids_the_lines_of_later_steps_only(path):
    kinds = ("train", "eval", "save", "oom", "stop")
    write_all(path, ("start", None), *((kind, 10) for kind in kinds), *((kind, 11) for kind in kinds))
    write_all(path, ("start", None), ("resume", 10), ("train", 11))
    kept = [("start", None), *((kind, 10) for kind in kinds), ("start", None), ("resume", 10), ("train", 11)]
    assert steps(path) == kept


def test_an_evaluation_that_the_resumed_checkpoint_does_not_know_is_void(path):
    evaluations = [dict(kind="eval", step=step) for step in (4, 8, 8)]
    resume = dict(kind="resume", step=8, evaluated_step=4)
    with Journal(path) as journal:
        for line in (*evaluations[:2], resume, evaluations[2]):
            journal.write(**line)
    assert steps(path) == [("eval", 4), ("resume", 8), ("eval", 8)]


def test_an_evaluation_that_a_later_resume_does_not_do_again_counts(path):
    with Journal(path) as journal:
        for line in (dict(kind="eval", step=6), dict(kind="resume", step=8, evaluated_step=0)):
            journal.write(**line)
    assert steps(path) == [("eval", 6), ("resume", 8)]


def test_resumes_void_one_after_another_and_stay_themselves(path):
    write_all(path, ("train", 10), ("train", 20), ("resume", 15), ("train", 25), ("resume", 5), ("train", 6))
    assert steps(path) == [("resume", 15), ("resume", 5), ("train", 6)]


def test_log_lines_have_the_form_that_people_grep(log_folder, capsys):
    log = open_log(log_folder, "small", "runs/a %s")
    log.info(train_line({"epoch": 1, "step": 20, "loss": 3.14159, "learn_rate": 1e-4, "peak_bytes": 13 * 2**30}))
    (path,) = log_folder.iterdir()
    assert re.fullmatch(r"chat_trainer_small_\d{8}\.log", path.name)
    line = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[INFO\]: training loss: epoch:1, step:20, loss:3.1416, .*\n"
    echoed = capsys.readouterr().err
    assert re.fullmatch(line, echoed)
    assert path.read_text() == "[a %s] " + echoed


def test_each_line_of_a_log_that_runs_share_names_its_run(log_folder):
    for run_dir in ("runs/a", "b\x1b[31m/"):
        log = open_log(log_folder, "small", run_dir)
        try:
            raise OSError("no room")
        except OSError:
            log.debug("\x1b[2Jthis ended the run", exc_info=True)
    (path,) = log_folder.iterdir()
    names = [line[: line.index("] ") + 1] for line in path.read_text().splitlines()]
    assert names == ["[a]"] * (len(names) // 2) + ["[b\\x1b[31m]"] * (len(names) // 2) and len(names) >= 8
    assert r"[DEBUG]: \x1b[2Jthis ended" in path.read_text()


def test_opening_the_log_twice_does_not_double_lines(log_folder, capsys):
    open_log(log_folder, "small", "runs/a").info("first")
    open_log(log_folder, "small", "runs/a").info("second")
    (path,) = log_folder.iterdir()
    assert [line.split(": ")[1] for line in path.read_text().splitlines()] == ["first", "second"]
    assert capsys.readouterr().err.count("second") == 1


def test_a_train_line_shows_what_the_record_holds():
    record = {"epoch": 1.5, "step": 20, "loss": 3.0, "learn_rate": 2e-4, "tokens_per_second": 45120.4}
    record |= {"peak_bytes": 13 * 2**30, "grad_norm": None, "unknown": 1}
    expected = "epoch:1.5, step:20, loss:3.0000, lr:2.000e-04, grad_norm:none, tokens/s:45120, peak_memory:13.0 GiB"
    assert train_line(record) == "training loss: " + expected


def test_a_loss_that_is_not_a_number_is_shown_as_such():
    assert "loss:nan" in train_line({"step": 1, "loss": float("nan")})


def test_an_epoch_line_shows_the_epoch_and_the_best():
    record = {"epoch": 2, "avg_loss": 3.0, "val_loss": 3.2, "cur_bleu4": 0.11, "best_bleu4": 0.12, "best_epoch": 1}
    expected = "epoch:2, avg_loss:3.0000, val_loss:3.2000, cur_bleu4:0.1100, best_bleu4:0.1200, best_epoch:1"
    assert epoch_line(record) == "epoch log: " + expected


@pytest.mark.parametrize(
    ("percent", "level"), [(0, "safe"), (84.9, "safe"), (85, "edge"), (90, "edge"), (90.1, "dangerous")]
)
def test_memory_is_safe_below_85_percent_and_dangerous_above_90(percent, level):
    cap_bytes = 20 * 2**30
    assert memory_text(round(cap_bytes * percent / 100), cap_bytes).endswith(f"{percent:.0f}% {level}")


def test_amounts_read_as_a_person_writes_them():
    assert [human_bytes(count) for count in (512, 3 * 2**20, 2**30)] == ["0.5 KiB", "3.0 MiB", "1.0 GiB"]
    shown = [human_seconds(seconds) for seconds in (0.4, 59.6, 192, 18240, 183600)]
    assert shown == ["0s", "1m 00s", "3m 12s", "5h 04m", "2d 03h"]


def test_progress_is_silent_where_stderr_is_no_terminal(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}
    command = [sys.executable, "-c", DRAW.format(logs=str(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "survived\n"
    assert re.fullmatch(r"(\[[^]]+\] \[INFO\]: step \d\n){4}", done.stderr)


def test_without_a_terminal_progress_is_a_log_line_a_minute_with_the_time_left(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = iter([0, 30, 40, 70, 100, 131])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with caplog.at_level("INFO", "chat_trainer"), Progress("training", 90) as progress:
        for done in (1, 2, 5, 8, 11):  # a slow first step, then ten seconds each
            progress.update(done)
    assert caplog.messages == ["training: 5/90 steps, 14m 10s left", "training: 11/90 steps, 13m 18s left"]


def test_progress_is_live_on_a_terminal_and_log_lines_stay_whole(tmp_path):
    drawn = run_under_terminal(DRAW.format(logs=str(tmp_path)))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert "training [a]" in plain and "1,000/4,000 steps" in plain and "4,000/4,000 steps" in plain
    assert "loss 2.5000, 12.0/20.0 GiB 60% safe, 45,120 tokens/s" in plain
    assert re.search(r"1,000/4,000 steps +\S+ ", plain)
    assert len(re.findall(r"\r\[[^]]+\] \[INFO\]: step \d *\r\n", plain)) == 4
    assert "\x1b[2K" in drawn and drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l"), "the cursor comes back"


def test_a_progress_that_is_not_to_be_shown_draws_nothing_on_a_terminal():
    code = "from model.run.console import Progress\nwith Progress('a', 10, shown=False) as p: p.update(5)\nprint('end')"
    assert run_under_terminal(code) == "end\r\n"


def test_a_progress_of_unknown_total_counts():
    code = "from model.run.console import Progress\nwith Progress('tokenising', None, 'rows') as p: p.update(12345)"
    assert "12,345 rows" in run_under_terminal(code)


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}])
def test_a_run_goes_on_when_its_terminal_is_closed(tmp_path, forced):
    terminal, child_side = pty.openpty()
    code = DRAW.format(logs=str(tmp_path / "logs"))
    output = tmp_path / "stdout"
    with output.open("w") as stdout:
        # Where colour is forced, rich goes on drawing on a terminal that is gone.
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | forced
        child = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=child_side, env=environment)
    os.close(child_side)
    os.read(terminal, 1)
    os.close(terminal)
    assert child.wait(timeout=30) == 0
    assert output.read_text() == "survived\n"
    (log,) = (tmp_path / "logs").iterdir()
    assert log.read_text().count("[INFO]: step") == 4


def test_a_plot_is_drawn_where_matplotlib_is_and_not_missed_where_it_is_not(path):
    with Journal(path) as journal:
        for step in range(1, 4):
            journal.write("train", step=step, loss=3.0 / step if step < 3 else float("nan"), learn_rate=1e-4)
        journal.write("eval", step=3, loss=2.0)
    plotted = plot_run(path.parent)
    if importlib.util.find_spec("matplotlib") is None:
        assert plotted is None
    else:
        assert plotted == path.parent / "plots" / "loss.png" and plotted.read_bytes()[:4] == b"\x89PNG"


def test_missing_matplotlib_is_said_once(path):
    write_all(path, ("start", None))
    code = "import sys; sys.modules['matplotlib'] = None\nfrom model.run.plots import plot_run\nimport logging\n"
    code += f"logging.basicConfig(level='INFO')\nassert [plot_run({str(path.parent)!r}) for _ in 'ab'] == [None, None]"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("matplotlib is not installed") == 1


def test_curves_that_cannot_be_drawn_are_said_and_end_nothing(tmp_path, monkeypatch, caplog):
    def damaged(_):
        raise ValueError("metrics.jsonl line 3 is damaged")

    monkeypatch.setattr(plots, "plot_run", damaged)
    plots.try_plot(tmp_path)
    assert "no plots: metrics.jsonl line 3 is damaged" in caplog.text


def test_no_text_of_a_stranger_steers_the_terminal():
    text = "a\x1b[2J\x9b1m\r\n\x00\x7f\u202e\u2066\u200f\u2028\ud83d 的😀\\x"
    shown = r"a\x1b[2J\x9b1m\r\n\x00\x7f\u202e\u2066\u200f\u2028\ud83d 的😀\x"
    assert printable(text) == shown


def test_a_log_file_that_is_a_link_is_not_written_through(log_folder, tmp_path):
    open_log(log_folder, "small", "run").info("first")
    (path,) = log_folder.iterdir()
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    before = (tmp_path / "theirs").read_text()
    with pytest.raises(ValueError, match=r"chat_trainer_small_.*log is a link to .*: delete it"):
        open_log(log_folder, "small", "run")
    assert (tmp_path / "theirs").read_text() == before
