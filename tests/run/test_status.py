"""A status is read back as it was written, and one that no run writes reads as none."""

import os

import pytest

from model.run.status import KINDS, Status, read_statuses, write_status

FULL = Status(time=12.5, rank=1, host="a", pid=7, device="GPU", uuid="u", reserved_bytes=1, peak_bytes=2, limit_bytes=3,
              rss_bytes=4, host_used_bytes=5, host_total_bytes=6, activity="training", done=7, total=8, saving=True,
              stopping=True)  # fmt: skip


def test_a_status_is_read_back_as_it_was_written_and_leaves_no_draft(tmp_path):
    assert write_status(tmp_path, FULL)
    assert read_statuses(tmp_path, 2) == [FULL]
    assert os.listdir(tmp_path) == ["status_rank1.json"]
    assert all(getattr(FULL, name) for name in KINDS), "a field at its default checks nothing"


def test_ranks_that_the_run_does_not_have_are_left_out(tmp_path):
    write_status(tmp_path, FULL)
    assert read_statuses(tmp_path, 1) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": "now"}', '{"time": -1}', '{"time": 1e999}', '"x"', "\x00"])
def test_a_file_that_no_run_writes_reads_as_none(tmp_path, text):
    (tmp_path / "status_rank0.json").write_text(text)
    assert read_statuses(tmp_path, 1) == []


def test_values_of_a_wrong_type_are_left_at_their_defaults(tmp_path):
    (tmp_path / "status_rank0.json").write_text('{"time": 1, "done": true, "total": 1.5, "activity": 3, "more": 1}')
    assert read_statuses(tmp_path, 1) == [Status(time=1)]


def test_links_are_not_followed_and_a_disk_that_refuses_costs_nothing(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / ".status_rank1.json.tmp").symlink_to(target)
    assert not write_status(tmp_path, FULL) and target.read_text() == "mine"
    assert not write_status(tmp_path / "nowhere", FULL)
