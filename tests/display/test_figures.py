"""Figures that are kept up to date line by line are those of the whole journal."""

import json
import random

import pytest

from model.display.figures import MAX_EVENTS, Figures, Series
from model.run import journal as journal_module
from model.run.journal import Journal, JournalTail, read_journal

START = dict(total_steps=100, total_pairs=800, epochs=2, global_batch=8, world=2)


def train(step, **values):
    line = dict(step=step, epoch=1, loss=5 - step / 100, learn_rate=1e-3, pairs_seen=step * 8, tokens_per_second=100.0)
    return line | dict(step_seconds=0.5) | values


def figures_of(path):
    figures = Figures()
    for line in path.read_text().splitlines():
        figures.add(json.loads(line))
    return figures


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "metrics.jsonl") as journal:
        journal.write("start", **START)
        journal.write("resume", step=0, pairs_seen=0)
        yield journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_lines_that_a_resume_made_void_leave_nothing_behind(journal, path):
    def attempt(first, last):
        for step in range(first, last + 1):
            journal.write("train", **train(step))
            if step % 10 == 0:
                journal.write("eval", step=step, loss=4 - step / 50)
                journal.write("oom", step=step, where="step", rank=0, before={}, after={})
                journal.write("save", step=step, path=f"step_{step}")

    attempt(1, 35)
    journal.write("resume", step=20, pairs_seen=160, evaluated_step=20)
    attempt(21, 24)
    figures, valid = figures_of(path), read_journal(path)
    assert (figures.step, figures.pairs_seen, figures.train["step"]) == (24, 192, 24)
    assert [record["step"] for record in figures.evals] == [r["step"] for r in valid if r["kind"] == "eval"] == [10, 20]
    assert figures.count("oom") == sum(record["kind"] == "oom" for record in valid) == 2
    assert figures.losses.steps == list(range(1, 25))
    assert (figures.count("resume"), figures.best["step"]) == (1, 20)


def test_the_speed_the_time_left_and_the_next_evaluation(journal, path):
    for step in range(10, 31, 10):
        journal.write("train", **train(step))
    figures = figures_of(path)
    assert figures.pairs_per_second == 16.0
    assert (figures.steps_left(33), figures.steps_to_epoch_end(33), figures.steps_to_epoch_end(50)) == (67, 17, 50)
    assert (figures.steps_to_evaluation(33, 0), figures.steps_to_evaluation(33, 20)) == (17, 7)
    assert figures.step_seconds < 1, "wall clock between the lines, not step_seconds"


def test_the_overfit_gap_is_to_the_mean_training_loss_since_the_evaluation_before(journal, path):
    for step in (1, 2, 3, 4):
        journal.write("train", **train(step, loss=3.0 if step < 4 else 2.0))
        journal.write("train", **train(step, loss=3.0 if step < 4 else 4.0))
        journal.write("eval", step=step, loss=3.0 + step / 10)
    journal.write("train", **train(5, loss=1.0))
    figures = figures_of(path)
    assert figures.overfit_gap == pytest.approx(0.4) and figures.num_above_best == 3
    assert 1 < figures.smoothed < 3
    journal.write("eval", step=5, loss=2.0, overfit_gap=0.25)
    assert figures_of(path).overfit_gap == 0.25, "the run's own figure"


def test_a_loss_that_is_not_finite_does_not_enter_the_smoothed_one(journal, path):
    journal.write("train", **train(1, loss=2.0))
    journal.write("train", **train(2, loss=float("nan")))
    assert figures_of(path).smoothed == 2.0


def test_a_failed_save_stays_until_one_succeeds(journal, path):
    journal.write("save", step=1, path="step_1")
    journal.write("save", step=2, error="disk full")
    assert ["error" in save for save in figures_of(path).saves] == [False, True]
    journal.write("save", step=3, path="step_3")
    assert [save["step"] for save in figures_of(path).saves] == [3]


def test_a_long_run_takes_bounded_memory_and_keeps_its_shape():
    series = Series()
    for step in range(100_000):
        series.add(step, step / 1000)
    assert len(series.values) <= Series.MAX_POINTS and series.values == sorted(series.values)
    assert series.at(50_000) == pytest.approx(50, abs=0.2)
    figures = Figures()
    for step in range(2 * MAX_EVENTS):
        figures.add(dict(kind="skip", time=step, step=step, why="", ids=[1] * 100))
    assert len(figures.events) == MAX_EVENTS and "ids" not in figures.events[0]


def test_a_tail_reads_a_long_journal_in_parts(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"kind":"train","step":%d}\n' % step for step in range(100)))
    monkeypatch.setattr(journal_module, "MAX_TAIL_BYTES", 64)
    tail, steps, lengths = JournalTail(path), [], []
    while records := tail.read()[1]:
        steps += [record["step"] for record in records]
        lengths.append(len(records))
    assert steps == list(range(100)) and max(lengths) == 2


def test_a_tail_reads_each_line_once_and_notices_another_file(tmp_path):
    path, draw = tmp_path / "metrics.jsonl", random.Random(0)
    tail, lines, read = JournalTail(path), b"", []
    assert tail.read() == (False, [])
    lines = b"".join(b'{"kind":"train","step":%d}\n' % step for step in range(100))
    for end in [0, *sorted(draw.sample(range(len(lines)), 30)), len(lines)]:
        path.write_bytes(lines[:end]) if not path.exists() else append(path, lines[path.stat().st_size : end])
        read += tail.read()[1]
    assert [record["step"] for record in read] == list(range(100))
    other = tmp_path / "other"
    other.write_bytes(b'{"kind":"start"}\n')
    other.replace(path)
    assert tail.read() == (True, [{"kind": "start"}])


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind":"start"}\n{\n')
    with pytest.raises(ValueError, match="line 2 is damaged"):
        JournalTail(tmp_path / "metrics.jsonl").read()
