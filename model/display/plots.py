"""Plots of runs, drawn from their journals and plan.json."""

import io
import logging
import os
from pathlib import Path

import ujson

from model.display.journal_points import between, figures_of, gaps_of, hours_of, points_of, smoothed
from model.run.journal import read_journal
from model.runtime.atomic_io import write_file

GIB = 2**30
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei", "SimHei")
STEPS, PAIRS = "optimizer step", "pairs seen"
LOG_RATIO = 4  # highest to lowest loss of a run, above which the axis is logarithmic
RAW = dict(linewidth=0.8, alpha=0.35)
LEGEND = dict(loc="outside upper center", frameon=False)
PREFERENCES = {
    "accuracy": ("accuracy",), "reward": ("chosen_reward", "rejected_reward", "margin"),
    "log-probability a token": ("chosen_log_prob", "rejected_log_prob"),
}  # fmt: skip
BEST = dict(marker="*", markersize=11, linestyle="", color="tab:red")


def plot_run(run_dir: str | Path) -> list[Path]:
    """Draw loss, speed, memory, learning rate and, where there are any, lengths and answers; returns paths in plots/.

    Raises ValueError for a damaged journal or plan.json, FileNotFoundError without a journal.
    """
    run_dir = Path(run_dir)
    records, plan = read_journal(run_dir / "metrics.jsonl"), _read_plan(run_dir / "plan.json")
    pictures = dict(
        loss=_loss_figure(records),
        speed=_figure_of(draw_speed, records),
        memory=_figure_of(draw_memory, records, plan.get("predicted_peak_bytes", 0)),
        learning_rate=_figure_of(draw_learn_rate, records),
    )
    if plan.get("lengths"):
        pictures["lengths"] = _figure_of(draw_lengths, plan["lengths"])
    if points_of(records, "eval", "loops")[0]:
        pictures["answers"] = _figure_of(draw_answers, records)
    if points_of(records, "train", "accuracy")[0]:
        pictures["preferences"] = _preference_figure(records)
    return [_save(figure, run_dir / "plots" / f"{name}.png", run_dir.name) for name, figure in pictures.items()]


def load_matplotlib() -> None:
    """Draw an empty picture, for which matplotlib and its fonts are loaded."""
    _new_figure(1, 1).savefig(io.BytesIO())


def plot_runs(run_dirs: list[Path], out: Path) -> None:
    """Draw the losses of several runs into the picture `out`: by pairs on the left, by hours on the right.

    Raises ValueError for a damaged journal or an unknown suffix of `out`, OSError if a file cannot be read or written.
    """
    figure = _new_figure(13, 8)
    kinds = figure.canvas.get_supported_filetypes()
    if out.suffix.lstrip(".").lower() not in ("", *kinds):
        raise ValueError(f"--plot={out}: no picture of this kind can be drawn: type --plot={out.with_suffix('.png')}")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    names = _short_names(run_dirs)
    for run_dir, name in zip(run_dirs, names, strict=True):
        _draw_run(axes, read_journal(run_dir / "metrics.jsonl"), name)
    axes[0][0].set_ylabel("training loss, smoothed\n[nats per target token]")
    axes[1][0].set_ylabel("validation loss\n[nats per target token]")
    axes[1][0].set_xlabel(PAIRS)
    axes[1][0].xaxis.set_major_formatter("{x:,.0f}")
    axes[1][1].set_xlabel("hours of the run, pauses between starts left out")
    _finish(axes.flat)
    figure.legend(*axes[0][0].get_legend_handles_labels(), ncols=min(len(names), 4), **LEGEND)
    _save(figure, out)


def draw_losses(axes, records: list[dict]) -> None:
    """Draw training loss, each line's and smoothed, and validation loss by step on matplotlib `axes`."""
    steps, losses = points_of(records, "train", "loss")
    axes.plot(steps, losses, color="tab:blue", **RAW)
    axes.plot(steps, smoothed(losses), color="tab:blue", label="training loss, smoothed")
    _curve(axes, records, "eval", "loss", color="tab:orange", label="validation loss", marker="o", markersize=4)
    if best := figures_of(records).best:
        axes.plot(best["step"], best["loss"], label=f"best {best['loss']:.4f} at step {best['step']:,}", **BEST)
    unit = "" if points_of(records, "train", "accuracy")[0] else " [nats per target token]"
    axes.set(xlabel=STEPS, ylabel=f"loss{unit}")
    if losses and min(losses) > 0 and max(losses) > LOG_RATIO * min(losses):
        _log_scale(axes)


def _log_scale(axes):
    """A logarithmic axis with plain numbers on it, also where the values lie within a power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_answers(axes, records: list[dict]) -> None:
    """Draw what generated answers to validation questions are like: shares, and the length to the references'."""
    curves = dict(loops="loops", reference_loops="loops of the references", ended="ended by themselves",
                  length_ratio="length to the references'", distinct_2="distinct-2")  # fmt: skip
    for key, label in curves.items():
        style = dict(color="tab:gray", linestyle=":") if key == "reference_loops" else dict(marker="o", markersize=3)
        _curve(axes, records, "eval", key, label=label, **style)
    axes.set(xlabel=STEPS, ylabel="share of the answers", ylim=(0, None))


def draw_gap(axes, records: list[dict]) -> None:
    """Draw the over-fit gap: validation loss less mean training loss since the evaluation before."""
    points = gaps_of(records)
    axes.axhline(0, color="tab:gray", linewidth=0.8)
    axes.plot([step for step, _ in points], [gap for _, gap in points], color="tab:red", marker="o", markersize=3)
    axes.set(xlabel=STEPS, ylabel="over-fit gap\n[nats per token]")


def draw_speed(axes, records: list[dict]) -> None:
    """Draw real tokens a second of all ranks by step, each line's and smoothed."""
    steps, speeds = points_of(records, "train", "tokens_per_second")
    axes.plot(steps, speeds, color="tab:green", **RAW)
    axes.plot(steps, smoothed(speeds), color="tab:green", label="real tokens a second, all ranks")
    axes.set(xlabel=STEPS, ylabel="tokens per second", ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def draw_memory(axes, records: list[dict], predicted_bytes: int) -> None:
    """Draw memory by step, and the predicted peak of a GPU where there is one."""
    curves = (("reserved_bytes", "tab:blue", "reserved on the GPU"), ("peak_bytes", "tab:purple", "peak on the GPU"),
              ("host_rss_bytes", "tab:orange", "resident on the host (rank 0)"))  # fmt: skip
    is_on_gpu = any(record.get("reserved_bytes") for record in records)
    for key, colour, label in curves if is_on_gpu else curves[2:]:
        scaled = [record | {key: record[key] / GIB} for record in records if record.get(key)]
        _curve(axes, scaled, "train", key, color=colour, label=label)
    if is_on_gpu and predicted_bytes:
        axes.axhline(predicted_bytes / GIB, color="tab:gray", linestyle=":", label="predicted peak on the GPU")
    axes.set(xlabel=STEPS, ylabel="memory [GiB]", ylim=(0, None))


def draw_learn_rate(axes, records: list[dict]) -> None:
    _curve(axes, records, "train", "learn_rate", color="tab:gray", label="learning rate")
    axes.set(xlabel=STEPS, ylabel="learning rate", ylim=(0, None))


def draw_lengths(axes, lengths: dict) -> None:
    """Draw how many examples have how many tokens, for each column: {name: {"width": tokens, "counts": […]}}."""
    for name, bins in lengths.items():
        edges = [place * bins["width"] for place in range(len(bins["counts"]) + 1)]
        axes.stairs(bins["counts"], edges, fill=True, alpha=0.45, label=name)
    axes.set(xlabel="tokens of an example", ylabel="training examples", ylim=(0, None), xlim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_run(axes, records, name):
    """One run in the four panels of `plot_runs`."""
    hours, pairs = hours_of(records), points_of(records, "train", "pairs_seen")
    for row, kind, style in ((0, "train", {}), (1, "eval", dict(marker="o", markersize=4))):
        lines = [record for record in records if record["kind"] == kind and record.get("loss") is not None]
        losses = [record["loss"] for record in lines]
        losses = losses if row else smoothed(losses)
        by_pairs = [between(*pairs, record["step"]) for record in lines]
        (drawn,) = axes[row][0].plot(by_pairs, losses, label=name, **style)
        axes[row][1].plot([hours[id(record)] for record in lines], losses, color=drawn.get_color(), **style)


def _short_names(run_dirs):
    """The last parts of the paths, as many as tell them apart."""
    parts = [Path(os.path.abspath(run_dir)).parts for run_dir in run_dirs]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run_dir) for run_dir in run_dirs]


def _loss_figure(records):
    figure, has_gap = _new_figure(9, 5.5), bool(gaps_of(records))
    upper, *lower = figure.subplots(1 + has_gap, 1, sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + has_gap])[
        :, 0
    ]
    draw_losses(upper, records)
    if lower:
        draw_gap(lower[0], records)
        upper.set_xlabel("")
    _finish([*lower, upper])
    figure.legend(ncols=3, **LEGEND)
    return figure


def _preference_figure(records):
    """Training smoothed as lines, evaluations as points."""
    figure = _new_figure(9, 9)
    panels = figure.subplots(len(PREFERENCES), 1, sharex=True)
    for axes, (ylabel, keys) in zip(panels, PREFERENCES.items(), strict=True):
        for number, key in enumerate(keys):
            steps, values = points_of(records, "train", key)
            axes.plot(steps, smoothed(values), color=f"C{number}", label=key.partition("_")[0])
            _curve(axes, records, "eval", key, color=f"C{number}", linestyle="", marker="o", markersize=4)
        axes.set(ylabel=ylabel)
    axes.set(xlabel=STEPS)
    _finish(panels)
    figure.legend(*panels[1].get_legend_handles_labels(), ncols=3, **LEGEND)
    return figure


def _figure_of(draw, *values):
    figure = _new_figure(9, 4)
    axes = figure.subplots()
    draw(axes, *values)
    _finish([axes])
    figure.legend(ncols=4, **LEGEND)
    return figure


def _new_figure(width, height):
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no display, no global state to close

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of each font that this machine lacks
    matplotlib.rcParams["font.family"] = list(FONTS)
    return Figure(figsize=(width, height), layout="constrained")


def _finish(panels):
    for axes in panels:
        if axes.get_xlabel() in (STEPS, PAIRS):
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def _save(figure, path, title=""):
    if title:
        figure.axes[0].set_title(title, fontsize=10, loc="left")  # below the legend, which is above all panels
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format=path.suffix.lstrip(".") or "png")
    write_file(path, drawn.getvalue())
    return path


def _curve(axes, records, kind, key, **style):
    axes.plot(*points_of(records, kind, key), **style)


def _read_plan(path):
    try:
        plan = ujson.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): the next start writes it") from None
    return plan if isinstance(plan, dict) else {}
