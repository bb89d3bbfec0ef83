"""Shows on stderr what a script is doing while it works: a bar on a terminal, else a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from model.display.catalogue import texts_here
from model.display.console import CONSOLE, duration
from model.runtime.activity import current_activity

DRAW_SECONDS, LINE_SECONDS = 0.2, 10


@contextmanager
def activity_shown(script: str) -> Iterator[None]:
    """Show the activity of this process, which `now_doing` and `advance` set, until the block ends."""
    ended = Event()
    show = _draw if sys.stderr.isatty() else _print_lines
    thread = Thread(target=show, args=(script, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw(script, ended):
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=10)
    columns += TextColumn("{task.fields[count]}", markup=False), TimeElapsedColumn()
    shared = dict(auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty())
    with suppress(OSError), Progress(*columns, console=CONSOLE, **shared) as bar:  # OSError: the terminal was closed
        task, is_over = bar.add_task("", total=None, count=""), False
        while not is_over:
            activity = current_activity()
            bar.update(task, description=f"{script}: {activity.name}", count=_count(activity), refresh=True)
            is_over = ended.wait(DRAW_SECONDS)


def _print_lines(script, ended):
    started, text = time.monotonic(), texts_here()
    while not ended.wait(LINE_SECONDS):
        activity = current_activity()
        parts = filter(None, (_count(activity), duration(time.monotonic() - started, text)))
        with suppress(OSError):
            print(f"{script}: {activity.name}:", text("comma").join(parts), file=sys.stderr, flush=True)


def _count(activity):
    return texts_here()("meanwhile.rows", count=activity.done) if activity.done else ""
