"""What a run prints while a screen covers its terminal: a file in the run directory takes it, for the screen to show.

A file, not a pipe: a screen that is stopped or killed never holds up the run. Whoever ends the screen prints
the last lines on the terminal and unlinks the file; that tells the other ranks, who share the terminal, to print there
again.
"""

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

from model.runtime.atomic_io import open_own

NAME = "terminal.log"
OUTPUTS = (1, 2)  # the descriptors of stdout and stderr
MAX_BYTES = 1 << 16  # that are read of its end
LAST_LINES = 20  # that stay on the terminal when the screen is gone


class TerminalLog:
    """Takes what this process prints on its terminal from now on, until `give_back`."""

    def __init__(self, run_dir: str | Path):
        self._path = Path(run_dir, NAME)
        self._file = open_own(self._path, "a+b", buffering=0)
        self._terminals = {output: os.dup(output) for output in OUTPUTS if os.isatty(output)}
        self._turn(dict.fromkeys(self._terminals, self._file.fileno()))

    @property
    def terminal(self) -> int:
        """A descriptor of the terminal."""
        return max(self._terminals.items())[1]

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def is_over(self) -> bool:
        """Whether another process has ended it."""
        return not os.fstat(self._file.fileno()).st_nlink

    def give_back(self, note: str) -> None:
        """Print on the terminal again, first the last lines that nobody has printed there yet."""
        self._turn(self._terminals)
        with suppress(OSError):
            print_rest(self._path, self._file, self.terminal, note)
        for terminal in self._terminals.values():
            os.close(terminal)
        self._file.close()

    def _turn(self, targets):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        for output, target in targets.items():
            os.dup2(target, output)


def discard(run_dir: str | Path) -> None:
    """Remove the file that a killed run left."""
    with suppress(OSError), open_own(Path(run_dir, NAME), "r+b") as file:
        file.truncate(0)  # a rank that holds it would print it
        os.unlink(Path(run_dir, NAME))


def end_of(run_dir: str | Path, terminal: int, note: str) -> None:
    """End the file of a run whose process is gone: print its last lines on the descriptor `terminal`."""
    with suppress(OSError), open_own(Path(run_dir, NAME), "r+b") as file:
        print_rest(Path(run_dir, NAME), file, terminal, note)


def print_rest(path: Path, file, terminal: int, note: str) -> None:
    """Print the last lines of the open `file` on `terminal`, after `note` if there are more, and unlink it.

    Each line is printed once, whichever processes call this.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    lines, is_cut = last_lines(file, LAST_LINES)
    file.truncate(0)
    if os.fstat(file.fileno()).st_nlink:
        os.unlink(path)
    fcntl.flock(file, fcntl.LOCK_UN)
    if is_cut:
        lines = [note.encode(), *lines]
    if lines:
        os.write(terminal, b"\n".join(lines) + b"\n")


def last_lines(file, count: int) -> tuple[list[bytes], bool]:
    """(The last `count` lines of a binary file, whether there are more); of a long line only what MAX_BYTES hold."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_BYTES))
    lines = file.read(MAX_BYTES).rstrip(b"\n").split(b"\n")
    lines = lines if lines != [b""] else []
    return lines[-count:], len(lines) > count or size > MAX_BYTES
