"""The journal stays readable after kills, and a resume voids the lines that it undoes."""

import json
import os
import re

import numpy as np
import pytest

from model.run.journal import Journal, read_journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def steps(path):
    return [(record["kind"], record.get("step")) for record in read_journal(path)]


def write_all(path, *lines):
    with Journal(path) as journal:
        for kind, step in lines:
            journal.write(kind, step=step)


def test_what_is_written_is_read_back(path):
    values = {"step": 7, "loss": 3.25, "plan": {"micro": [1, 2]}, "path": "模型/step_7", "ok": True, "bleu": None}
    with Journal(path) as journal:
        journal.write("train", **values)
    (record,) = read_journal(path)
    assert {key: record[key] for key in values} == values
    assert record["kind"] == "train" and abs(record["time"] - os.path.getmtime(path)) < 5
    assert len(str(record["time"]).split(".")[1]) <= 3


def test_each_line_reaches_the_file_at_once(path):
    with Journal(path) as journal:
        journal.write("train", step=1)
        assert steps(path) == [("train", 1)]


def test_reopening_appends(path):
    write_all(path, ("start", None), ("train", 1))
    write_all(path, ("train", 2))
    assert steps(path) == [("start", None), ("train", 1), ("train", 2)]


def test_a_journal_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Journal(None) as journal:
        journal.write("train", step=1)
    assert list(tmp_path.iterdir()) == []


def test_floats_that_json_cannot_hold_become_null(path):
    with Journal(path) as journal:
        journal.write("train", loss=float("nan"), grad_norm=float("inf"), ranks=[1.0, float("-inf")])
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["loss"], record["grad_norm"], record["ranks"]) == (None, None, [1.0, None])


def test_floats_keep_every_bit_of_a_float32_in_at_most_11_characters(path):
    value = np.float32(0.1) + np.float32(0.2)
    with Journal(path) as journal:
        journal.write("train", loss=float(value))
    text = re.search(r'"loss":([^,}]+)', path.read_text()).group(1)
    assert np.float32(text) == value
    assert len(text) <= 11


def test_a_file_name_that_is_not_utf_8_still_gives_json(path):
    with Journal(path) as journal:
        journal.write("save", path=os.fsdecode(b"model_\xff"))
    assert json.loads(path.read_bytes())["path"] == "model_\udcff"


@pytest.mark.parametrize("tail", [b'{"kind":"tr', b'{"kind":"train","step":3}', "中".encode()[:2], b"\0\0\0"])
def test_an_incomplete_last_line_is_ignored_and_removed_on_reopening(path, tail):
    write_all(path, ("train", 1), ("train", 2))
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [("train", 1), ("train", 2)]
    write_all(path, ("train", 4))
    assert steps(path) == [("train", 1), ("train", 2), ("train", 4)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


DAMAGED_LINES = [b'{"kind":"tr', b"\0\0", b"", b"[1]", b'{"step":1}', b'{"kind":"resume"}', b"\xff"]
DAMAGED_LINES += [b'{"kind":2,"step":1}', b'{"kind":[]}', b'{"kind":"eval","step":"1"}']
DAMAGED_LINES += [b'{"kind":"resume","step":null}']


@pytest.mark.parametrize("damage", DAMAGED_LINES)
def test_a_damaged_line_in_the_middle_is_named(path, damage):
    write_all(path, ("start", None), ("train", 1))
    with path.open("ab") as file:
        file.write(damage + b"\n")
    write_all(path, ("train", 2))
    with pytest.raises(ValueError, match="line 3 "):
        read_journal(path)


def test_a_resume_voids_the_lines_of_later_steps_only(path):
    kinds = ("train", "eval", "save", "oom", "stop")
    write_all(path, ("start", None), *((kind, 10) for kind in kinds), *((kind, 11) for kind in kinds))
    write_all(path, ("start", None), ("resume", 10), ("train", 11))
    kept = [("start", None), *((kind, 10) for kind in kinds), ("start", None), ("resume", 10), ("train", 11)]
    assert steps(path) == kept


def test_a_resume_voids_an_evaluation_that_its_checkpoint_lacks(path):
    evaluations = [dict(kind="eval", step=step) for step in (4, 8, 8)]
    resume = dict(kind="resume", step=8, evaluated_step=4)
    with Journal(path) as journal:
        for line in (*evaluations[:2], resume, evaluations[2]):
            journal.write(**line)
    assert steps(path) == [("eval", 4), ("resume", 8), ("eval", 8)]


def test_an_evaluation_that_a_later_resume_does_not_repeat_is_kept(path):
    with Journal(path) as journal:
        for line in (dict(kind="eval", step=6), dict(kind="resume", step=8, evaluated_step=0)):
            journal.write(**line)
    assert steps(path) == [("eval", 6), ("resume", 8)]


def test_each_resume_voids_later_steps_and_is_kept_itself(path):
    write_all(path, ("train", 10), ("train", 20), ("resume", 15), ("train", 25), ("resume", 5), ("train", 6))
    assert steps(path) == [("resume", 15), ("resume", 5), ("train", 6)]
