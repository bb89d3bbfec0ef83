"""The screen says where a run stands, on a terminal of any size."""

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from model.display.catalogue import CATALOGUE, Texts
from model.display.console import epoch_line, sample_line, train_line
from model.display.figures import Figures
from model.display.loss_curve import loss_curve
from model.display.screen import draw
from model.display.sensors import Driver, Sensors
from model.display.view import ALIVE_SECONDS, View, is_shown, log_line, rows_of, state
from model.run.status import Status

NOW, GIB = 1_000_000.0, 2**30
HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\n"


def run_view(**changes):
    """A run of two GPUs at step 705 of 1,000, with one out of memory and one step left out."""
    figures = Figures()
    start = dict(total_steps=1000, total_pairs=64_000, epochs=2, epoch_pairs=32_000, global_batch=64, world=2)
    start["parameters"] = 60_500_000
    lines = [start | dict(kind="start", device="GPU X", time=NOW - 2000), dict(kind="resume", time=NOW - 2000, step=0)]
    for step in range(20, 701, 20):
        lines.append(
            dict(kind="train", time=NOW - 1410 + 2 * step, step=step, epoch=1 + step // 501, loss=5 - step / 1000,
                 learn_rate=2e-4, pairs_seen=step * 64, tokens_per_second=45_120.4, step_seconds=1.6,
                 data_wait_seconds=0.002)
        )  # fmt: skip
        if step % 200 == 0:
            answered = dict(loops=0.44, ended=0.81, length_ratio=0.931, distinct_2=0.4, nats_per_char=2.75, bleu=3.2)
            lines.append(
                dict(
                    kind="eval",
                    time=NOW - 1410 + 2 * step,
                    step=step,
                    loss=4 + step / 1000,
                    **answered,
                    samples=[dict(question="1+1等于几？", answer=f"等于{step}。", reference="2")],
                )
            )
    lines.append(dict(kind="oom", time=NOW - 50, step=680, where="step", rank=1, before={}, after={}))
    lines.append(dict(kind="skip", time=NOW - 40, step=690, why="a spike", ids=[1]))
    lines.append(dict(kind="save", time=NOW - 30, step=700, path="checkpoints/step_00000700"))
    for line in lines:
        figures.add(line)
    statuses = [
        Status(time=NOW, rank=rank, host="h", uuid=f"u{rank}", reserved_bytes=(13 + 4 * rank) * GIB,
               peak_bytes=(14 + 4 * rank) * GIB, limit_bytes=20 * GIB, rss_bytes=3 * GIB, host_used_bytes=12 * GIB,
               host_total_bytes=32 * GIB, activity="training", done=705 * 64, total=64_000)
        for rank in range(2)
    ]  # fmt: skip
    sensors = {"u0": Sensors(15 * GIB, 24 * GIB, 98, 71, 310.0, 320.0), "u1": Sensors(used_bytes=None)}
    view = View("model_save/pretrain", figures, NOW, statuses, sensors, dict(eval_steps=200), ["a line"], "stop")
    return replace(view, **changes)


def drawn(view, columns=130, lines=30, language="en"):
    """Lines of the screen, without colours."""
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=lines)
    return re.sub(r"\x1b\[[0-9;]*m", "", draw(view, Texts(language), console)).split("\r\n")


def test_the_rows_of_a_running_run():
    assert rows_of(run_view(), Texts()) == {
        "loss": "4.3000 (smoothed 4.4735)",
        "rate": "2.000e-04",
        "speed": "45,120 tokens/s, 40 pairs/s",
        "wait": "2.0 ms a step (0.1%)",
        "validation": "4.6000, best 4.2000 (step 200)",
        "gap": "+0.1100, best 2 evaluations ago",
        "answers": "loops 44.0%, ended 81.0%, length/ref 0.93",
        "scores": "distinct-2 0.400, BLEU 3.20",
        "nats": "2.7500",
        "left": "9m 50s, of this epoch 9m 50s",
        "next": "in 95 steps, 3m 10s",
        "save": "step 700, 30s ago",
        "memory": "12.0/32.0 GiB 38%, this run 6.0 GiB",
        "events": "1 out of memory, 1 left out, 0 resumes",
    }


@pytest.mark.parametrize(("averaged", "said"), [(True, " (average)"), (False, " (weights)")])
def test_an_evaluation_says_whether_its_figures_are_those_of_the_weights_or_of_their_average(averaged, said):
    view = run_view()
    view.figures.evals[-1]["averaged"] = averaged
    assert rows_of(view, Texts())["validation"] == f"4.6000{said}, best 4.2000 (step 200)"
    assert f"step:3, of:{said[2:-1]}, val_loss" in epoch_line(dict(step=3, averaged=averaged, val_loss=4.6))


def test_after_a_resume_with_another_batch_the_bar_shows_the_share_of_pairs():
    view = run_view()
    view.figures.add(view.figures.start | dict(global_batch=640, total_steps=730))
    statuses = [replace(status, done=703 * 64 + 640) for status in view.statuses]
    view.figures.add(dict(kind="resume", time=NOW, step=703, pairs_seen=703 * 64))
    assert " step 704/730 71.3% " in drawn(replace(view, statuses=statuses))[1]


def test_before_the_first_train_line_of_a_start_the_status_gives_loss_speed_and_time_left():
    view = run_view()
    pace = dict(loss=4.1, tokens_per_second=900.0, step_seconds=4.0)
    view = replace(view, statuses=[replace(view.statuses[0], **pace)])
    shown = rows_of(view, Texts())
    assert shown["loss"] == "4.1000 (smoothed 4.4735)" and shown["speed"] == "900 tokens/s, 40 pairs/s"
    assert shown["left"].startswith("9m 50s"), "of the journal, which counts evaluations and saves too"
    view.figures.add(dict(kind="resume", time=NOW, step=700, pairs_seen=44_800))
    assert rows_of(view, Texts())["left"].startswith("19m 40s")
    begun = Figures()
    begun.add(dict(kind="start", time=NOW, total_steps=1000, total_pairs=64_000, epochs=2, global_batch=64))
    shown = rows_of(replace(view, figures=begun), Texts())
    assert shown["loss"] == "4.1000" and shown["speed"] == "900 tokens/s" and shown["left"].startswith("19m 40s")
    stale = replace(view, figures=begun, now=NOW + ALIVE_SECONDS + 1)
    assert not {"loss", "speed", "left"} & rows_of(stale, Texts()).keys()


def test_the_screen_has_each_rank_with_what_the_driver_tells():
    lines = drawn(run_view())
    assert lines[0].split() == "model_save/pretrain · 60.5 M · 2 x GPU X training".split()
    assert re.fullmatch(r" step 705/1,000 70.5% ━+─+ 1.4 of 2 epochs +", lines[1])
    assert lines[3].split() == "0 13.0/20.0 65% safe 14.0 15.0/24.0 98% 71°C 310/320W 3.0".split()
    assert lines[4].split() == "1 17.0/20.0 85% edge 18.0 3.0".split()
    assert any("out of memory in step on rank 1: done again" in line for line in lines)
    assert lines[-1].strip() == "Ctrl+C stops the run with a checkpoint" and "a line" in "".join(lines)


def test_a_usual_terminal_has_room_for_a_curve_and_three_answers_as_less_needed_figures_give_way():
    view = run_view(log=["log line"])
    view.figures.evals[-1]["samples"] = [
        dict(question="很长的问题" * 20 * (i == 1) + f"q{i}", answer=f"a{i}") for i in range(3)
    ]
    low, high = drawn(view, 80, 24), "\n".join(drawn(view, 120, 40))
    assert [line.strip() for line in low if " → " in line] == [
        "q0 → a0",
        "…" + "的问题很长的问题很长的问题"[-11:] + "q1 → a1",
        "q2 → a2",
    ]
    assert sum("█" in line for line in low) == 2 and "incidents" in "".join(low)
    assert "data wait" in high and "length/ref 0.93" in high and "data wait" not in "".join(low)


@pytest.mark.parametrize("language", CATALOGUE)
@pytest.mark.parametrize("size", [(200, 60), (130, 30), (80, 24), (40, 10), (20, 5), (2, 2), (1, 1)])
def test_a_terminal_of_any_size_is_filled_exactly(size, language):
    columns, lines = size
    for view in (run_view(), run_view(statuses=[], sensors={}, log=[]), run_view(figures=Figures(), statuses=[])):
        shown = drawn(view, columns, lines, language)
        assert len(shown) == lines and all(cell_len(line) == columns for line in shown), shown


def test_the_log_gives_way_to_the_figures_on_a_low_terminal():
    log = [f"log line {number}" for number in range(40)]
    low, high = "\n".join(drawn(run_view(log=log), 80, 24)), "\n".join(drawn(run_view(log=log), 80, 40))
    assert "incidents" in low and "log line 30" not in low
    assert "log line 39" in high and "log line 20" not in high


def test_a_line_of_the_log_keeps_its_time_and_a_level_that_matters():
    assert log_line("[2026-01-02 03:04:05.678] [INFO]: training loss: epoch:1") == "03:04:05  training loss: epoch:1"
    assert log_line("[2026-01-02 03:04:05.678] [ERROR]: no plots") == "03:04:05  ERROR: no plots"
    assert log_line("SIGINT: stopping") == "SIGINT: stopping"


def said(**changes):
    return state(run_view(**changes), Texts()).plain


def test_the_state_is_what_the_first_rank_does():
    training = run_view().statuses[0]
    assert said() == "training"
    assert said(statuses=[replace(training, activity="evaluating", done=3, total=9)]) == "evaluating 3/9"
    assert said(statuses=[replace(training, saving=True)]) == "training, saving a checkpoint"
    assert said(statuses=[replace(training, stopping=True)]).startswith("stopping ...")
    assert said(statuses=[replace(training, activity=f"tokenising {HOSTILE}", total=0)]).isprintable()


def test_a_run_whose_status_is_old_is_silent_and_one_without_a_status_is_judged_by_its_journal():
    old = [replace(status, time=NOW - ALIVE_SECONDS - 80) for status in run_view().statuses]
    assert said(statuses=old, now=NOW + 30).startswith("silent for 1m 00s")
    assert said(statuses=[]) == "training"
    assert said(statuses=[], now=NOW + 3600).startswith("silent for 1h 00m")


@pytest.mark.parametrize(("reason", "words"), [("finished", "finished at"), ("asked", "stopped on request at")])
def test_the_state_of_a_run_that_ended_is_the_reason_and_no_time_is_left(reason, words):
    view = run_view()
    view.figures.add(dict(kind="stop", time=NOW, step=700, reason=reason))
    assert state(view, Texts()).plain == f"{words} step 700"
    assert not {"left", "next"} & rows_of(view, Texts()).keys()
    assert "left" in rows_of(run_view(), Texts())


def test_a_run_without_a_status_shows_the_memory_of_its_journal():
    view = run_view(statuses=[], sensors={})
    view.figures.train |= dict(reserved_bytes=12 * GIB, host_rss_bytes=2 * GIB)
    view.figures.peak_bytes = 13 * GIB
    assert drawn(view)[3].split() == "0 12.0 13.0 2.0".split()


def test_control_characters_of_strangers_do_not_reach_the_terminal():
    figures = Figures()
    figures.add(dict(kind="start", time=NOW, device=HOSTILE, epochs=HOSTILE, parameters=1))
    figures.add(dict(kind="save", time=NOW, step=1, error=HOSTILE))
    figures.add(dict(kind="stop", time=NOW, step=1, reason=HOSTILE))
    shown = drawn(run_view(figures=figures, run_dir=HOSTILE, log=[HOSTILE]))
    assert all(character.isprintable() for line in shown for character in line)
    assert sum(r"\x1b]0;title\x07" in line for line in shown) >= 4


def test_the_curve_falls_with_the_loss_between_its_labels_in_as_many_lines_as_there_is_room_for():
    (curve,) = loss_curve(run_view().figures, 44)
    label, bars = curve.split()
    assert label == "4.4735" and len(bars) == 35
    assert bars[0] == "█" and bars[-1] == "▁" and list(bars) == sorted(bars, reverse=True)
    high, *between, low = loss_curve(run_view().figures, 80, height=4)
    assert high.startswith("  4.9800 █") and low.startswith("  4.4735 █") and low.endswith("▁") and len(between) == 2
    assert {len(line) for line in (high, low)} == {80}
    assert loss_curve(Figures(), 30) == []
    heights = [sum("█" in line for line in drawn(run_view(), 130, lines)) for lines in (24, 36, 60)]
    assert heights == sorted(heights) and heights[0] >= 2 and heights[-1] == 6


def test_the_screen_shows_the_newest_answers_and_says_nothing_twice():
    lines = drawn(run_view(), 130, 40)
    assert sum("→" in line for line in lines) == 1 and " 1+1等于几？ → 等于600。 " in "".join(lines)
    said = [f"[2026-01-02 03:04:05.678] [INFO]: {line}" for line in (
        train_line(dict(loss=1.0)), sample_line(dict(question="q", answer="a")), "oom: step 3: done again", "a warning"
    )]  # fmt: skip
    assert [is_shown(line) for line in said] == [True, True, True, False]
    assert not is_shown(said[2].replace("INFO", "ERROR"))


def test_without_a_driver_or_for_an_unknown_gpu_there_are_no_sensors():
    assert Driver().read("") is None and Driver().read("00000000-0000-0000-0000-000000000000") is None


@pytest.mark.gpu
def test_the_driver_tells_what_nvidia_smi_tells():
    import torch

    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    sensors = Driver().read(str(properties.uuid).removeprefix("GPU-"))
    assert held.nbytes < sensors.used_bytes <= sensors.total_bytes
    assert sensors.total_bytes == pytest.approx(properties.total_memory, rel=0.05)
    assert 0 <= sensors.busy_percent <= 100 and 0 < sensors.celsius < 120 and 0 < sensors.watts < 2000
