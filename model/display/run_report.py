"""What a run's journal says of it: a report of rows, text by name, in the reader's language."""

import time
from pathlib import Path

from model.display.answers import figures_text, preference_rows, sample_text, told
from model.display.catalogue import texts_here
from model.display.console import duration, human_bytes
from model.display.figures import Figures, epochs_of
from model.display.view import View, doing
from model.run.journal import read_journal
from model.run.status import read_statuses

SILENT_SECONDS = 600


def rows_of(run_dir: Path) -> dict[str, str]:
    """The rows of a run's report, text by name."""
    path = run_dir / "metrics.jsonl"
    records = read_journal(path) if path.exists() else []
    if not records:
        return {"state": before_the_journal(run_dir)}
    figures = Figures()
    try:
        for record in records:
            figures.add(record)
        return describe(View(str(run_dir), figures, time.time(), read_statuses(run_dir, 1)), records)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{path} has a line that no run writes ({error!r}): delete that line") from error


def before_the_journal(run_dir: Path) -> str:
    """What is known of a run that has not written its first line."""
    try:
        since = duration(max(0, time.time() - (run_dir / "run.lock").stat().st_mtime), texts_here())
    except FileNotFoundError:
        return texts_here()("journal.no_run")
    return texts_here()("journal.waiting", time=since)


def describe(view: View, records: list[dict]) -> dict[str, str]:
    """The rows of the report, text by name; `records` must not be empty."""
    trained = of_kind(records, "train")
    rows = {"state": state(view, records)}
    if trained:
        rows |= training_rows(view.figures.start, trained)
    if not stop_of(records):
        rows |= newest_rows(view, has_line=bool(of_kind(current_attempt(records), "train")))
    return rows | evaluation_rows(of_kind(records, "eval")) | event_rows(records, view.now)


def newest_rows(view: View, has_line: bool) -> dict[str, str]:
    """What the status of rank 0 says of its newest steps, and the time left; `has_line`: the journal has a loss too."""
    rows, left = {}, view.figures.steps_left(view.step)
    if pace := view.pace:
        rows["step"] = out_of(view.step, view.figures.start.get("total_steps"))
        if pace.loss and not has_line:
            rows["training loss"] = number(pace.loss)
        rows["speed"] = texts_here()("journal.tokens", count=pace.tokens_per_second)
    if view.step_seconds and left is not None:
        rows["time left"] = duration(view.step_seconds * left, texts_here())
    return rows


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


def state(view: View, records: list[dict]) -> str:
    if last_stop := stop_of(records):
        reason = texts_here().get(f"reason.{last_stop['reason']}", last_stop["reason"])
        return texts_here()("journal.stopped", reason=reason, step=last_stop["step"])
    silent_seconds = max(0, view.now - records[-1]["time"])
    if view.status:
        return texts_here()(
            "journal.doing", doing=doing(view.status, texts_here()).plain, time=duration(silent_seconds, texts_here())
        )
    if silent_seconds > max(SILENT_SECONDS, 2 * longest_pause(records)):
        return texts_here()("journal.silent", time=duration(silent_seconds, texts_here()))
    return texts_here()("journal.training", time=duration(silent_seconds, texts_here()))


def current_attempt(records: list[dict]) -> list[dict]:
    """The records from the last start or resume on, which one process wrote."""
    starts = [index for index, record in enumerate(records) if record["kind"] in ("start", "resume")]
    return records[starts[-1] :] if starts else records


def stop_of(records: list[dict]) -> dict | None:
    """The stop record of the current attempt, None if it is still running or was killed."""
    stops = of_kind(current_attempt(records), "stop")
    return stops[-1] if stops else None


def longest_pause(records: list[dict]) -> float:
    """Seconds of the longest pause between two records of the current attempt."""
    times = [record["time"] for record in current_attempt(records)]
    return max((later - earlier for earlier, later in zip(times, times[1:], strict=False)), default=0)


def training_rows(start: dict, trained: list[dict]) -> dict[str, str]:
    last = trained[-1]
    done, epochs = epochs_of(start, last)
    rows = {
        "step": out_of(last["step"], start.get("total_steps")),
        "epochs": texts_here()("journal.epochs", done=done, total=epochs) if epochs else done,
        "pairs seen": out_of(last["pairs_seen"], start.get("total_pairs")),
        "training loss": loss_row(trained),
        "learning rate": f"{last['learn_rate']:.3e}",
        "speed": texts_here()("journal.tokens", count=last["tokens_per_second"]),
    }
    peak = max(trained, key=lambda record: record.get("peak_bytes") or 0)
    if peak.get("peak_bytes"):
        rows["peak memory"] = texts_here()("journal.by_step", size=human_bytes(peak["peak_bytes"]), step=peak["step"])
    return rows


def out_of(done: int, total: int | None) -> str:
    return texts_here()("journal.of", done=done, total=total, share=done / total) if total else f"{done:,}"


def loss_row(trained: list[dict]) -> str:
    """The last loss and the one about 100 steps earlier."""
    now, earlier = trained[-1], [record for record in trained if record["step"] <= trained[-1]["step"] - 100]
    if not earlier:
        return number(now["loss"])
    before = dict(step=earlier[-1]["step"], earlier=number(earlier[-1]["loss"]))
    return texts_here()("journal.earlier", loss=number(now["loss"]), **before)


def number(value: float | None) -> str:
    return texts_here()("journal.not_finite") if value is None else f"{value:.4f}"


def evaluation_rows(evaluated: list[dict]) -> dict[str, str]:
    rows = {}
    losses = [record for record in evaluated if record.get("loss") is not None]
    if losses:
        best = min(losses, key=lambda record: record["loss"])
        rows["validation loss"] = texts_here()(
            "journal.best", best=at_step(best, "loss"), last=at_step(losses[-1], "loss")
        )
    for key, name in (("bleu", "BLEU"), ("chrf", "chrF")):
        scored = [record for record in evaluated if record.get(key) is not None]
        if scored:
            rows[name] = at_step(scored[-1], key)
    if losses:
        answered = figures_text(losses[-1], ("loops", "ended", "length_ratio", "distinct_2"), texts_here())
        said = {texts_here()("row.answers"): answered, texts_here()("row.nats"): told(losses[-1], "nats_per_char")}
        said |= {texts_here()(f"row.{row}"): words for row, words in preference_rows(losses[-1], texts_here()).items()}
        rows |= {name: words for name, words in said.items() if words} | sample_rows(losses[-1])
    return rows


def sample_rows(evaluation: dict) -> dict[str, str]:
    """What the model answered to the fixed questions at its newest evaluation, a row for each."""
    samples = evaluation.get("samples") or []
    return {
        texts_here()("journal.sample", number=number): sample_text(each) for number, each in enumerate(samples, start=1)
    }


def at_step(record: dict, key: str) -> str:
    return texts_here()("journal.at_step", value=record[key], step=record["step"])


def events_row(events: list[dict]) -> str:
    if not events:
        return texts_here()("journal.events", count=0)
    last = events[-1]
    key = "journal.events.last" if "step" in last else "journal.events"
    said = texts_here()(key, count=len(events), step=last.get("step"))
    if "where" not in last:
        return said
    return said + texts_here()("journal.events.where", where=texts_here().get(f"place.{last['where']}", last["where"]))


def event_rows(records: list[dict], now: float) -> dict[str, str]:
    rows = {}
    for kind, name in (("oom", "out of memory"), ("skip", "skipped steps"), ("resume", "resumes")):
        # A new run writes a resume line for step 0.
        rows[name] = events_row([record for record in of_kind(records, kind) if kind != "resume" or record["step"]])
    rows["checkpoint"] = checkpoint_row(of_kind(records, "save"), now)
    return rows


def checkpoint_row(saves: list[dict], now: float) -> str:
    """The newest saved checkpoint, and the error of a later save that failed."""
    row = texts_here()("journal.none")
    if saved := [save for save in saves if "path" in save]:
        ago = duration(max(0, now - saved[-1]["time"]), texts_here())
        row = texts_here()("journal.saved", path=saved[-1]["path"], step=saved[-1]["step"], time=ago)
    if saves and "error" in saves[-1]:
        row += texts_here()("journal.failed", step=saves[-1]["step"], error=saves[-1]["error"])
    return row
