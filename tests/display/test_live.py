"""A real run on a real terminal: the screen is read back, and nothing that is killed leaves a mess.

pyte is the terminal's emulator. A process leads the terminal's session and runs a command in its foreground, as a shell
does.
"""

import fcntl
import importlib
import math
import os
import pty
import re
import signal
import struct
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyte
import pytest
import torch

from model.display.live import NoScreen, Pacing, screen_of
from model.display.run_report import rows_of
from model.runtime import fault_injection
from model.runtime.watchdog import watch_signals
from tests.ranks import fork, free_port
from tests.tiny import journal, words
from train_low_mem import main

ALTERNATE = 1049 << 5  # pyte's number of the private mode
LONG = dict(epochs=10_000, save_steps=100_000, dropout=0.1)
MEASURE_SECONDS = 5
MAX_CPU_SHARE = 0.02


def lead(terminal, folder, env, function, args):
    """Run `function(*args)` in the foreground of `terminal` and print its exit code there, then wait to be killed."""
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(descriptor, number)
    os.chdir(folder)
    os.environ.update(dict(TERM="xterm-256color", OMP_NUM_THREADS="1") | env)
    for number in (signal.SIGTTOU, signal.SIGHUP):  # the second: the leader outlives its terminal, to be found
        signal.signal(number, signal.SIG_IGN)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpgrp())
        for number in (signal.SIGTTOU, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os._exit(function(*args))
    _, status = os.waitpid(pid, 0)
    os.tcsetpgrp(0, os.getpgrp())
    print(f"code={os.waitstatus_to_exitcode(status)}.", flush=True)
    time.sleep(600)


def train(line):
    importlib.reload(fault_injection)  # read CHAT_FAULT
    torch.set_num_threads(1)
    watch_signals()
    return main(line)


def train_through_hangup(line):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    return train(line)


def train_on_two_ranks(line, port):
    """As a launcher does: each rank in a session of its own, which has no terminal."""
    pids = []
    for rank in map(str, range(2)):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.setsid()
            launched = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(launched)
            os._exit(train(line))
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


class Terminal:
    """A terminal of `columns` x `lines` on which `function(*args)` runs in `folder`."""

    def __init__(self, folder, function, *args, columns=120, lines=32, env=None):
        self.screen = pyte.Screen(columns, lines)
        self._stream, self._lock = pyte.ByteStream(self.screen), threading.Lock()
        self._fd, far_side = pty.openpty()
        self.resize(columns, lines)
        self.shell = fork(lead, os.ttyname(far_side), folder, env or {}, function, args)
        threading.Thread(target=self._read, daemon=True).start()
        self._descriptors = (self._fd, far_side)  # the far side too: what the last process wrote would be lost

    def _read(self):
        with suppress(OSError):  # the shell has ended
            while data := os.read(self._fd, 65536):
                with self._lock:
                    self._stream.feed(data)

    def resize(self, columns, lines):
        with self._lock:
            self.screen.resize(lines, columns)
            self.screen.reset()
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text):
        os.write(self._fd, text.encode())

    @property
    def text(self):
        with self._lock:  # pyte's `display` fails where half a wide character is overwritten
            rows = [self.screen.buffer[y] for y in range(self.screen.lines)]
            return "\n".join("".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in rows)

    @property
    def is_covered(self):
        return ALTERNATE in self.screen.mode

    def wait_for(self, pattern, seconds=60):
        """The first match of `pattern` on the screen."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"no {pattern} on the terminal:\n{self.text}"
            time.sleep(0.05)
        return found

    def check_usable(self):
        """The cursor is visible, what stood there before the screen is shown, and typed characters are echoed."""
        deadline = time.monotonic() + 5
        while (self.is_covered or self.screen.cursor.hidden) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not self.is_covered and not self.screen.cursor.hidden
        self.type("echoed")
        self.wait_for("echoed", 5)

    def processes(self):
        """Those that the leader started; the first is the run."""
        return psutil.Process(self.shell.pid).children(recursive=True)

    def drawing(self):
        """The process that draws."""
        (found,) = (process for process in self.processes() if "model.display.watch" in process.cmdline())
        return found

    def close(self):
        for process in (*self.processes(), self.shell):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.shell.join()
        self.hang_up()

    def hang_up(self):
        """Close the terminal, as a lost connection does."""
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.fixture
def terminal(home):
    opened = []

    def open_terminal(function, *args, **options):
        opened.append(Terminal(home, function, *args, **options))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def count_writes(path, seconds):
    """How often the file was replaced in so many seconds."""
    seen, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            identity = (path.stat().st_ino, path.stat().st_mtime_ns)
            seen += [identity] if identity not in seen[-1:] else []
        time.sleep(0.01)
    return len(seen) - 1


ROWS = (
    r"shown · .+ 1 x CPU .+ (training|evaluating)", r"step \d+/[\d,]+ ", r"\n 0 +CPU +0\.\d", "learning rate",
    "data wait", r"\d tokens/s, [\d.]+ pairs/s", "time left +.+ of this epoch", "next evaluation +in",
    "last save +step", r"host memory +[\d.]+/[\d.]+ GiB", "0 out of memory", "over-fit gap +[+-]",
    r"validation loss +[\d.]+, best",
    "training loss: epoch", "Ctrl.C stops the run",
)  # fmt: skip


def test_the_pace_is_known_from_the_second_step_on_and_leaves_out_steps_that_were_left_out():
    pacing = Pacing(torch.device("cpu"), 0)
    for place, (loss, seconds) in enumerate([(3.0, 60.0), (2.0, 2.0), (math.nan, 2.0), (1.0, 2.0)]):
        note, pace = pacing.after(SimpleNamespace(tokens=100, step_seconds=seconds, loss=torch.tensor(loss)))
        assert (pace is None and not note) if place == 0 else pace.loss == (3.0, 2.0, 2.0)[place - 1]
        pacing._looked_at -= 1
    assert (pace.tokens_per_second, pace.step_seconds) == (50.0, 2.0), "without the first step, which compiles"
    assert note == "loss 2.0000, 50 tokens/s"


def test_a_run_has_its_screen_until_ctrl_c_and_ends_with_a_checkpoint_and_plain_lines(home, terminal):
    shell = terminal(train, words(output_dir="shown", **LONG))
    for row in ROWS:
        shell.wait_for(row)
    assert shell.is_covered and shell.screen.cursor.hidden
    screen = shell.drawing()
    spent, started = sum(screen.cpu_times()[:2]), time.monotonic()
    writes = count_writes(home / "shown" / "status_rank0.json", MEASURE_SECONDS)
    share = (sum(screen.cpu_times()[:2]) - spent) / (time.monotonic() - started)
    assert share <= MAX_CPU_SHARE and 2 <= writes <= 2 * MEASURE_SECONDS + 1  # one may fall on each end
    shell.resize(80, 24)
    shell.wait_for(r"(?s)shown · .*incidents.*Ctrl.C stops the run", 5)
    shell.type("\x03")
    assert shell.wait_for(r"code=(-?\d+)\.")[1] == "0"
    shell.wait_for("SIGINT: stopping after this step")
    step = int(shell.wait_for(r"stopped on request at step ([\d,]+)")[1].strip(",").replace(",", ""))
    assert (home / "shown" / "checkpoints" / "LATEST").read_text() == f"step_{step:08d}"
    shell.check_usable()
    assert not (home / "shown" / "terminal.log").exists()
    (log,) = (home / "logs").glob("*.log")
    assert "training loss: epoch" in log.read_text() and "stopped on request at step" in log.read_text()


def test_loss_speed_and_time_left_are_shown_before_the_first_train_line_and_that_the_run_is_stopping(home, terminal):
    line = words(output_dir="stopping", logging_steps=100_000, **LONG)
    shell = terminal(train, line, env=dict(CHAT_FAULT="forward:0:5:slow"))
    shell.wait_for(r" step 4/")
    for row in (r"training loss +\d\.\d{4}\s", r"speed +[\d,]+ tokens/s", r"time left +\d"):
        shell.wait_for(row, 5)
    assert not journal(home / "stopping", "train")
    rows = rows_of(home / "stopping")
    assert rows["state"].startswith("training") and rows["step"].startswith("4 of ")
    assert float(rows["training loss"]) > 0 and rows["speed"].endswith(" tokens/s") and rows["time left"]
    shell.type("\x03")
    shell.wait_for(r"stopping \.\.\. a checkpoint is written first", 5)
    assert shell.is_covered
    assert shell.wait_for(r"code=(-?\d+)\.")[1] == "0"


def test_that_there_is_no_terminal_for_the_screen_is_told_in_the_reader_s_language(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CHAT_LANG", "zh")
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    assert isinstance(screen_of(SimpleNamespace(is_main=True, rank=0, local_rank=0), tmp_path, "on"), NoScreen)
    assert caplog.messages == ["--screen=on：stderr 不是终端，只有普通的行"]


def test_if_the_screen_is_killed_the_run_goes_on_with_plain_lines(terminal):
    shell = terminal(train, words(output_dir="killed", **LONG))
    shell.wait_for(r"training loss +\d")
    shell.drawing().kill()
    shell.wait_for("the screen has ended; the run goes on with plain lines", 10)
    shell.wait_for(r"INFO\]: training loss: epoch", 10)
    assert not shell.is_covered
    shell.type("\x03")
    assert shell.wait_for(r"code=(-?\d+)\.")[1] == "0"
    shell.check_usable()


def test_if_the_run_is_killed_the_screen_restores_the_terminal_and_shows_the_last_lines(home, terminal):
    shell = terminal(train, words(output_dir="lost", **LONG))
    shell.wait_for(r"training loss +\d")
    screen = shell.drawing()
    shell.processes()[0].kill()
    screen.wait(5)
    shell.check_usable()
    shell.wait_for(r"INFO\]: training loss: epoch", 5)
    assert not (home / "lost" / "terminal.log").exists()


def test_a_run_goes_on_when_its_terminal_is_gone(home, terminal):
    shell = terminal(train_through_hangup, words(output_dir="hung_up", **LONG))
    shell.wait_for(r"training loss +\d")
    run, screen = shell.processes()[0], shell.drawing()
    shell.hang_up()
    screen.wait(5)
    lines = home / "hung_up" / "metrics.jsonl"
    time.sleep(0.6)  # the run has noticed that
    size_bytes, deadline = lines.stat().st_size, time.monotonic() + 10
    while lines.stat().st_size == size_bytes:
        assert run.is_running() and time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_of_a_launcher_share_the_screen_and_the_error_of_another_rank_is_seen(terminal):
    line, fault = words(output_dir="two", **LONG), "forward:1:20:slow,forward:1:20:eio"
    shell = terminal(train_on_two_ranks, line, free_port(), env=dict(CHAT_FAULT=fault))
    shell.wait_for(r"\n 0 +CPU +0\.\d+ *\n 1 +CPU +0\.\d")
    shell.wait_for(r"code=1\.")
    assert "rank 1: [Errno 5] Input/output error" in shell.text
    shell.check_usable()


@pytest.mark.parametrize(("option", "term"), [("off", "xterm"), ("auto", "dumb")])
def test_with_screen_off_or_on_a_dumb_terminal_there_are_plain_lines(home, terminal, option, term):
    line = words(output_dir=option, epochs=1, screen=option)
    shell = terminal(train, line, env=dict(TERM=term), columns=200)
    assert shell.wait_for(r"code=(-?\d+)\.")[1] == "0"
    assert re.search(r"INFO\]: training loss: epoch:1, step:6", shell.text) and not shell.is_covered
    assert Path(home, option, "status_rank0.json").is_file(), "a screen elsewhere can be opened"
