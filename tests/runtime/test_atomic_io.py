import os

import pytest

from model.runtime import atomic_io
from model.runtime.atomic_io import (
    AppendedFile,
    open_own,
    put_back,
    remove_drafts,
    try_delete,
    whole_directory,
    write_file,
)


def contents(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def fill(target, **files):
    with whole_directory(target) as draft:
        for name, text in files.items():
            (draft / name).write_text(text)


def test_a_directory_and_its_parents_appear_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "er" / "best"
    with whole_directory(target) as draft:
        (draft / "a").write_text("1")
        assert not target.exists()
    assert contents(target) == {"a": "1"}
    assert os.listdir(target.parent) == ["best"]


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    fill(tmp_path / "best", a="1", b="2")
    fill(tmp_path / "best", a="3")
    assert contents(tmp_path / "best") == {"a": "3"}
    assert os.listdir(tmp_path) == ["best"]


def test_a_reader_sees_the_old_directory_until_the_whole_new_one_replaces_it(tmp_path):
    fill(tmp_path / "best", a="1")
    opened = os.open(tmp_path / "best", os.O_RDONLY)
    with whole_directory(tmp_path / "best") as draft:
        (draft / "a").write_text("2")
        inode = draft.stat().st_ino
        assert contents(tmp_path / "best") == {"a": "1"}
    assert (tmp_path / "best").stat().st_ino == inode
    os.close(opened)


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_directory_as_it_was_and_nothing_else(tmp_path, error):
    fill(tmp_path / "best", a="1")
    for target in (tmp_path / "best", tmp_path / "other"):
        with pytest.raises(error), whole_directory(target) as draft:
            (draft / "a").write_text("2")
            raise error
    assert contents(tmp_path / "best") == {"a": "1"}
    assert os.listdir(tmp_path) == ["best"]


def test_a_file_system_without_exchange_replaces_too(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_io, "_exchange", lambda one, other: -1)
    fill(tmp_path / "best", a="1")
    fill(tmp_path / "best", a="2")
    assert contents(tmp_path / "best") == {"a": "2"}
    assert os.listdir(tmp_path) == ["best"]


def test_the_next_write_deletes_the_draft_of_a_killed_process(tmp_path):
    if (child := os.fork()) == 0:
        with whole_directory(tmp_path / "best") as draft:
            (draft / "a").write_text("half")
            os._exit(9)
    os.waitpid(child, 0)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".best.")
    fill(tmp_path / "best", a="1")
    assert os.listdir(tmp_path) == ["best"]


@pytest.mark.parametrize("renames, holds", [(1, "1"), (2, "2"), (3, "2")])
def test_a_kill_between_two_renames_loses_no_directory(tmp_path, monkeypatch, renames, holds):
    fill(tmp_path / "best.of.all", a="1")
    if (child := os.fork()) == 0:
        monkeypatch.setattr(atomic_io, "_exchange", lambda one, other: -1)
        rename, done = os.rename, []

        def rename_and_die(one, other):
            rename(one, other)
            done.append(one)
            if len(done) == renames:
                os._exit(9)

        monkeypatch.setattr(os, "rename", rename_and_die)
        fill(tmp_path / "best.of.all", a="2")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    put_back(tmp_path)
    assert contents(tmp_path / "best.of.all") == {"a": holds}
    remove_drafts(tmp_path)
    assert os.listdir(tmp_path) == ["best.of.all"]


def test_a_failed_write_after_a_kill_restores_the_directory_left_aside(tmp_path):
    fill(tmp_path / ".best.01234567.aside", a="1")
    with pytest.raises(OSError), whole_directory(tmp_path / "best"):
        raise OSError
    assert contents(tmp_path / "best") == {"a": "1"}
    assert os.listdir(tmp_path) == ["best"]


def test_a_file_holds_its_old_content_or_its_new_one(tmp_path):
    path = tmp_path / "LATEST"
    write_file(path, b"one")
    write_file(path, b"two")
    with pytest.raises(TypeError):
        write_file(path, "text is not bytes")
    assert contents(tmp_path) == {"LATEST": "two"}


def test_a_link_a_pipe_or_a_directory_in_place_of_a_file_is_not_opened(tmp_path):
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "pipe", "directory"):
        for mode in ("w", "a+b"):
            with pytest.raises(OSError):
                open_own(tmp_path / name, mode)
        with pytest.raises(OSError):
            AppendedFile(tmp_path / name)
    assert (tmp_path / "theirs").read_text() == "kept"


def test_a_directory_that_cannot_be_deleted_is_warned_of_once_and_raises_nothing(tmp_path, caplog):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "old").symlink_to(tmp_path / "theirs")  # rmtree refuses a link, even for root
    for _ in range(2):
        try_delete(tmp_path / "old")
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(tmp_path / "old") in caplog.text
    (tmp_path / ".old.tmp").symlink_to(tmp_path / "theirs")
    remove_drafts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["old", "theirs"]
