"""Draws the plots of a run in a process of its own: training neither waits for one nor holds matplotlib in memory.

python -m model.display.drawing RUN_DIR        draws RUN_DIR/plots/*.png, after an evaluation of a run
python -m model.display.drawing RUN_DIR last   the same once its standard input says something; nothing if it ends
"""

import fcntl
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from model.display.plots import load_matplotlib, plot_run
from model.runtime.atomic_io import open_own
from model.runtime.module_process import start_module
from model.runtime.terminal import printable

LOGGER = logging.getLogger("chat_trainer")
REST_SECONDS = 60  # between two drawings of a run that is not at its end
END_SECONDS = 60  # that a run waits for its last plots


def draw_soon(run_dir: Path) -> None:
    """Let another process draw the plots of `run_dir`, unless this was asked for in the last REST_SECONDS."""
    with suppress(OSError), _open_lock(run_dir) as lock:  # after an OSError the next evaluation tries again
        if os.fstat(lock.fileno()).st_size and time.time() - os.fstat(lock.fileno()).st_mtime < REST_SECONDS:
            return
        lock.truncate(0)
        lock.write(b"asked")
        _start(run_dir)  # subprocess reaps it when it starts the next one


def start_last(run_dir: Path, wanted: bool = True) -> subprocess.Popen | None:
    """The process that draws the last plots of a run when `finish_last` asks for them, None if they are not `wanted`.

    Logs why it cannot be started.
    """
    if not wanted:
        return None
    try:
        return _start(run_dir, "last", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        LOGGER.error("no plots: %s", error)


def finish_last(drawing: subprocess.Popen | None) -> None:
    """Have the last plots of a run drawn and wait for them; logs why there are none instead of raising it."""
    if drawing is None:
        return
    try:
        _, said = drawing.communicate(b"draw", timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        said = f"they are still being drawn after {END_SECONDS} s".encode()
    if drawing.returncode != 0:
        LOGGER.error("no plots: %s", printable(said.decode(errors="replace").strip()[-500:]))


def _start(run_dir, *words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
    pipes = dict(stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr)
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    return start_module("model.display.drawing", run_dir, *words, env=environment, **pipes, start_new_session=True)


def _open_lock(run_dir):
    Path(run_dir, "plots").mkdir(exist_ok=True)
    return open_own(Path(run_dir, "plots", ".lock"), "ab", buffering=0)


def main(run_dir: str, *last: str) -> int:
    """Wait for a drawing that is under way, then draw; the `last` plots once they are asked for."""
    os.nice(19)
    if last:
        load_matplotlib()
        if not sys.stdin.buffer.read():
            return 0
    try:
        with _open_lock(run_dir) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            plot_run(run_dir)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyError, TypeError, ArithmeticError) as error:
        print(f"the journal or plan.json has a value that no run writes: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
