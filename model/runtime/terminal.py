"""Terminals: untrusted text without control characters, and whether this process may draw."""

import os
import re

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters, line ends, bidirectional marks and surrogates written as escapes."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """`printable` of each line of `text`; newlines are kept."""
    return "\n".join(map(printable, text.split("\n")))


def in_foreground() -> bool:
    """Whether the shell has given its terminal to this program, not to itself or another job.

    A launcher may start its processes in a session without a terminal; then the launcher's own place counts. True where
    no parent has a terminal.
    """
    pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent, group, _, terminal, foreground_group = map(int, file.read().rpartition(")")[2].split()[1:6])
        except OSError:
            return True
        if terminal:
            return group == foreground_group
        pid = parent
    return True
