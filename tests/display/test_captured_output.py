"""What is printed while a screen covers the terminal is printed there afterwards, once, by whoever is left."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from model.display.captured_output import LAST_LINES, NAME, discard, end_of

ROOT = Path(__file__).resolve().parents[2]
PRINTS = """
import os, sys
from model.display.captured_output import NAME, TerminalLog, end_of
print("before", flush=True)
log = TerminalLog({folder!r})
print("to stdout", flush=True)
os.write(2, b"to stderr\\n")
{then}
"""
NOTE = "(more)"


def on_terminal(folder, then):
    """What a terminal got from a process that runs `then` once its output is taken."""
    terminal, child_side = pty.openpty()
    code = PRINTS.format(folder=str(folder), then=then)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=child_side, stderr=child_side, env=environment)
    os.close(child_side)
    shown = b""
    try:
        while data := os.read(terminal, 65536):
            shown += data
    except OSError:  # the child has closed its side
        os.close(terminal)
    assert child.wait(30) == 0, shown
    return shown.decode().replace("\r\n", "\n")


def test_what_was_taken_is_printed_when_the_terminal_is_given_back(tmp_path):
    then = "log.give_back('')\nprint('after', flush=True)"
    assert on_terminal(tmp_path, then) == "before\nto stdout\nto stderr\nafter\n"
    assert not (tmp_path / NAME).exists()


def test_of_many_lines_the_last_ones_are_printed_after_a_note(tmp_path):
    shown = on_terminal(tmp_path, f"for line in range(50): print(line)\nlog.give_back({NOTE!r})")
    assert shown == "\n".join(["before", NOTE, *map(str, range(50 - LAST_LINES, 50)), ""])


def test_a_process_that_is_gone_is_spoken_for_by_another(tmp_path):
    assert on_terminal(tmp_path, "") == "before\n"
    reader, writer = os.pipe()
    end_of(tmp_path, writer, NOTE)
    assert os.read(reader, 999) == b"to stdout\nto stderr\n" and not (tmp_path / NAME).exists()
    end_of(tmp_path, writer, NOTE)  # nothing is left
    os.close(writer)
    assert os.read(reader, 999) == b""


def test_a_rank_notices_the_end_and_prints_only_what_came_after_it(tmp_path):
    then = f"end_of({str(tmp_path)!r}, log.terminal, '')\nassert log.is_over\nprint('late', flush=True)\n"
    shown = on_terminal(tmp_path, then + "log.give_back('')\nprint('after', flush=True)")
    assert shown == "before\nto stdout\nto stderr\nlate\nafter\n"


def test_the_file_of_a_killed_run_is_discarded_and_nobody_prints_it(tmp_path):
    (tmp_path / NAME).write_text("old\n")
    then = f"from model.display.captured_output import discard\ndiscard({str(tmp_path)!r})\nlog.give_back('')"
    assert on_terminal(tmp_path, then) == "before\n"
    discard(tmp_path)
    assert not (tmp_path / NAME).exists()
