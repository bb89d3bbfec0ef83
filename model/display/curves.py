"""The curves of a run, from its journal, with few enough points to draw, and its newest lines in words."""

import time

from model.display.console import epoch_line, train_line
from model.run.journal import read_journal

MAX_POINTS, LOG_LINES = 400, 50
EVAL_FIELDS = (
    "step", "loss", "nats_per_char", "bleu", "chrf", "loops", "ended", "length_ratio", "distinct_2",
)  # fmt: skip
TRAIN_FIELDS = ("step", "loss", "tokens_per_second", "learn_rate", "grad_norm", "reserved_bytes")


def curves_of(journal, most=MAX_POINTS):
    """Dict with `train` and `eval`, lists of points; `best`, that of lowest loss; the newest `samples`; log; steps."""
    lines = read_journal(journal)
    trained = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    evaluated = [_point(line, EVAL_FIELDS) for line in evaluations]
    starts = [line for line in lines if line["kind"] == "start"]
    return dict(
        train=[_point(line, TRAIN_FIELDS) for line in thinned(trained, most)],
        eval=thinned(evaluated, most),
        samples=evaluations[-1].get("samples", []) if evaluations else [],
        best=min((point for point in evaluated if point["loss"] is not None), key=lambda p: p["loss"], default=None),
        log=[said for line in lines[-LOG_LINES:] if (said := _said(line))],
        step=trained[-1]["step"] if trained else 0,
        total_steps=starts[-1].get("total_steps") if starts else None,
        is_finished=bool(lines) and lines[-1]["kind"] == "stop",
    )


def thinned(points, most):
    """At most `most` of the points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _point(line, names):
    return {name: line.get(name) for name in names}


def _said(line):
    """A train or eval line of a journal as the log has it, after the time of day; "" for others."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.get("time") or 0))
    if line["kind"] == "train":
        return f"{clock}  {train_line(line)}"
    return f"{clock}  {epoch_line(line | dict(val_loss=line.get('loss')))}" if line["kind"] == "eval" else ""
