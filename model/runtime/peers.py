"""Heartbeats between ranks through a small key-value store, and the verdict which rank has died or hangs.

Standard library only: this module runs before torch is imported.
"""

import faulthandler
import json
import os
import re
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

BEAT_SECONDS = 1.0
SUSPENDED_SECONDS = 5 * BEAT_SECONDS  # a longer gap between two clock readings means that the process was suspended
DEAD_SECONDS = 40.0  # a rank without a heartbeat for this long counts as dead
GRACE_SECONDS = 12.0  # time for the main thread to exit by itself when it has nothing to save or another rank failed
VERDICT_SECONDS = 3 * BEAT_SECONDS  # time until every rank has received a verdict
SHOW = signal.SIGVTALRM  # prints a process's stacks and kills it, whatever its threads do; not used otherwise


@dataclass
class Heartbeat:
    """State that a rank publishes to the others every BEAT_SECONDS."""

    beat: int = 0
    num_collectives: int = 0  # collectives that its main thread has entered
    waits_in: str = ""  # the collective that it is in now
    untimed: str = ""  # work that it is doing without a time limit
    saving_seconds: float = 0.0  # time since it began to write a checkpoint; 0 if it writes none
    progress: int = 0  # grows while its main thread runs
    stop: bool = False  # True once it was asked to stop
    ended: str = ""  # "done" or the failure, once it has ended
    verdict: str = ""  # why all ranks must end
    pid: int = 0
    machine: str = ""  # machine and pid namespace of `pid`


_awake, _read_at, _clock_lock = 0.0, time.monotonic(), threading.Lock()


def awake_seconds():
    """Monotonic seconds without the time in which this process was suspended or none of its threads could run.

    The watchdog reads this clock several times a second, so a gap of SUSPENDED_SECONDS between readings means that the
    process did not run. Ranks that are suspended together therefore do not count each other as silent.
    """
    global _awake, _read_at
    with _clock_lock:
        now = time.monotonic()
        gap, _read_at = now - _read_at, now
        _awake += gap if gap < SUSPENDED_SECONDS else 0
        return _awake


class Peers:
    """Heartbeats of all ranks, and the verdict on them; all times are those of awake_seconds()."""

    def __init__(self, store, rank, world_size, timeout_s, mine):
        self._store, self._rank, self._mine = store, rank, mine
        self._others = [str(r) for r in range(world_size) if r != rank]
        self._silent_seconds = max(timeout_s - 3 * VERDICT_SECONDS, 0.4 * timeout_s)  # so that all end within it
        self._timeout_s, self._store_lost, self._store_answered_at = timeout_s, False, awake_seconds()
        self.heartbeats, self._beat_at, self._progress_at = {}, {}, {}  # by rank, as text
        self._processes = {}  # rank to pidfd, for the ranks of this machine
        mine.pid, mine.machine = os.getpid(), _machine()
        faulthandler.register(SHOW, file=2, all_threads=True, chain=True)
        self.send()

    def send(self):
        """Publish this rank's heartbeat."""
        self._mine.beat += 1
        with suppress(RuntimeError):  # rank 0, which hosts the store, has ended; poll() reports it
            self._store.set(str(self._rank), json.dumps(asdict(self._mine)))

    def poll(self):
        """Send this heartbeat and read the others; returns None, or (why all ranks must end, in how many seconds).

        A rank whose process has ended without a word, or that sends no heartbeats, is dead. A rank that makes no
        progress while the others wait for it hangs.
        """
        self.send()
        gone = {rank for rank, process in self._processes.items() if _has_ended(process)}  # before their word is read
        try:
            texts = self._store.multi_get(self._others)
        except RuntimeError as error:
            self._store_lost, self._store_answered_at = True, awake_seconds()
            finished = self.heartbeats.get("0", Heartbeat()).ended == "done"
            return None if finished else (f"rank 0 is gone ({error})", GRACE_SECONDS)
        self._store_answered_at = now = awake_seconds()
        for rank, text in [*zip(self._others, texts, strict=True), (str(self._rank), json.dumps(asdict(self._mine)))]:
            self._record(rank, Heartbeat(**json.loads(text)), now)
        return self._verdict(now, gone)

    def store_failure(self):
        """Why this rank must end: rank 0, which hosts the store, does not answer poll(); "" while it does."""
        seconds = awake_seconds() - self._store_answered_at
        is_dead = seconds > min(DEAD_SECONDS, self._silent_seconds)
        return f"rank 0 has died or is stopped: it has not answered for {seconds:.0f} s" if is_dead else ""

    def _record(self, rank, heartbeat, now):
        previous = self.heartbeats.get(rank)
        self.heartbeats[rank] = heartbeat
        if previous is None or heartbeat.beat != previous.beat:
            self._beat_at[rank] = now
        if previous is None or heartbeat.untimed or _progress_of(heartbeat) != _progress_of(previous):
            self._progress_at[rank] = now
        if rank not in self._processes and heartbeat.machine and heartbeat.machine == self._mine.machine:
            with suppress(OSError):
                self._processes[rank] = os.pidfd_open(heartbeat.pid)

    def _verdict(self, now, gone):
        self._mine.stop |= any(heartbeat.stop for heartbeat in self.heartbeats.values())
        for rank, heartbeat in self.heartbeats.items():
            if heartbeat.verdict:
                return heartbeat.verdict, VERDICT_SECONDS
            if heartbeat.ended not in ("", "done"):
                return f"rank {rank} ended: {heartbeat.ended}", GRACE_SECONDS
            if not heartbeat.ended and rank in gone:
                return f"rank {rank} has died: its process is gone", GRACE_SECONDS
            if not heartbeat.ended and now - self._beat_at[rank] > DEAD_SECONDS:
                return self._publish(f"rank {rank} has died: no heartbeat for {DEAD_SECONDS:.0f} s")
        if hung_ranks := self._hung_ranks(now):
            reasons = "; ".join(
                f"rank {rank} hangs: silent for {now - self._progress_at[rank]:.0f} s "
                + (f"in {name}" if (name := self.heartbeats[rank].waits_in) else "outside any collective")
                for rank in hung_ranks
            )
            return self._publish(f"{reasons} (--ddp_timeout_s={self._timeout_s})")
        return None

    def _hung_ranks(self, now):
        """Ranks that the others wait for and that have made no progress for too long."""
        running = {rank: heartbeat for rank, heartbeat in self.heartbeats.items() if heartbeat.ended != "done"}
        fewest = min((heartbeat.num_collectives for heartbeat in running.values()), default=0)
        last = [rank for rank, heartbeat in running.items() if heartbeat.num_collectives == fewest]
        silent = {rank for rank in running if now - self._progress_at[rank] > self._silent_seconds}
        some_wait = any(heartbeat.waits_in for heartbeat in running.values()) or len(silent) == len(running)
        return last if some_wait and len(running) > 1 and silent.issuperset(last) else []

    def _publish(self, verdict):
        """Send `verdict` to all ranks; returns it with the seconds until this one ends."""
        self._mine.verdict = verdict
        self.send()
        return verdict, VERDICT_SECONDS

    def kill_frozen_ranks(self):
        """Kill each rank of this machine that has stopped sending heartbeats; its stacks are printed first."""
        now = awake_seconds()
        for rank, process in self._processes.items():
            if not self.heartbeats[rank].ended and now - self._beat_at[rank] > 2 * VERDICT_SECONDS:
                with suppress(OSError):
                    signal.pidfd_send_signal(process, SHOW)

    def explain_failure(self, name, error):
        """Message for the collective `name` that failed with `error`: which ranks are gone, and what the error says.

        Call it VERDICT_SECONDS after the failure, when a dead rank has missed heartbeats.
        """
        now, gone = awake_seconds(), ["rank 0 is gone"] if self._store_lost else []
        for rank, heartbeat in sorted(self.heartbeats.items()) if not self._store_lost else ():
            if heartbeat.ended not in ("", "done"):
                gone.append(f"rank {rank} ended: {heartbeat.ended}")
            elif rank != str(self._rank) and now - self._beat_at[rank] >= VERDICT_SECONDS - BEAT_SECONDS / 2:
                gone.append(f"rank {rank} is gone")
        return "; ".join([*gone, f"{name} failed: {_first_clause(error)}"])


def _first_clause(error):
    """What a library's error says first, without the place in its sources, its advice and the stack of its C++."""
    first, *_ = str(error).split("\n")
    return re.sub(r"^\[\S+:\d+\] *", "", first).split(". ")[0].rstrip(".")


def _has_ended(process):
    """True if the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _progress_of(heartbeat):
    """What changes in a heartbeat whenever the rank's main thread gets on."""
    return heartbeat.progress, heartbeat.num_collectives


def _machine():
    """Boot id and pid namespace, which together identify where a pid is valid; "" if the machine hides them."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
