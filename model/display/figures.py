"""Where a run stands: figures kept up to date from the lines of its journal, one by one, in bounded memory."""

from collections import deque

from model.run.journal import is_undone

EVENT_KINDS = ("oom", "not_finite", "skip", "resume", "save", "stop")
EVENT_FIELDS = ("kind", "time", "step", "where", "rank", "why", "error", "reason")  # a skip line also has a step's ids
MAX_EVENTS = 1000
SMOOTHING = 0.1  # weight of a new line's loss, once there are 1 / SMOOTHING lines
RECENT_LINES = 20  # train lines that the speed is measured over


def epochs_of(start: dict, train: dict) -> tuple[str, str]:
    """(epochs done by a train line, epochs of the run) as text; the second is "" where the start line has none."""
    pairs = start.get("epoch_pairs")
    values = train["pairs_seen"] / pairs if pairs else train["epoch"], start.get("epochs") or ""
    return tuple(f"{round(value, 2):g}" if isinstance(value, int | float) else str(value) for value in values)


class Series:
    """(step, value) points in order; when there are too many, neighbours become one point, their mean."""

    MAX_POINTS = 1024

    def __init__(self):
        self.steps, self.values = [], []
        self._per_point, self._pending = 1, []

    def add(self, step: int, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._per_point:
            return
        self.steps.append(step)
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.values) > self.MAX_POINTS:
            self.steps = self.steps[1::2]
            self.values = [(one + other) / 2 for one, other in zip(self.values[::2], self.values[1::2], strict=False)]
            self._per_point *= 2

    def drop_after(self, step: int) -> None:
        """Remove the points of later steps."""
        kept = sum(point <= step for point in self.steps)
        self.steps, self.values, self._pending = self.steps[:kept], self.values[:kept], []

    def at(self, step: int) -> float | None:
        """The value at the last point up to `step`, None before the first."""
        return next((value for at, value in zip(self.steps[::-1], self.values[::-1], strict=True) if at <= step), None)


class Figures:
    """The figures of a run. `add` takes the lines of its journal in order, those that a resume made void included."""

    def __init__(self):
        self.start, self.train = {}, None  # the last start line and the last valid train line
        self.step, self.pairs_seen = 0, 0  # pairs_seen is None where the journal does not tell
        self.losses = Series()  # smoothed
        self.smoothed, self._num_losses = None, 0
        self._since_eval = 0.0, 0  # training loss times target tokens, target tokens, since the last evaluation
        self.evals, self.saves = [], []  # valid lines; of the saves the newest good one and the failed ones after it
        self.events = deque(maxlen=MAX_EVENTS)  # valid lines, cut to EVENT_FIELDS
        self.stop, self.last_time, self.longest_pause, self.peak_bytes = None, None, 0.0, 0
        self.pairs_per_second = None
        self._recent = deque(maxlen=RECENT_LINES)  # (time, step) of the train lines of the current attempt

    def add(self, record: dict) -> None:
        """Take in the next line. Raises KeyError, TypeError or ValueError for one that no run writes."""
        kind, time = record["kind"], float(record["time"])
        if kind in ("start", "resume"):
            self.stop, self.longest_pause = None, 0.0
            self._recent.clear()
        elif self.last_time is not None:
            self.longest_pause = max(self.longest_pause, time - self.last_time)
        self.last_time = time
        if kind in EVENT_KINDS and not (kind == "save" and "error" not in record):
            self._add_event(kind, record)
        if handle := getattr(self, f"_add_{kind}", None):
            handle(record)

    def _add_event(self, kind, record):
        if kind == "resume":
            self.events = deque((old for old in self.events if not is_undone(old, record)), MAX_EVENTS)
        if kind != "resume" or record["step"]:  # every fresh run writes one for step 0
            self.events.append({name: record[name] for name in EVENT_FIELDS if name in record})

    def _add_start(self, record):
        self.start = record

    def _add_resume(self, record):
        step = record["step"]
        self.evals = [old for old in self.evals if not is_undone(old, record)]
        self.saves = [old for old in self.saves if not is_undone(old, record)]
        self.losses.drop_after(step)
        self.smoothed = self.losses.values[-1] if self.losses.values else None
        self._num_losses = min(self._num_losses, len(self.losses.values))
        self._since_eval = 0.0, 0
        if self.step > step:
            self.train = None
        self.step, self.pairs_seen = step, record.get("pairs_seen") if step else 0

    def _add_train(self, record):
        self.train, steps = record, record["step"] - self.step
        if steps > 0 and record.get("step_seconds") and self.pairs_seen is not None:
            self.pairs_per_second = (record["pairs_seen"] - self.pairs_seen) / (steps * record["step_seconds"])
        self.step, self.pairs_seen = record["step"], record["pairs_seen"]
        self._recent.append((record["time"], record["step"]))
        self.peak_bytes = max(self.peak_bytes, record.get("reserved_bytes") or record.get("peak_bytes") or 0)
        if record["loss"] is not None:
            self._smooth(record["step"], float(record["loss"]))
            (total, weight), tokens = self._since_eval, record.get("target_tokens", 1)
            self._since_eval = total + record["loss"] * tokens, weight + tokens

    def _smooth(self, step, loss):
        """Mean of the first lines, then an exponential moving average."""
        self._num_losses += 1
        weight = max(1 / self._num_losses, SMOOTHING)
        self.smoothed = loss if self.smoothed is None else (1 - weight) * self.smoothed + weight * loss
        self.losses.add(step, self.smoothed)

    def _add_eval(self, record):
        if record.get("loss") is None:
            return
        total, weight = self._since_eval
        derived = record["loss"] - total / weight if weight else None  # as runs write it
        if self.evals:  # the samples of the newest evaluation are all that is shown
            self.evals[-1].pop("samples", None)
        self.evals.append({"overfit_gap": derived} | record)
        self._since_eval = 0.0, 0

    def _add_save(self, record):
        self.saves = [*self.saves, record][-MAX_EVENTS:] if "error" in record else [record]

    def _add_stop(self, record):
        self.stop = record

    @property
    def world_size(self) -> int:
        return max(1, int(self.start.get("world") or 1))

    @property
    def best(self) -> dict | None:
        """The evaluation with the lowest loss."""
        return min(self.evals, key=lambda record: record["loss"], default=None)

    def count(self, kind: str) -> int:
        """Number of events of this kind, of the last MAX_EVENTS."""
        return sum(event["kind"] == kind for event in self.events)

    @property
    def overfit_gap(self) -> float | None:
        """That of the last evaluation; None where the journal does not tell."""
        return self.evals[-1]["overfit_gap"] if self.evals else None

    @property
    def num_above_best(self) -> int:
        """Number of evaluations since the best one."""
        return len(self.evals) - 1 - self.evals.index(self.best) if self.evals else 0

    @property
    def step_seconds(self) -> float | None:
        """`wall_step_seconds`, else the last train line's; None before the first train line."""
        return self.wall_step_seconds or (self.train.get("step_seconds") if self.train else None)

    @property
    def wall_step_seconds(self) -> float | None:
        """Recent wall-clock seconds a step, evaluations and saves included; None before this attempt has two lines."""
        if len(self._recent) < 2 or self._recent[-1][1] <= self._recent[0][1]:
            return None
        (first_time, first_step), (last_time, last_step) = self._recent[0], self._recent[-1]
        return (last_time - first_time) / (last_step - first_step)

    def step_at(self, pairs: int | None) -> int:
        """Number of the step after which so many `pairs` are seen, from the journal's newest line on."""
        batch = self.start.get("global_batch")
        if not batch or pairs is None or self.pairs_seen is None:
            return self.step
        return self.step + max(0, -(-(pairs - self.pairs_seen) // batch))

    def steps_to_epoch_end(self, step: int) -> int | None:
        """Steps from `step` to the end of its epoch; None where the journal does not tell."""
        pairs, epochs, batch = (self.start.get(name) for name in ("total_pairs", "epochs", "global_batch"))
        if not (pairs and epochs and batch) or self.pairs_seen is None:
            return None
        num_pairs = self.start.get("epoch_pairs") or pairs // epochs
        seen = self.pairs_seen + (step - self.step) * batch
        left = num_pairs - seen % num_pairs
        return -(-left // batch)

    def steps_to_evaluation(self, step: int, eval_steps: int) -> int | None:
        """Steps from `step` to the next evaluation: every `eval_steps` (0: never) and at each epoch's end."""
        until_epoch_end = self.steps_to_epoch_end(step)
        until_multiple = eval_steps - step % eval_steps if eval_steps else None
        return min((steps for steps in (until_epoch_end, until_multiple) if steps is not None), default=None)

    def steps_left(self, step: int) -> int | None:
        """Steps from `step` to the run's end; None where the journal does not tell."""
        total = self.start.get("total_steps")
        return max(0, total - step) if total else None
