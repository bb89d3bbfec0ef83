"""What the page shows of runs is what their journals say."""

import json
import os

import pytest

from model.serve.run_panel import RunPanel
from tests.served import write_journal


def test_a_folder_is_a_run_or_has_runs_and_no_other_name_is_read(tmp_path):
    write_journal(tmp_path / "runs" / "a", 2)
    assert RunPanel(tmp_path / "runs").names() == RunPanel(tmp_path / "runs" / "a").names() == ["a"]
    write_journal(tmp_path / "outside", 1)
    for name in ("../outside", "/", ".", "b"):
        with pytest.raises(ValueError, match="the runs here are a"):
            RunPanel(tmp_path / "runs").look(name, "en")
    (tmp_path / "begun").mkdir()
    begun = RunPanel(tmp_path / "begun").look("", "zh")
    assert begun["run"] == "begun" and begun["state"] == "日志里还没有记录" and not begun["train"]


def test_of_many_runs_the_newest_are_listed_and_each_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("model.serve.run_panel.MAX_RUNS", 2)
    for age, name in enumerate("cba"):
        write_journal(tmp_path / name, 2)
        os.utime(tmp_path / name / "metrics.jsonl", (age, age))
    looks = [RunPanel(tmp_path).look(name, "en") for name in ("", "b", "c")]
    assert [(look["run"], look["runs"]) for look in looks] == [
        ("a", ["a", "b"]),
        ("b", ["a", "b"]),
        ("c", ["a", "b", "c"]),
    ]


def test_a_look_shows_new_lines_and_a_long_journal_is_read_seldom(tmp_path, monkeypatch):
    write_journal(tmp_path / "a", 2)
    panel, journal = RunPanel(tmp_path), tmp_path / "a" / "metrics.jsonl"
    assert [panel.look("a", "en")[name] for name in ("step", "total_steps")] == [2, 100]
    line = json.loads(journal.read_text().splitlines()[-2])
    with journal.open("a") as file:
        file.write(json.dumps(line | dict(step=3, loss=1.25)) + "\n")
    monkeypatch.setattr("model.serve.run_panel.REST", 1e9)
    looks = [panel.look("a", "en") for _ in range(2)]
    assert looks[0]["rows"][0] == ("training loss", "1.2500 (smoothed 6.3167)"), "the figures take new lines alone"
    assert {look["step"] for look in looks} <= {2, 3}
    with journal.open("a") as file:
        file.write(json.dumps(line | dict(step=4)) + "\n")
    assert panel.look("a", "en")["step"] == looks[1]["step"], "the curves rest"
    journal.write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match="no run writes"):
        panel.look("a", "en")
