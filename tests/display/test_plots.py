"""What the plots draw is what the journal says; another process draws them, and none ends a run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from model.display.answers import preference_rows
from model.display.catalogue import Texts
from model.display.drawing import draw_soon, finish_last, start_last
from model.display.journal_points import between, smoothed
from model.display.plots import (
    _draw_run,
    _loss_figure,
    _preference_figure,
    _save,
    draw_answers,
    draw_lengths,
    draw_losses,
    plot_run,
)
from model.run.journal import Journal, read_journal
from tests.tiny import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def records(tmp_path):
    """A run of 3 steps with two evaluations, stopped for 10 hours after the first one."""
    hour = 3600
    lines = [
        dict(kind="start", time=0), dict(kind="resume", time=0, step=0),
        dict(kind="train", time=hour, step=1, loss=3.0, pairs_seen=8, tokens_per_second=5.0, host_rss_bytes=2**30),
        dict(kind="eval", time=hour, step=1, loss=2.5),
        dict(kind="start", time=11 * hour), dict(kind="resume", time=11 * hour, step=1, evaluated_step=1),
        dict(kind="train", time=12 * hour, step=2, loss=None, pairs_seen=16, learn_rate=0.1, reserved_bytes=2**30),
        dict(kind="train", time=13 * hour, step=3, loss=1.0, pairs_seen=24),
        dict(kind="eval", time=13 * hour, step=3, loss=2.0, overfit_gap=0.75),
    ]  # fmt: skip
    return lines


def points(line):
    return [tuple(map(float, point)) for point in zip(*line.get_data(), strict=True)]


def test_losses_are_drawn_by_step_with_the_best_evaluation_and_without_steps_that_are_not_finite(records):
    axes = Figure().subplots()
    draw_losses(axes, records)
    raw, smoothed, validation, best = map(points, axes.lines)
    assert raw == smoothed == [(1, 3.0), (3, 1.0)]
    assert validation == [(1, 2.5), (3, 2.0)] and best == [(3, 2.0)]


def test_the_axis_of_steps_has_whole_numbers_and_a_loss_that_fell_far_a_logarithmic_scale(records):
    for lowest, scale in ((2.9, "linear"), (0.5, "log")):
        upper, lower = _loss_figure(
            [*records, dict(kind="train", time=50_000, step=4, loss=lowest, pairs_seen=32)]
        ).axes
        assert upper.get_yscale() == scale and lower.get_yscale() == "linear"
        assert all(step == int(step) for step in upper.get_xticks())


def test_answers_are_drawn_by_step_where_there_are_any(records):
    axes = Figure().subplots()
    draw_answers(axes, [line | dict(loops=0.5, ended=1.0) if line["kind"] == "eval" else line for line in records])
    assert [points(line) for line in axes.lines if len(line.get_xdata())] == [
        [(1, 0.5), (3, 0.5)],
        [(1, 1.0), (3, 1.0)],
    ]


def test_the_name_of_a_run_stands_clear_of_the_legend_however_long_it_is(tmp_path, records):
    figure, name = _loss_figure(records), "sft_of_the_second_week " * 3
    _save(figure, tmp_path / "loss.png", name)
    title = figure.findobj(lambda part: isinstance(part, Text) and part.get_text() == name)[0]
    assert not title.get_window_extent().overlaps(figure.legends[0].get_window_extent())


def test_runs_are_compared_by_pairs_and_by_hours_without_the_pauses(records):
    axes = Figure().subplots(2, 2)
    _draw_run(axes, records, "a run")
    by_pairs, by_hours, tested_by_pairs, tested_by_hours = (points(one.lines[0]) for one in axes.flat)
    assert by_pairs == [(8, 3.0), (24, 1.0)] and by_hours == [(1, 3.0), (3, 1.0)]
    assert tested_by_pairs == [(8, 2.5), (24, 2.0)] and tested_by_hours == [(1, 2.5), (3, 2.0)]


def test_smoothing_takes_as_many_values_before_as_behind_and_an_evaluation_lies_between_its_lines():
    assert smoothed(list(range(400))) == list(range(400)), "no lag"
    assert smoothed([0.0] * 200 + [1.0] * 200)[195:206] == pytest.approx(
        [k / 11 for k in range(1, 6)] + [k / 11 for k in range(6, 12)]
    )
    assert [between([10, 20], [100, 300], step) for step in (5, 10, 15, 20, 25)] == [100, 100, 200, 300, 300]


def test_lengths_are_drawn_for_each_column():
    axes = Figure().subplots()
    draw_lengths(axes, dict(prompt=dict(width=4, counts=[1, 5]), response=dict(width=2, counts=[3])))
    prompt, response = (patch.get_data() for patch in axes.patches)
    assert list(prompt.values) == [1, 5] and list(prompt.edges) == [0, 4, 8] and list(response.edges) == [0, 2]


def test_a_run_leaves_its_plots(home):
    done = train(home, output_dir="drawn", plots=True, epochs=1)
    assert done.codes == [0] and "drawn/plots/loss.png" in done.text
    names = {path.name for path in (home / "drawn" / "plots").glob("*.png")}
    assert names == {"loss.png", "speed.png", "memory.png", "learning_rate.png", "lengths.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (home / "drawn" / "plots").glob("*.png"))


def test_the_trainer_does_not_wait_for_a_drawing_and_starts_one_a_minute(tmp_path, records):
    write(tmp_path, records)
    started = time.monotonic()
    draw_soon(tmp_path)
    draw_soon(tmp_path)
    assert time.monotonic() - started < 0.1
    loss = tmp_path / "plots" / "loss.png"
    while not loss.exists():
        assert time.monotonic() < started + 60
        time.sleep(0.05)
    loss.unlink()
    draw_soon(tmp_path)
    time.sleep(0.5)
    assert not loss.exists() and [path.name for path in plot_run(tmp_path)][0] == loss.name


def test_a_plot_that_fails_is_logged_and_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text("{\n")
    finish_last(start_last(tmp_path))
    assert "no plots: " in caplog.text and "line 1 is damaged" in caplog.text


def test_the_last_plots_are_drawn_when_asked_for_and_not_if_the_run_dies_before(tmp_path, records):
    write(tmp_path, records)
    abandoned, drawing = start_last(tmp_path), start_last(tmp_path)
    abandoned.stdin.close()
    assert abandoned.wait(60) == 0 and not list(tmp_path.glob("plots/*.png"))
    finish_last(drawing)
    assert drawing.returncode == 0 and (tmp_path / "plots" / "loss.png").exists()


def test_matplotlib_is_imported_only_when_a_plot_is_drawn():
    code = "import sys, model.display.drawing\nassert not {'matplotlib', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def write(run_dir, records):
    with Journal(run_dir / "metrics.jsonl") as journal:
        for record in records:
            values = {name: value for name, value in record.items() if name not in ("kind", "time")}
            journal.write(record["kind"], **values)
    assert len(read_journal(run_dir / "metrics.jsonl")) == len(records)


def test_preferences_have_a_picture_and_rows_of_what_training_and_evaluations_say_of_them(records):
    said = dict(accuracy=0.75, margin=0.5, chosen_reward=0.2, rejected_reward=-0.3, chosen_log_prob=-2.0,
                rejected_log_prob=-3.0)  # fmt: skip
    figure = _preference_figure([record | said if "loss" in record else record for record in records])
    drawn = [[(line.get_label(), points(line)[-1]) for line in axes.lines] for axes in figure.axes]
    assert [len(lines) for lines in drawn] == [2, 6, 4]
    assert drawn[1][0][0] == "chosen" and drawn[1][0][1] == pytest.approx((3, 0.2)) and drawn[1][5][1] == (3, 0.5)
    rows = preference_rows(said, Texts())
    assert rows["preferences"].startswith("accuracy 75.0%, margin +0.500, chosen +0.200, rejected -0.300")
    assert rows["log_probs"] == "chosen -2.000, rejected -3.000" and not preference_rows(records[2], Texts())
