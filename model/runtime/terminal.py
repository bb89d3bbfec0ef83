"""Escape control characters, so that untrusted text can be printed on a terminal."""

import re

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters, line ends, bidirectional marks and surrogates written as escapes."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """`printable` of each line of `text`; newlines are kept."""
    return "\n".join(map(printable, text.split("\n")))
