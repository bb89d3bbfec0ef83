"""Text of strangers made safe for a terminal."""

import re

STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with what steers a terminal written as escapes: controls, line ends, bidirectional marks, surrogates."""
    return STEERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """printable(text), its line ends kept."""
    return "\n".join(map(printable, text.split("\n")))
