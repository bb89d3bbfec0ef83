"""What a person sees of a run: the text of log lines, and a progress bar.

A run goes on if its terminal is closed.
"""

import contextlib
import logging
import sys
import time

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from model.display.answers import sample_text
from model.display.catalogue import Texts, texts_here
from model.runtime.activity import Pace, now_doing

LOGGER = logging.getLogger("chat_trainer")
CONSOLE = Console(stderr=True)
SAFE_PERCENT, EDGE_PERCENT = 85, 90
DRAW_SECONDS, LOG_SECONDS = 0.1, 60
SPEED_WINDOW_SECONDS = 300


def padded(text: str, width: int, right: bool = False) -> str:
    """`text` with spaces up to `width` cells of a terminal, of which a Chinese character takes two."""
    spaces = " " * (width - cell_len(text))
    return spaces + text if right else text + spaces


def human_bytes(count: int) -> str:
    """Bytes as readable text: 19.6 GiB, 512.0 MiB."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


def human_seconds(seconds: float) -> str:
    """Seconds as readable text, two units at most: 45s, 3m 12s, 5h 04m, 2d 03h."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def duration(seconds: float, text: Texts) -> str:
    """`human_seconds` with the units of the language."""
    units = dict(d="day", h="hour", m="minute", s="second")
    return human_seconds(seconds).translate({ord(unit): text(name) for unit, name in units.items()})


def memory_text(used_bytes: int, cap_bytes: int) -> str:
    """Memory used, the limit, the percentage, and a level: safe below 85 %, edge up to 90 %, dangerous above."""
    percent = 100 * used_bytes / cap_bytes
    level = "safe" if percent < SAFE_PERCENT else "edge" if percent <= EDGE_PERCENT else "dangerous"
    return f"{used_bytes / 2**30:.1f}/{cap_bytes / 2**30:.1f} GiB {percent:.0f}% {level}"


COMPACT, LOSS = "{:.4g}".format, "{:.4f}".format
PREFERENCE_FIELDS = {
    name: (name, LOSS)
    for name in (
        "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_log_prob", "rejected_log_prob",
        "chosen_log_ratio", "rejected_log_ratio",
    )
}  # fmt: skip
# what the catalogue calls a number in the log line: (key in the record, format)
TRAIN_FIELDS = {
    "epoch": ("epoch", COMPACT),
    "step": ("step", str),
    "loss": ("loss", LOSS),
    "z_loss": ("z_loss", LOSS),
    **PREFERENCE_FIELDS,
    "lr": ("learn_rate", "{:.3e}".format),
    "grad_norm": ("grad_norm", COMPACT),
    "tokens/s": ("tokens_per_second", "{:.0f}".format),
    "pairs": ("pairs_seen", str),
    "step_seconds": ("step_seconds", COMPACT),
    "micro_batches": ("micro_batches", COMPACT),
    "peak_memory": ("peak_bytes", human_bytes),
    "reserved_memory": ("reserved_bytes", human_bytes),
    "host_memory": ("host_rss_bytes", human_bytes),
}
EPOCH_FIELDS = {
    "epoch": ("epoch", COMPACT),
    "step": ("step", str),
    "of": ("averaged", lambda averaged: "average" if averaged else "weights"),  # whose figures these are
    "val_loss": ("val_loss", LOSS),
    "cur_bleu4": ("cur_bleu4", LOSS),
    "cur_chrf": ("cur_chrf", LOSS),
    "nats_per_char": ("nats_per_char", LOSS),
    **PREFERENCE_FIELDS,
    "loops": ("loops", LOSS),
    "ended": ("ended", LOSS),
    "length_ratio": ("length_ratio", LOSS),
    "distinct_2": ("distinct_2", LOSS),
    "best_val_loss": ("best_val_loss", LOSS),
    "best_step": ("best_step", str),
}


def train_line(values: dict) -> str:
    """The log line of a train record, with those of TRAIN_FIELDS that are in `values`."""
    return texts_here()("log.train") + _fields(TRAIN_FIELDS, values)


def epoch_line(values: dict) -> str:
    """The log line of an evaluation, with those of EPOCH_FIELDS that are in `values`."""
    return texts_here()("log.evaluated") + _fields(EPOCH_FIELDS, values)


def sample_line(sample: dict) -> str:
    """The log line of a sample of an evaluation: a question and the model's answer."""
    return texts_here()("log.sample") + sample_text(sample)


def _fields(fields: dict, values: dict) -> str:
    text = texts_here()
    said = {
        label: "none" if values[key] is None else form(values[key])
        for label, (key, form) in fields.items()
        if key in values
    }
    return ", ".join(f"{text(f'label.{label}')}:{text.get(f'label.{value}', value)}" for label, value in said.items())


def event_line(kind, values):
    """What went wrong in a step, in words; the journal has the numbers."""
    text = texts_here()
    known = {name: values[name] for name in ("where", "rank", "why") if name in values}
    if "where" in known:
        known["where"] = text.get(f"place.{known['where']}", known["where"])
    if kind == "oom" and values["before"] and values["after"]:
        before, now = (values[name]["micro_batch_tokens"] for name in ("before", "after"))
        said = text("smaller", now=now, before=before, **known) if now < before else text("event.oom", **known)
    else:
        said = text(f"event.{kind}", **known)
    return text("at_step", step=values["step"], said=said)


class Progress:
    """A progress bar: title, bar, count, time left at the recent speed, note. What it shows is this process's activity.

    If stderr is not a terminal, it logs one line per minute instead. If `shown` is false, it does nothing. It draws in
    `update`, without a thread, at most ten times per second. A `total` of None means unknown.
    """

    def __init__(self, title: str, total: int | None, unit: str = "steps", done: int = 0, shown: bool = True):
        self._title, self._total, self._drawn_at, self._bar = title, total, 0.0, None
        self._text = texts_here()
        self._said = self._text.get(f"state.{title}", title)
        self._unit = self._text.get(f"progress.{unit}", unit)
        self._logs, self._first_update, self._logged_at = shown and not sys.stderr.isatty(), None, time.monotonic()
        now_doing(title, done, total)
        if not shown or self._logs:
            return
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=CONSOLE,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            speed_estimate_period=SPEED_WINDOW_SECONDS,
        )
        self._task = self._bar.add_task(self._said, total=total, completed=done, count=self._count(done), note="")
        self._draw(self._bar.start)

    def update(self, done: int, note: str = "", pace: Pace | None = None) -> None:
        """Show that `done` of the total are done, and `note` after it; `pace` is the activity's."""
        now_doing(self._title, done, self._total, pace)
        if self._bar is None and not self._logs:
            return
        now = time.monotonic()
        # The first update is the reference for the speed: the steps before it may have compiled kernels.
        self._first_update = self._first_update or (now, done)
        if self._logs:
            self._log(done, now, note)
            return
        note = note or self._speed(done, now)
        self._bar.update(self._task, completed=done, count=self._count(done), note=note)
        if now - self._drawn_at >= DRAW_SECONDS:
            self._drawn_at = now
            self._draw(self._bar.refresh)

    def _log(self, done: int, now: float, note: str) -> None:
        first_at, first_done = self._first_update
        if now - self._logged_at < LOG_SECONDS:
            return
        self._logged_at = now
        time_left = f", {speed}" if (speed := self._speed(done, now)) else ""
        if self._total is not None and done > first_done:
            left = (self._total - done) * (now - first_at) / (done - first_done)
            time_left = ", " + self._text("progress.left", time=duration(left, self._text))
        LOGGER.info("%s: %s%s%s", self._said, self._count(done), note and f", {note}", time_left)

    def _speed(self, done: int, now: float) -> str:
        """The speed so far of work whose end is unknown; "" for other work, and before the second update."""
        first_at, first_done = self._first_update
        if self._total is not None or done == first_done:
            return ""
        return self._text("progress.speed", count=(done - first_done) / max(now - first_at, 1e-3), unit=self._unit)

    def close(self) -> None:
        """Stop drawing. The last state stays on the screen and the cursor is shown again."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.stop()

    def _count(self, done: int) -> str:
        return f"{done:,} {self._unit}" if self._total is None else f"{done:,}/{self._total:,} {self._unit}"

    def _draw(self, action) -> None:
        # Writing to a terminal that was closed (ssh lost, nohup) raises EIO; the run goes on without it.
        try:
            action()
        except OSError:
            self.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def progress_note(loss: float, tokens_per_second: float, used_bytes: int = 0, cap_bytes: int = 0) -> str:
    """The note of the training progress bar: loss, memory if there is a limit (`cap_bytes` above 0), speed."""
    text = texts_here()
    parts = [f"{text('measure.loss')} {loss:.4f}"]
    if cap_bytes:
        used, level = memory_text(used_bytes, cap_bytes).rsplit(" ", 1)
        parts.append(f"{used} {text(f'level.{level}')}")
    return ", ".join([*parts, text("speed.tokens", tokens=tokens_per_second)])
