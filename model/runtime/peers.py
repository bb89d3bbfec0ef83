"""The other ranks as one of them sees them: signs of life through a small store, and which rank has died or hangs.

Standard library only: it runs before torch is imported.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

BEAT_SECONDS = 1.0
STILL_SECONDS = 5 * BEAT_SECONDS  # a beat that comes so late: the process stood still
DEAD_SECONDS = 40.0  # a rank without a beat for so long has died
GRACE_SECONDS = 12.0  # for the main thread to end by itself when it can have nothing to save, or another rank failed
VERDICT_SECONDS = 3 * BEAT_SECONDS  # for every rank to hear why all end
SHOW = signal.SIGVTALRM  # shows a process's stacks and ends it, whatever its threads do; nothing else here uses it


@dataclass
class Heartbeat:
    """What one rank tells the others."""

    beat: int = 0
    exchanges: int = 0  # that its main thread has entered
    waits_in: str = ""  # the exchange that it waits in now
    unhurried: str = ""  # what it does that has no time limit
    saving_seconds: float = 0.0  # for how long it has been writing a checkpoint; 0: it does not
    moves: int = 0  # grows while its main thread lives
    stop: bool = False  # it was asked to stop
    ended: str = ""  # "done", or how it failed
    verdict: str = ""  # why all ranks must end
    pid: int = 0
    machine: str = ""  # where `pid` counts


_awake, _asked_clock_at, _clock_lock = 0.0, time.monotonic(), threading.Lock()


def awake_seconds():
    """A clock that leaves out the time in which this process stood still: suspended, or with no thread let run.

    The watch reads it each beat, so a longer gap between two readings means that nobody could. Ranks that are
    suspended together then count no silence of each other's.
    """
    global _awake, _asked_clock_at
    with _clock_lock:
        now = time.monotonic()
        gap, _asked_clock_at = now - _asked_clock_at, now
        _awake += gap if gap < STILL_SECONDS else 0
        return _awake


class Peers:
    """The ranks of a run as this one sees them; all times are awake_seconds()."""

    def __init__(self, store, rank, world_size, timeout_s, mine):
        self._store, self._rank, self._mine = store, rank, mine
        self._others = [str(r) for r in range(world_size) if r != rank]
        self._patience = max(timeout_s - 2 * VERDICT_SECONDS, timeout_s / 2)  # seconds; all ranks end in time then
        self._timeout_s, self._store_lost, self._answered_at = timeout_s, False, awake_seconds()
        self.signs, self._beat_at, self._moved_at = {}, {}, {}  # by rank, as text
        self._processes = {}  # pidfds of the other ranks on this machine, by rank
        mine.pid, mine.machine = os.getpid(), _machine()
        faulthandler.register(SHOW, file=2, all_threads=True, chain=True)
        self.tell()

    def tell(self):
        self._mine.beat += 1
        with suppress(RuntimeError):  # rank 0 has left; look() says more
            self._store.set(str(self._rank), json.dumps(asdict(self._mine)))

    def look(self):
        """Tell and hear; why all must end and in how many seconds, or None while every rank is well.

        A rank without a beat has died, one that holds up the others without end hangs.
        """
        self.tell()
        try:
            heard = self._store.multi_get(self._others)
        except RuntimeError as error:
            self._store_lost, self._answered_at = True, awake_seconds()
            finished = self.signs.get("0", Heartbeat()).ended == "done"
            return None if finished else (f"rank 0 is gone ({error})", GRACE_SECONDS)
        self._answered_at = now = awake_seconds()
        for rank, text in [*zip(self._others, heard, strict=True), (str(self._rank), json.dumps(asdict(self._mine)))]:
            self._note(rank, Heartbeat(**json.loads(text)), now)
        return self._judge(now)

    def unanswered(self):
        """Why all must end while look() waits for rank 0, which keeps the store; empty while that is well."""
        seconds = awake_seconds() - self._answered_at
        late = seconds > min(DEAD_SECONDS, self._patience)
        return f"rank 0 has died or is stopped: it has not answered for {seconds:.0f} s" if late else ""

    def _note(self, rank, sign, now):
        before = self.signs.get(rank)
        self.signs[rank] = sign
        if before is None or sign.beat != before.beat:
            self._beat_at[rank] = now
        if before is None or sign.unhurried or (sign.moves, sign.exchanges) != (before.moves, before.exchanges):
            self._moved_at[rank] = now
        if rank not in self._processes and sign.machine and sign.machine == self._mine.machine:
            with suppress(OSError):
                self._processes[rank] = os.pidfd_open(sign.pid)

    def _judge(self, now):
        self._mine.stop |= any(sign.stop for sign in self.signs.values())
        for rank, sign in self.signs.items():
            if sign.verdict:
                return sign.verdict, VERDICT_SECONDS
            if sign.ended not in ("", "done"):
                return f"rank {rank} ended: {sign.ended}", GRACE_SECONDS
            if not sign.ended and now - self._beat_at[rank] > DEAD_SECONDS:
                return self._pronounce(f"rank {rank} has died: no sign of life for {DEAD_SECONDS:.0f} s")
        if late := self._late(now):
            silent = "; ".join(
                f"rank {rank} hangs: silent for {now - self._moved_at[rank]:.0f} s "
                + (f"in {self.signs[rank].waits_in}" if self.signs[rank].waits_in else "outside any exchange")
                for rank in late
            )
            return self._pronounce(f"{silent} (--ddp_timeout_s={self._timeout_s})")
        return None

    def _late(self, now):
        """Ranks that the others wait for and that have been silent too long."""
        present = {rank: sign for rank, sign in self.signs.items() if sign.ended != "done"}
        fewest = min((sign.exchanges for sign in present.values()), default=0)
        last = [rank for rank, sign in present.items() if sign.exchanges == fewest]
        silent = {rank for rank in present if now - self._moved_at[rank] > self._patience}
        held_up = any(sign.waits_in for sign in present.values()) or len(silent) == len(present)
        return last if held_up and len(present) > 1 and silent.issuperset(last) else []

    def _pronounce(self, verdict):
        self._mine.verdict = verdict
        self.tell()
        return verdict, VERDICT_SECONDS

    def end_those_that_cannot_hear(self):
        """Show the stacks of each rank of this machine that no thread runs in any more, and end it."""
        now = awake_seconds()
        for rank, process in self._processes.items():
            if not self.signs[rank].ended and now - self._beat_at[rank] > 2 * VERDICT_SECONDS:
                with suppress(OSError):
                    signal.pidfd_send_signal(process, SHOW)

    def blame(self, name, error):
        """Why an exchange failed, and which ranks are gone; asked VERDICT_SECONDS after it did."""
        now, gone = awake_seconds(), ["rank 0 is gone"] if self._store_lost else []
        for rank, sign in sorted(self.signs.items()) if not self._store_lost else ():
            if sign.ended not in ("", "done"):
                gone.append(f"rank {rank} ended: {sign.ended}")
            elif rank != str(self._rank) and now - self._beat_at[rank] >= VERDICT_SECONDS - BEAT_SECONDS / 2:
                gone.append(f"rank {rank} is gone")
        return "; ".join([*gone, f"{name} failed: {error}"])


def _machine():
    """This machine since its start, and the processes among which a pid counts; empty where it does not say."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
