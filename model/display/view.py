"""What the screen says, as text: a view of a run and its rows. Pure: it reads no file and no clock."""

import re
import time
from dataclasses import dataclass, field

from rich.text import Text

from model.display.answers import answer_rows, preference_rows
from model.display.catalogue import CATALOGUE, COUNTS, Texts
from model.display.console import duration, memory_text
from model.display.figures import EVENT_KINDS, Figures
from model.display.sensors import Sensors
from model.run.status import Status
from model.runtime.terminal import printable

GIB = 2**30
LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)\.\d{3}\] \[(\w+)\]: ")  # how a line of the log begins
NUMBERS = tuple(words[f"log.{kind}"] for words in CATALOGUE.values() for kind in ("train", "evaluated", "sample"))
SHOWN = (*NUMBERS, *(f"{kind}: " for kind in EVENT_KINDS))
ALIVE_SECONDS = 30  # a status is written twice a second, but not while a library call keeps all threads waiting
SILENT_SECONDS = 600  # for runs without a status
LEVEL_STYLES = dict(safe="green", edge="yellow", dangerous="bold red")


@dataclass(frozen=True)
class View:
    """What is shown."""

    run_dir: str
    figures: Figures
    now: float  # Unix seconds
    statuses: list[Status] = field(default_factory=list)
    sensors: dict[str, Sensors] = field(default_factory=dict)  # by the GPU's uuid
    options: dict = field(default_factory=dict)  # of the run, as config.json has them
    log: list[str] = field(default_factory=list)  # the newest lines that the run printed
    hint: str = ""  # the key of the last line's text

    @property
    def status(self) -> Status | None:
        """Of rank 0, if its process is alive."""
        main = next((status for status in self.statuses if status.rank == 0), None)
        return main if main and is_alive(main, self.now) else None

    @property
    def step(self) -> int:
        """Optimizer steps done; the status, which counts pairs, is ahead of the journal."""
        return self.figures.step_at(self._pairs)

    @property
    def share(self) -> float:
        """How much of the run is done, in pairs, as steps may have had another size before a resume; 0 if unknown."""
        total = self.figures.start.get("total_pairs")
        return min(1.0, (self._pairs or 0) / total) if total else 0.0

    @property
    def _pairs(self):
        """Pairs seen; None where the journal does not tell."""
        status, seen = self.status, self.figures.pairs_seen
        return max(seen or 0, status.done) if status and status.activity == "training" else seen

    @property
    def pace(self) -> Status | None:
        """The status of rank 0, if it has the figures of its newest steps."""
        return self.status if self.status and self.status.step_seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Recent seconds a step: of the journal once this attempt has two train lines, else of the status."""
        pace, figures = self.pace, self.figures
        return figures.wall_step_seconds or (pace.step_seconds if pace else figures.step_seconds)


def is_alive(status: Status, now: float) -> bool:
    """Whether the process that wrote `status` still runs at Unix time `now`, if the clocks of the machines agree."""
    return now - status.time <= ALIVE_SECONDS


def state(view: View, text: Texts) -> Text:
    """What the run is doing, or how it ended."""
    figures, status = view.figures, view.status
    if figures.stop and not (status and status.time > figures.stop["time"] + ALIVE_SECONDS):
        reason = str(figures.stop["reason"])
        style = dict(finished="bold green", failed="bold red").get(reason, "bold yellow")
        said = text(f"state.{reason}", step=figures.step) if text.get(f"state.{reason}", "") else printable(reason)
        return Text(said, style=style)
    if status:
        return doing(status, text)
    if figures.last_time is None:
        return Text(text("state.waiting"), style="dim")
    last_life = max([figures.last_time, *(status.time for status in view.statuses)])
    limit = ALIVE_SECONDS if view.statuses else max(SILENT_SECONDS, 2 * figures.longest_pause)
    if view.now - last_life > limit:
        return Text(text("state.silent", time=duration(view.now - last_life, text)), style="bold red")
    return Text(text("state.training"), style="bold green")


def doing(status: Status, text: Texts) -> Text:
    """What a rank that is alive says that it does."""
    if status.stopping:
        return Text(text("state.stopping"), style="bold yellow")
    said = printable(text.get(f"state.{status.activity}", status.activity))
    if status.total and status.activity != "training":
        said += f" {status.done:,}/{status.total:,}"
    if status.saving:
        said += ", " + text("state.saving")
    return Text(said, style="bold green")


def status_of_journal(figures: Figures) -> Status:
    """What the last train line says of rank 0, for runs that left no status."""
    line = figures.train or {}
    return Status(
        reserved_bytes=line.get("reserved_bytes") or 0,
        peak_bytes=figures.peak_bytes,
        rss_bytes=line.get("host_rss_bytes") or 0,
    )


def device_cells(status: Status, sensors: Sensors | None, text: Texts) -> list[str | Text]:
    """A rank's line: rank, memory of its limit, peak, whole card, utilisation, temperature, power, process."""
    sensors = sensors or Sensors()
    used = Text(text("cpu") if status.pid and not status.peak_bytes else gib(status.reserved_bytes))
    if status.limit_bytes:
        sizes, _, percent, level = memory_text(status.reserved_bytes, status.limit_bytes).split(" ")
        used = Text(f"{sizes} {percent} {text(f'level.{level}')}", style=LEVEL_STYLES[level])
    card = f"{gib(sensors.used_bytes)}/{gib(sensors.total_bytes)}" if sensors.total_bytes else ""
    limit = f"/{sensors.limit_watts:.0f}" if sensors.limit_watts else ""
    return [
        str(status.rank), used, gib(status.peak_bytes), card, told(sensors.busy_percent, "{}%"),
        told(sensors.celsius, "{}°C"), told(sensors.watts, "{:.0f}" + limit + "W"), gib(status.rss_bytes),
    ]  # fmt: skip


def count_of(parameters: int, text: Texts) -> str:
    """A number of weights: 60.5 M, 7.6 K; 6,050 万."""
    unit, form = next((unit, form) for least, unit, form in COUNTS[text.language] if parameters >= least)
    return form.format(parameters / unit)


def devices_of(count: int, device: str, text: Texts) -> str:
    """`count` processes and the name of what each computes on, as the journal has it."""
    if cpu := re.fullmatch(r"CPU \((\d+) threads\)", device):
        return text("where.cpu", count=count, threads=cpu[1])
    return text("where.card", count=count, name=device)


def gib(count: int) -> str:
    """GiB without their name; nothing for 0."""
    return f"{count / GIB:.1f}" if count else ""


def told(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def rows_of(view: View, text: Texts) -> dict[str, str]:
    """The rows below the devices, value by the row's key in the catalogue."""
    figures = view.figures
    rows = training_rows(view, text)
    if figures.evals:
        best, last = figures.best, figures.evals[-1]
        of = "" if last.get("averaged") is None else text("of.average" if last["averaged"] else "of.weights")
        scores = dict(last=number(last["loss"], text) + of, best=number(best["loss"], text), step=best["step"])
        rows["validation"] = text("validation", **scores)
        rows |= gap(figures, text) | answer_rows(figures.evals[-1], text)
    rows |= preference_rows(figures.evals[-1] if figures.evals else figures.train or {}, text)
    if not figures.stop:
        rows |= time_left(view, text)
    rows["save"] = last_save(figures, view.now, text)
    rows |= host_memory_row(view, text)
    rows["events"] = text("incidents", **{kind: figures.count(kind) for kind in ("oom", "skip", "resume")})
    return rows


def training_rows(view: View, text: Texts) -> dict[str, str]:
    """Loss, learning rate and speed, of the status where that knows them; nothing before the second step."""
    figures, pace, line = view.figures, view.pace, view.figures.train or {}
    rows = {}
    if pace and pace.loss or line:
        loss = number(pace.loss if pace and pace.loss else line["loss"], text)
        smoothed = figures.smoothed is not None
        rows["loss"] = text("smoothed", loss=loss, smoothed=f"{figures.smoothed:.4f}") if smoothed else loss
    if line:
        rows["rate"] = f"{line['learn_rate']:.3e}"
    if pace or line:
        rows["speed"] = speed(figures, pace.tokens_per_second if pace else line["tokens_per_second"] or 0, text)
    return rows | wait(line, text)


def number(value: float | None, text: Texts) -> str:
    return text("not_finite") if value is None else f"{value:.4f}"


def speed(figures: Figures, tokens: float, text: Texts) -> str:
    pairs = figures.pairs_per_second
    return text("speed", tokens=tokens, pairs=pairs) if pairs is not None else text("speed.tokens", tokens=tokens)


def wait(line: dict, text: Texts) -> dict[str, str]:
    """How long a step waits for its data."""
    waited, seconds = line.get("data_wait_seconds"), line.get("step_seconds")
    if waited is None or not seconds:
        return {}
    return dict(wait=text("wait", milliseconds=1000 * waited, percent=100 * waited / seconds))


def gap(figures: Figures, text: Texts) -> dict[str, str]:
    """How far validation is above training, and for how long it has risen."""
    if figures.overfit_gap is None:
        return {}
    key = "gap.rising" if figures.num_above_best else "gap"
    return dict(gap=text(key, gap=figures.overfit_gap, count=figures.num_above_best))


def time_left(view: View, text: Texts) -> dict[str, str]:
    """Time to the ends of the run and of the epoch, and the next evaluation."""
    figures, step, rows = view.figures, view.step, {}
    seconds, left, in_epoch = view.step_seconds, figures.steps_left(step), figures.steps_to_epoch_end(step)
    if seconds is not None and left is not None:
        times = dict(run=duration(seconds * left, text))
        if in_epoch is not None:
            times["epoch"] = duration(seconds * min(in_epoch, left), text)
        rows["left"] = text("left" if "epoch" in times else "left.run", **times)
    eval_steps = view.options.get("eval_steps")
    steps = figures.steps_to_evaluation(step, eval_steps if isinstance(eval_steps, int) else 0)
    if steps is not None and seconds is not None:
        rows["next"] = text("next", steps=steps, time=duration(seconds * steps, text))
    elif steps is not None:
        rows["next"] = text("next.steps", steps=steps)
    return rows


def last_save(figures: Figures, now: float, text: Texts) -> str:
    """The newest checkpoint, and the step of a later one that failed."""
    saved = [save for save in figures.saves if "error" not in save]
    said = text("none")
    if saved:
        said = text("saved", step=saved[-1]["step"], ago=duration(max(0, now - saved[-1]["time"]), text))
    if figures.saves and "error" in figures.saves[-1]:
        said += text("saved.failed", step=figures.saves[-1]["step"])
    return said


def host_memory_row(view: View, text: Texts) -> dict[str, str]:
    """Memory of the first rank's machine while it runs, and what the run's processes there use."""
    if not view.statuses:
        return {}
    host = view.statuses[0]
    run = f"{sum(status.rss_bytes for status in view.statuses if status.host == host.host) / GIB:.1f}"
    if not host.host_total_bytes or not is_alive(host, view.now):
        return dict(memory=text("host_memory.run", run=run))
    used, total = host.host_used_bytes, host.host_total_bytes
    sizes = dict(used=f"{used / GIB:.1f}", total=f"{total / GIB:.1f}", percent=100 * used / total)
    return dict(memory=text("host_memory", run=run, **sizes))


def event_lines(view: View, text: Texts) -> list[str]:
    """The events of the run, oldest first."""
    return [event_line(event, text) for event in view.figures.events]


def event_line(event: dict, text: Texts) -> str:
    kind, clock = event["kind"], time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"]))
    values = {name: str(event.get(name, "")) for name in ("where", "rank", "why", "error")}
    reason = str(event.get("reason", ""))
    key = "event.oom.last" if kind == "oom" and event.get("rank") is None else f"event.{kind}"
    values["where"] = text.get(f"place.{values['where']}", values["where"])
    said = text(key, reason=text.get(f"reason.{reason}", reason), **values)
    return printable(f"{clock}  {text('at_step', step=event.get('step', 0), said=said)}")


def log_line(line: str) -> str:
    """A line of the log with the time of day alone before it, and its level if that is not INFO."""
    return LOG_LINE.sub(lambda begins: f"{begins[1]}  " + (f"{begins[2]}: " if begins[2] != "INFO" else ""), line, 1)


def is_shown(line: str) -> bool:
    """Whether the screen shows elsewhere what a line of the log says: the figures, the samples, the events."""
    begins = LOG_LINE.match(line)
    return bool(begins) and begins[2] == "INFO" and line[begins.end() :].startswith(SHOWN)
