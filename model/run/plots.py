"""Plots of a run, drawn from its journal and plan.json. Logs once if matplotlib is not installed."""

import functools
import io
import logging
from pathlib import Path

import ujson

from model.run.journal import read_journal
from model.runtime.atomic_io import write_file

LOGGER = logging.getLogger("chat_trainer")
GIB = 2**30


def plot_run(run_dir: str | Path) -> Path | None:
    """Draw plots/loss.png and plots/memory.png; returns the path of loss.png, None without matplotlib.

    loss.png has training loss, validation loss and learning rate by step. memory.png has the bytes reserved on the
    device and resident on the host by step, and the peak predicted in plan.json. Raises ValueError for a damaged
    journal.
    """
    figure_class = _figure_class()
    if figure_class is None:
        return None
    records = read_journal(Path(run_dir) / "metrics.jsonl")
    _save(_memory_figure(figure_class, records, Path(run_dir) / "plan.json"), run_dir, "memory.png")
    return _save(_loss_figure(figure_class, records), run_dir, "loss.png")


def try_plot(run_dir: str | Path) -> None:
    """Call `plot_run`; log a damaged journal or a disk error instead of raising it."""
    try:
        plot_run(run_dir)
    except (ValueError, OSError) as error:
        LOGGER.error("no plots: %s", error)


def _loss_figure(figure_class, records):
    figure = figure_class(figsize=(9, 5), layout="constrained")
    draw_losses(figure.subplots(), records)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def draw_losses(axes, records: list[dict]) -> None:
    """Draw training loss, validation loss and learning rate by step from journal `records` on matplotlib `axes`."""
    rates = axes.twinx()
    _curve(axes, records, "train", "loss", color="tab:blue", label="training loss")
    _curve(axes, records, "eval", "loss", color="tab:orange", label="validation loss", marker="o")
    _curve(rates, records, "train", "learn_rate", color="tab:gray", label="learning rate", linestyle=":")
    axes.set(xlabel="optimizer step", ylabel="loss [nats per target token]")
    rates.set_ylabel("learning rate")


def _memory_figure(figure_class, records, plan_path):
    figure = figure_class(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for key, colour, label in (("reserved_bytes", "tab:blue", "reserved on the device"),
                               ("host_rss_bytes", "tab:orange", "resident on the host")):  # fmt: skip
        scaled = [record | {key: record[key] / GIB} for record in records if record.get(key)]
        _curve(axes, scaled, "train", key, color=colour, label=label)
    if plan_path.exists():
        predicted = ujson.loads(plan_path.read_text()).get("predicted_peak_bytes", 0) / GIB
        axes.axhline(predicted, color="tab:gray", linestyle=":", label="predicted peak of a step on the device")
    axes.set(xlabel="optimizer step", ylabel="GiB", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _save(figure, run_dir, name):
    path = Path(run_dir) / "plots" / name
    path.parent.mkdir(exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    write_file(path, drawn.getvalue())
    return path


def _curve(axes, records: list[dict], kind: str, key: str, **style) -> None:
    points = [(record["step"], record.get(key)) for record in records if record["kind"] == kind]
    points = [(step, value) for step, value in points if value is not None]
    axes.plot([step for step, _ in points], [value for _, value in points], **style)


@functools.cache
def _figure_class():
    # Figure without pyplot needs no display and has no global state to close.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        LOGGER.info("no plots: matplotlib is not installed (pip install matplotlib); the journal has every number")
        return None
    return Figure
