"""Writes small data files and reads them, for the tests of this folder."""

import json

import pytest

from model.data.readers import read_pairs


def write(path, data):
    """Write bytes or text; returns the path."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_json(path, value):
    return write(path, json.dumps(value, ensure_ascii=False, indent=1))


def write_json_lines(path, rows):
    return write(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def pairs_of(path, **columns):
    return list(read_pairs(path, **columns))


def refusal(path, **columns):
    """The message of the ValueError that reading the file raises; it names the file."""
    with pytest.raises(ValueError) as caught:
        pairs_of(path, **columns)
    assert str(path) in str(caught.value)
    return str(caught.value)
