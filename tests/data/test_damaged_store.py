"""A token store that is damaged, cut short or unreadable is refused by name."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from model.data import store_writer
from model.data.token_store import read_store
from tests.parts import make_pairs, open_pairs, write_parquet


@pytest.mark.parametrize("name", ["ids.arrow", "lengths.npy", "hashes.npy", "meta.json"])
@pytest.mark.parametrize("size", [0, 20])
def test_a_damaged_store_is_refused_and_other_files_can_still_be_tokenised(open_it, tokenizer, tmp_path, name, size):
    directory = open_it().directory
    os.truncate(directory / name, size)
    with pytest.raises(ValueError, match=f"{directory} are damaged .*: delete that directory"):
        open_it()
    other = write_parquet(tmp_path / "other.parquet", make_pairs(9, seed=1))
    assert len(open_pairs(other, tokenizer, 64, tmp_path / "tokens")) == 9


def test_a_store_whose_ids_were_cut_anywhere_is_refused_and_not_read(open_it, monkeypatch):
    monkeypatch.setattr(store_writer, "ROWS_PER_BATCH", 5)
    ids = open_it().directory / "ids.arrow"
    content = ids.read_bytes()
    *messages, _ = [place for place in range(0, len(content), 8) if content.startswith(b"\xff" * 4, place)]
    assert len(messages) == 7, "the schema and six batches"
    for cut in sorted([*messages, *(place + 60 for place in messages), len(content) - 60], reverse=True):
        os.truncate(ids, cut)
        with pytest.raises(ValueError, match=f"{ids.parent} are damaged .*: delete that directory"):
            read_store(ids.parent)


@pytest.mark.parametrize("name", ["ids.arrow", "lengths.npy"])
def test_a_store_that_is_cut_short_while_it_is_used_is_told_in_words(open_it, name):
    store = open_it()
    child = os.fork()  # the system ends a process that reads where the file was
    if not child:
        os.truncate(store.directory / name, 0)
        try:
            store.tokens(np.arange(30))
        except RuntimeError as error:
            os._exit(42 if str(store.directory) in str(error) and "delete that directory" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


@pytest.mark.parametrize(
    "name, data",
    [
        ("meta.json", b"{}"),
        ("meta.json", b'{"source": {}, "sha256": ""}'),
        ("lengths.npy", b"PK\x03\x04" + bytes(100)),
        ("lengths.npy", b'\x93NUMPY\x01\x00\x10\x00{\'descr\': ((("""\n'),
    ],
)
def test_a_store_with_unexpected_content_is_refused_as_damaged(open_it, name, data):
    directory = open_it().directory
    (directory / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{directory} are damaged .*: delete that directory"):
        open_it()


def test_a_store_is_not_called_damaged_when_no_file_can_be_opened(open_it):
    directory = open_it().directory
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        lowest_free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_store(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "place, function, name", [(np.lib.format, "open_memmap", "hashes.npy"), (Path, "stat", "meta.json")]
)
def test_a_store_without_permission_for_a_file_or_its_directory_is_refused(open_it, monkeypatch, place, function, name):
    directory, allowed = open_it().directory, getattr(place, function)

    def refuse(path, *rest, **options):
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return allowed(path, *rest, **options)

    monkeypatch.setattr(place, function, refuse)  # root, who may run this test, is never refused
    with pytest.raises(ValueError, match=f"{directory} cannot be read .*Permission denied: .*{name}'.*allow it"):
        open_it()
