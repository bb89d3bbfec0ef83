"""The numbers of a run's journal in TensorBoard and Weights & Biases, sent by a process of its own.

python -m model.display.trackers RUN_DIR tensorboard,wandb     sends what was not sent yet, of an ended run too

Each number of a line is KIND/FIELD at the line's step, in both trackers: train/loss, eval/bleu, save/seconds. The
process follows the journal, so training neither waits for a tracker nor fails with one, and what a killed process did
not send is sent by the next one: RUN_DIR/trackers.json counts the lines that each tracker has. A resumed run continues
its tracker run: of the steps that are done again TensorBoard shows the later values, W&B the first.
"""

import hashlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from model.run.journal import JournalTail
from model.runtime.atomic_io import open_own, write_json
from model.runtime.module_process import start_module

LOGGER = logging.getLogger("chat_trainer")
POLL_SECONDS = 1.0
CLOSE_SECONDS = 60  # that a run waits at its end until everything is sent
COUNTS = "trackers.json"
QUIET = dict(WANDB_QUIET="true", WANDB_CONSOLE="off")
LAUNCHER_NAMES = ("ACCELERATE_", "TORCHELASTIC_", "MASTER_")
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


def check_installed(tracker: str) -> None:
    """Raise ValueError unless the packages of these trackers, "" or names with commas, are installed."""
    if missing := [name for name in tracker.split(",") if name and find_spec(name) is None]:
        raise ValueError(f"--tracker={tracker}: type pip install -e '.[{','.join(missing)}]' first, or leave it out")


class Trackers:
    """The process that sends the journal of `run_dir` to `tracker`; none if that is empty."""

    def __init__(self, run_dir: Path, tracker: str):
        self._process, self._words = None, [str(run_dir), tracker]
        if tracker:
            kept = {name: value for name, value in os.environ.items() if not _is_launcher_s(name)}
            with suppress(OSError):
                env = QUIET | kept | dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
                self._process = start_module("model.display.trackers", *self._words, env=env, stdin=subprocess.PIPE)

    def check(self) -> None:
        """Log it once if the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._warn(f"has ended with code {self._process.returncode}")
            self._process = None

    def close(self) -> None:
        """Let the process send the rest."""
        if self._process is None:
            return
        with suppress(OSError):
            self._process.stdin.close()  # its end is what the process waits for
        try:
            if self._process.wait(CLOSE_SECONDS) != 0:
                self._warn(f"has ended with code {self._process.returncode}")
        except subprocess.TimeoutExpired:
            self._warn(f"is still sending after {CLOSE_SECONDS} s")

    def _warn(self, what):
        LOGGER.warning(
            "the tracker's process %s; the run does not need it: python -m model.display.trackers %s sends the rest",
            what, " ".join(self._words),
        )  # fmt: skip


def _is_launcher_s(name):
    return name in RANK_NAMES or name.startswith(LAUNCHER_NAMES)


class Sink:
    """One tracker of one run; the first `num_sent` lines of the journal are in it."""

    def __init__(self, name: str, run_dir: Path, num_sent: int):
        self.name, self.num_sent, self._run_dir, self._num_read, self._tracker = name, num_sent, run_dir, 0, None
        self._run_id, self._is_new = "", not num_sent

    def take(self, record: dict) -> None:
        """Send the next line of the journal, unless it was sent before."""
        self._num_read += 1
        if self._num_read == 1:
            self._run_id = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        if self._num_read <= self.num_sent:
            return
        values = numbers_of(record)
        if record["kind"] == "resume":
            self._open(record["step"])
        elif values:
            if self._tracker is None:
                self._open(None)
            self._tracker.log(values, step=record["step"])
        self.num_sent = self._num_read

    def finish(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.finish()

    def _open(self, step):
        """Begin the tracker's run, or go on with it after `step`."""
        self.finish()
        self._tracker = _tracker(self.name, self._run_dir, self._run_id, step)
        self._tracker.start()
        if self._is_new:
            self._tracker.store_init_configuration(_options(self._run_dir))
            self._is_new = False


def numbers_of(record: dict) -> dict[str, float]:
    """The numbers of a journal line by KIND/FIELD; empty for a line without a step."""
    if record.get("step") is None or record["kind"] == "resume":
        return {}
    return {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _tracker(name, run_dir, run_id, step):
    """accelerate's tracker `name`; the run's former values after `step` are hidden where the tracker can hide them."""
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    PartialState(cpu=True)  # the trackers ask it whether this is the main process
    if name == "tensorboard":
        return TensorBoardTracker(name, run_dir, purge_step=None if step is None else step + 1)
    project = os.environ.get("WANDB_PROJECT", "chat-trainer")
    return WandBTracker(project, name=run_dir.resolve().name, id=run_id, resume="allow", dir=str(run_dir))


def _options(run_dir):
    with suppress(OSError, ValueError), open_own(run_dir / "config.json", "rb") as file:
        return json.load(file)["config"]
    return {}


def follow(run_dir: Path, names: list[str], owner: int | None) -> bool:
    """Send the journal of `run_dir` until the descriptor `owner` has ended (None: as it is); False if a tracker failed.

    Raises ValueError for a damaged journal.
    """
    counts, tail, has_ended = _read_counts(run_dir), JournalTail(run_dir / "metrics.jsonl"), False
    sinks = [Sink(name, run_dir, counts.get(name, 0)) for name in names]
    while sinks and not has_ended:
        has_ended = owner is None or _ends(owner)
        _, records = tail.read()
        while records:
            sinks = [sink for sink in sinks if _sends(sink, records)]
            _, records = tail.read()
        if counts != (now := counts | {sink.name: sink.num_sent for sink in sinks}):
            write_json(run_dir / COUNTS, counts := now)
    for sink in sinks:
        sink.finish()
    return len(sinks) == len(names)


def _sends(sink, records):
    """Whether `sink` took the records; a tracker that fails is left out from then on."""
    try:
        for record in records:
            sink.take(record)
    except Exception as error:  # of a tracker's library or its service
        print(f"the tracker {sink.name} gets no more of this run: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _ends(owner):
    """Wait POLL_SECONDS; whether the descriptor has ended."""
    ready, _, _ = select.select([owner], [], [], POLL_SECONDS)
    return bool(ready) and not os.read(owner, 4096)


def _read_counts(run_dir):
    with suppress(OSError, ValueError), open_own(run_dir / COUNTS, "rb") as file:
        counts = json.load(file)
        if isinstance(counts, dict):
            return {name: count for name, count in counts.items() if type(count) is int}
    return {}


def main(run_dir: str, tracker: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the run, which ends this process
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    owner = None if sys.stdin.isatty() else sys.stdin.fileno()
    try:
        return 0 if follow(Path(run_dir), tracker.split(","), owner) else 1
    except (ValueError, OSError) as error:
        print(f"no tracker: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
