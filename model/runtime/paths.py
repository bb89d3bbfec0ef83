"""Paths that people type or that strangers' files name."""

import os

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095  # what Linux and its file systems take


def is_path(text):
    """Whether a file can have the path `text`; to look for one that none can have is an OSError."""
    written = os.fsencode(text)
    return len(written) <= MAX_PATH_BYTES and all(len(name) <= MAX_NAME_BYTES for name in written.split(b"/"))


def check_path(text):
    """Raise ValueError if no file can have the path `text`."""
    if not is_path(text):
        raise ValueError(
            f"{str(text):.40}… ({len(str(text)):,} characters) is too long for a path, which has at most "
            f"{MAX_PATH_BYTES:,} bytes, {MAX_NAME_BYTES} between two slashes: type that of a file or folder"
        )
