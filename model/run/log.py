"""Where the log lines of a run go: a file that the runs of a preset share for a day, and stderr."""

import logging
import os
import sys
import time
from pathlib import Path

from model.runtime.atomic_io import check_no_link
from model.runtime.terminal import printable

LOGGER = logging.getLogger("chat_trainer")
STYLE, DATE = "[%(asctime)s.%(msecs)03d] [%(levelname)s]: %(message)s", "%Y-%m-%d %H:%M:%S"


def open_log(directory: str | Path, preset: str, run_dir: str | Path) -> logging.Logger:
    """A logger that appends to <directory>/chat_trainer_<preset>_<YYYYmmdd>.log and echoes what is INFO to stderr.

    Runs of a preset share the file, so each of its lines names the run. For the main rank only. Opening again closes
    what was open, so no line appears twice.
    """
    path = Path(directory) / f"chat_trainer_{preset}_{time.strftime('%Y%m%d')}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    check_no_link([path])
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()
    file, echo = (
        logging.FileHandler(path, encoding="utf-8", errors="backslashreplace"),
        logging.StreamHandler(_Stderr()),
    )
    file.setFormatter(_Lines(f"[{os.path.basename(os.path.abspath(run_dir))}] "))
    echo.setFormatter(_Lines())
    echo.setLevel(logging.INFO)
    for handler in (file, echo):
        LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)  # the file has the stack of what ended a run too
    LOGGER.propagate = False
    return LOGGER


class _Lines(logging.Formatter):
    """Begins each line, those of a traceback too, with `prefix`; what steers a terminal is shown as escapes."""

    def __init__(self, prefix: str = ""):
        super().__init__(STYLE, DATE)
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(self._prefix + line) for line in super().format(record).split("\n"))


class _Stderr:
    """Looks stderr up at each write, because a live progress line replaces it while it is drawn."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
