"""The screen's process: draws the screen of a run once a second, until the run or its reader ends it.

python -m model.display.watch RUN_DIR        on the terminal of a run that started it; it ends with its standard input

It reads the journal's new bytes, the status files and the driver, and writes nothing but the terminal. Each frame
covers the whole terminal, so what other programs print there is gone a second later.
"""

import io
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from model.display.captured_output import NAME, end_of, last_lines
from model.display.catalogue import Texts, language_of
from model.display.figures import Figures
from model.display.screen import draw
from model.display.sensors import Driver
from model.display.view import View, is_alive, is_shown
from model.run.journal import JournalTail
from model.run.status import read_statuses
from model.runtime.atomic_io import open_own
from model.runtime.terminal import in_foreground, printable

DRAW_SECONDS = 1.0
ENTER = b"\x1b[?1049h\x1b[?25l\x1b[2J"  # the alternate screen, without a cursor, empty
LEAVE = b"\x1b[0m\x1b[?25h\x1b[?1049l"
HOME = b"\x1b[H"  # also after a frame: a line that the terminal echoes there does not scroll the screen
READ_LINES, LOG_LINES = 500, 50  # read of the log's end, and shown of them
DEFAULT_SIZE = (80, 24)  # of a terminal that does not tell
ENDS = {signal.SIGTERM, signal.SIGHUP}


class Follower:
    """What a run directory says at a time, read a little further at each look."""

    def __init__(self, run_dir: str | Path, hint: str):
        self._run_dir, self._hint, self._path = Path(run_dir), hint, Path(run_dir, "metrics.jsonl")
        self._tail, self._figures, self._driver, self._options = JournalTail(self._path), Figures(), Driver(), {}
        self._host = os.uname().nodename

    def look(self) -> View:
        """The run as it is now. Raises ValueError for a journal that no run writes."""
        self._read_journal()
        now, statuses = time.time(), read_statuses(self._run_dir, self._figures.world_size)
        uuids = [status.uuid for status in statuses if status.host == self._host and is_alive(status, now)]
        sensors = {uuid: found for uuid in uuids if (found := self._driver.read(uuid))}
        return View(str(self._run_dir), self._figures, now, statuses, sensors, self._options, self._log(), self._hint)

    def _read_journal(self):
        records = True
        while records:
            is_another, records = self._tail.read()
            if is_another:
                self._figures = Figures()
            self._add(records)
            if any(record["kind"] == "start" for record in records):
                self._options = self._read_options()

    def _add(self, records):
        try:
            for record in records:
                self._figures.add(record)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"{self._path} has a line that no run writes ({error!r}): delete that line") from error

    def _read_options(self):
        with suppress(OSError, ValueError), open_own(self._run_dir / "config.json", "rb") as file:
            values = json.load(file)
            if isinstance(values, dict) and isinstance(values.get("config"), dict):
                return values["config"]
        return {}

    def _log(self):
        with suppress(OSError), open_own(self._run_dir / NAME, "rb") as file:
            lines = [line.decode(errors="replace") for line in last_lines(file, READ_LINES)[0]]
            return [line for line in lines if not is_shown(line)][-LOG_LINES:]
        return []


class Cover:
    """The alternate screen of a terminal: what stood there before comes back when it is left."""

    def __init__(self, terminal: int):
        self._terminal, self._console, self.is_up = terminal, None, False

    def show(self, view: View, texts: Texts) -> None:
        """Draw `view`. Raises OSError if the terminal is gone."""
        if not self.is_up:
            self.is_up = True
            self._write(ENTER)
        size = self.size()
        if self._console is None or self._console.size != size:
            self._console = Console(file=io.StringIO(), force_terminal=True, width=size[0], height=size[1])
        self._write(HOME + draw(view, texts, self._console).encode(errors="replace") + HOME)

    def leave(self) -> None:
        if self.is_up:
            self.is_up = False
            with suppress(OSError):
                self._write(LEAVE)

    def size(self) -> tuple[int, int]:
        """(Columns, lines) of the terminal."""
        with suppress(OSError):
            size = os.get_terminal_size(self._terminal)
            return (size.columns or DEFAULT_SIZE[0], size.lines or DEFAULT_SIZE[1])
        return DEFAULT_SIZE

    def _write(self, data):
        while data:
            data = data[os.write(self._terminal, data) :]


class Signals:
    """Notes the signals that concern the screen, and wakes the loop, which acts on them between two frames."""

    def __init__(self, ends: set):
        self.has_ended = self.is_suspended = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in ends:
            signal.signal(number, self._end)
        signal.signal(signal.SIGTSTP, self._suspend)
        signal.signal(signal.SIGWINCH, lambda *_: None)  # its arrival wakes the loop
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # leaving the screen from the background
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)

    def _end(self, *_):
        self.has_ended = True

    def _suspend(self, *_):
        self.is_suspended = True

    def sleep(self, seconds: float, owner: int | None) -> None:
        """Wait for `seconds`, for a signal, or for the end of the descriptor `owner`."""
        ready, _, _ = select.select([self._reader, *([] if owner is None else [owner])], [], [], seconds)
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)
        if owner in ready and not os.read(owner, 4096):
            self.has_ended = True


def watch(run_dir: str | Path, terminal: int, owner: int | None = None) -> None:
    """Show the screen of `run_dir` on the descriptor `terminal` until a signal, or the end of the descriptor `owner`.

    Raises ValueError for a journal that no run writes. The terminal is then as it was.
    """
    texts, parent = Texts(language_of(os.environ)), os.getppid()
    signals = Signals(ENDS if owner is not None else ENDS | {signal.SIGINT})
    follower, cover = Follower(run_dir, "quit" if owner is None else "stop"), Cover(terminal)
    try:
        while not signals.has_ended and (owner is None or os.getppid() == parent):
            if signals.is_suspended:
                cover.leave()
                signals.is_suspended = False
                os.kill(os.getpid(), signal.SIGSTOP)
            if in_foreground():
                cover.show(follower.look(), texts)
            else:
                cover.leave()
            signals.sleep(DRAW_SECONDS, owner)
    except OSError as error:
        if not cover.is_up or os.isatty(terminal):
            raise ValueError(f"{run_dir} cannot be shown: {error}") from None
    finally:
        cover.leave()


def main(run_dir: str) -> None:
    """The screen of the run that started this process: on stdout, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the run
    os.nice(10)
    try:
        watch(run_dir, sys.stdout.fileno(), owner=sys.stdin.fileno())
    except ValueError as error:
        print(printable(f"no screen: {error}"), file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        end_of(run_dir, sys.stdout.fileno(), Texts(language_of(os.environ))("earlier"))


if __name__ == "__main__":
    main(sys.argv[1])
