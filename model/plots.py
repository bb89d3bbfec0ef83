"""Curves of a run, drawn from its journal alone. Needs matplotlib, and says so once where it is missing."""

import functools
import logging
from pathlib import Path

from model.report import read_journal

LOGGER = logging.getLogger("chat_trainer")


def plot_run(run_dir: str | Path) -> Path | None:
    """Path of plots/loss.png: training loss, validation loss and learning rate by step; None without matplotlib."""
    figure_class = _figure_class()
    if figure_class is None:
        return None
    records = read_journal(Path(run_dir) / "metrics.jsonl")
    figure = figure_class(figsize=(9, 5), layout="constrained")
    losses = figure.subplots()
    rates = losses.twinx()
    _curve(losses, records, "train", "loss", color="tab:blue", label="training loss")
    _curve(losses, records, "eval", "loss", color="tab:orange", label="validation loss", marker="o")
    _curve(rates, records, "train", "learn_rate", color="tab:gray", label="learning rate", linestyle=":")
    losses.set(xlabel="optimizer step", ylabel="loss [nats per target token]")
    rates.set_ylabel("learning rate")
    figure.legend(loc="outside upper center", ncols=3)
    path = Path(run_dir) / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _curve(axes, records: list[dict], kind: str, key: str, **look) -> None:
    points = [(record["step"], record.get(key)) for record in records if record["kind"] == kind]
    points = [(step, value) for step, value in points if value is not None]
    axes.plot([step for step, _ in points], [value for _, value in points], **look)


@functools.cache
def _figure_class():
    # Figure without pyplot: no display, no global state, nothing to close.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        LOGGER.info("no plots: matplotlib is not installed (pip install matplotlib); the journal has every number")
        return None
    return Figure
