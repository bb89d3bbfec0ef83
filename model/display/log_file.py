"""The log of a run: stderr, and one file per preset and day, which runs share."""

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
    """A logger that appends to <directory>/chat_trainer_<preset>_<YYYYmmdd>.log and shows INFO and above on stderr.

    Runs of a preset share the file, so each line in it names its run. Call it on the main rank only. A second call
    closes the previous file, so no line appears twice. Raises ValueError if the file is a link.
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
    LOGGER.setLevel(logging.DEBUG)  # the traceback that ended a run goes to the file only
    LOGGER.propagate = False
    return LOGGER


class _Lines(logging.Formatter):
    """Puts `prefix` before each line, also of a traceback, and escapes terminal control characters."""

    def __init__(self, prefix: str = ""):
        super().__init__(STYLE, DATE)
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(self._prefix + line) for line in super().format(record).split("\n"))


class _Stderr:
    """Writes to the current sys.stderr, which the progress bar replaces while it is shown."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
