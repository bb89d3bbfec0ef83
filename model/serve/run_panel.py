"""What the page shows of runs: figures in words, curves, newest answers, events and log."""

import threading
import time
from pathlib import Path

from model.data.file_list import names_of
from model.display.catalogue import Texts
from model.display.curves import curves_of
from model.display.figures import epochs_of
from model.display.screen import DEVICE_COLUMNS
from model.display.view import device_cells, event_lines, log_line, rows_of, state, status_of_journal
from model.display.watch import Follower

JOURNAL = "metrics.jsonl"
MAX_RUNS, MAX_EVENTS = 100, 20  # that are listed and shown
MAX_FOLLOWED = 16  # runs whose figures are kept between two looks
REST = 20  # times as long as a journal took to read it is not read again, so that answers keep their pace
NO_CURVES = dict(train=[], eval=[], samples=[], log=[], best=None, step=0, total_steps=None, is_finished=False)


class RunPanel:
    """The runs of a folder, which is a run directory itself or has them; may be asked from any thread."""

    def __init__(self, folder: Path):
        self._folder, self._lock = folder, threading.Lock()
        self._followers, self._curves = {}, {}  # by run directory; of the curves also what is known of their file

    def names(self) -> list[str]:
        """The runs, that with the newest journal line first; one alone if the folder is a run directory."""
        found = sorted(self._folder.glob(f"*/{JOURNAL}"), key=_changed, reverse=True)
        is_run = (self._folder / JOURNAL).is_file() or not found
        return [self._folder.resolve().name] if is_run else [journal.parent.name for journal in found]

    def look(self, name: str, language: str) -> dict:
        """The run `name`, the newest if "", as the page shows it, with its name and those of the newest ones.

        Raises ValueError for a name of no run, and for a journal that no run writes.
        """
        names = self.names()
        name = name or names[0]
        if name not in names:
            raise ValueError(f"run={name!r:.80}: the runs here are {names_of(names)}")
        listed = names[:MAX_RUNS] if name in names[:MAX_RUNS] else [*names[:MAX_RUNS], name]
        is_run = not (self._folder / name / JOURNAL).is_file()
        run_dir = self._folder if is_run else self._folder / name
        try:
            with self._lock:
                view, curves = self._follower(run_dir).look(), self._curves_of(run_dir)
                printed = [log_line(line) for line in view.log]  # while a screen covers its terminal
                log = dict(log=printed or curves["log"])
                return dict(runs=listed, run=name) | told(view, Texts(language)) | curves | log
        except (KeyError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{run_dir / JOURNAL} has a line that no run writes ({error!r})") from None

    def _follower(self, run_dir):
        if run_dir not in self._followers:
            if len(self._followers) == MAX_FOLLOWED:
                self._followers.clear()
                self._curves.clear()
            self._followers[run_dir] = Follower(run_dir, "")
        return self._followers[run_dir]

    def _curves_of(self, run_dir):
        journal, now = run_dir / JOURNAL, time.monotonic()
        if not journal.is_file():  # the run has only begun
            return NO_CURVES
        stat = journal.stat()
        file = stat.st_size, stat.st_mtime_ns
        curves, known, until = self._curves.get(run_dir, (None, None, 0))
        if curves is None or file != known and now > until:
            curves = curves_of(journal)
            seconds = time.monotonic() - now
            self._curves[run_dir] = curves, file, now + REST * seconds
        return curves


def told(view, text: Texts) -> dict:
    """What a View says in words: state, progress, rows of name and value, a table of devices, events."""
    figures, total = view.figures, view.figures.start.get("total_steps")
    progress = text("progress.of" if total else "progress", step=view.step, total=total, share=view.share)
    done, epochs = epochs_of(figures.start, figures.train) if figures.train else ("", "")
    rows = {text(f"row.{name}"): value for name, value in rows_of(view, text).items()}
    return dict(
        state=state(view, text).plain,
        progress=[progress, text("epochs", done=done, total=epochs)] if epochs else [progress],
        rows=list(rows.items()), devices=devices(view, text), events=event_lines(view, text)[-MAX_EVENTS:],
    )  # fmt: skip


def devices(view, text: Texts) -> list[list[str]]:
    """Titles, and a row for each rank, without the columns that nothing is known of."""
    statuses = view.statuses or [status_of_journal(view.figures)]
    cells = [device_cells(status, view.sensors.get(status.uuid), text) for status in statuses]
    columns = zip(map(text, DEVICE_COLUMNS), *([str(cell) for cell in row] for row in cells), strict=True)
    return [list(row) for row in zip(*(column for column in columns if any(column[1:])), strict=True)]


def _changed(journal):
    try:
        return journal.stat().st_mtime_ns
    except OSError:  # it has gone
        return 0
