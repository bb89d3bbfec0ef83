"""What a process keeps an eye on beside its work: signals that ask for a stop, and whether the other ranks live.

One thread does it, so a signal counts, and reaches the other ranks, while the main thread waits inside a library's
call. Once a second each rank tells the others through a small store on rank 0 how far it is. Standard library only: it
runs before torch is imported.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPEAT_SECONDS = 3.0  # signals this close together are one request: launchers forward them twice
BEAT_SECONDS = 1.0
DEAD_SECONDS = 40.0  # a rank without a beat for so long has died
GRACE_SECONDS = 12.0  # for the main thread to end by itself when it can have nothing to save, or another rank failed
VERDICT_SECONDS = 3 * BEAT_SECONDS  # for every rank to hear why all end
MOST_SAVING_SECONDS = 60.0  # a disk that takes longer for a checkpoint hangs: repeated signals quit again


@dataclass
class Sign:
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


_mine = Sign()
_asked_at = None  # when this process first heard that it should stop
_thread = _peers = _doom = None
_training = False
_saving = []  # since when, for each block of `saving` that some thread is in


def watch_signals():
    """From now on INT, TERM and USR1 ask for a stop; a repeat later than REPEAT_SECONDS quits unless a rank saves.

    They are blocked for this thread and for every thread and program that it starts, and the watch takes them up: a
    handler may be replaced (LLVM, which compiles Triton's kernels, puts one that does nothing in USR1's place), and a
    terminal's Ctrl+C would kill the assembler that this process waits for.
    """
    global _thread
    if _thread is not None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    _thread = threading.Thread(target=_watch, args=(os.getppid(),), name="watch", daemon=True)
    _thread.start()


def watch_ranks(store, rank, world_size, timeout_s):
    """Tell the other ranks through `store` how this one is, and end the run when one has died or hangs.

    `store` has set and multi_get, as torch's TCPStore; a rank that holds up the others is given `timeout_s`.
    """
    global _peers
    watch_signals()
    _peers = Peers(store, rank, world_size, timeout_s)


def leave_ranks(failure=""):
    """Tell the other ranks that this one ends, well or with `failure`."""
    global _peers
    peers, _peers = _peers, None
    _mine.ended = failure or "done"
    if peers is not None:
        peers.tell()
        faulthandler.cancel_dump_traceback_later()
        if failure:  # leaving a group whose other ranks are gone may never end
            faulthandler.dump_traceback_later(2 * GRACE_SECONDS, exit=True)


@contextmanager
def at_most(seconds, why):
    """Inside, this process ends with `why`, shown with its stacks, once so many seconds are over."""
    global _doom
    watch_signals()
    _doom = (time.monotonic() + seconds, why)
    try:
        yield
    finally:
        _doom = None


def stop_asked():
    """True once this process, or any rank, was asked to stop. Asking is a sign of life."""
    _mine.moves += 1
    return _mine.stop


def training_begins():
    """From now on there is something to save: a stop waits for the step, however long it takes."""
    global _training
    _training = True


@contextmanager
def saving():
    """While a checkpoint is written, for MOST_SAVING_SECONDS, further signals change nothing; threads may overlap."""
    since = time.monotonic()
    _saving.append(since)
    try:
        yield
    finally:
        _saving.remove(since)


@contextmanager
def unhurried(what):
    """Inside, this rank may keep the others waiting without end: tokenising, compilation."""
    _mine.unhurried = what
    try:
        yield
    finally:
        _mine.unhurried = ""


@contextmanager
def exchange(name):
    """An exchange with the other ranks; its RuntimeError names the rank that is gone."""
    _mine.exchanges += 1
    _mine.waits_in = name
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(_peers.blame(name, error) if _peers else str(error)) from None
    finally:
        _mine.waits_in = ""
        _mine.moves += 1


def _pass_on(number, _frame):
    signal.pthread_kill(_thread.ident, number)  # a thread older than the watch was given it


def _watch(parent):
    """The thread: hear signals, look after the other ranks, end the process where it does not end by itself."""
    global _asked_at
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    while True:
        heard, now = signal.sigtimedwait(SIGNALS, BEAT_SECONDS), time.monotonic()
        _mine.saving_seconds = now - min(_saving, default=now)
        if heard:
            _hear(signal.Signals(heard.si_signo).name)
        if launched and os.getppid() != parent and not _mine.stop:
            _hear("the launcher is gone")
        if _peers:
            _peers.look()
        if _mine.stop:
            _asked_at = _asked_at or now
        if _doom and now > _doom[0]:
            _end(_doom[1])
        if _mine.stop and not _training and now - _asked_at > GRACE_SECONDS:
            os._exit(_exit_code())


def _exit_code():
    """Of a process that was asked to stop and does not end by itself; `_peers` are there while it is among them."""
    if _mine.ended:
        return int(_mine.ended != "done")
    # before it joined the others only a failure makes the launcher end them
    return int(_peers is None and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def _hear(what):
    global _asked_at
    now = time.monotonic()
    if _asked_at is None:
        how = "after this step, with a checkpoint" if _training else "before the first step"
        _say(f"{what}: stopping {how}")
        _asked_at, _mine.stop = now, True
    elif now - _asked_at > REPEAT_SECONDS:
        signs = [_mine, *(_peers.signs.values() if _peers else ())]
        if not any(0 < sign.saving_seconds <= MOST_SAVING_SECONDS for sign in signs):
            _say(f"{what} again: quitting without a checkpoint")
            os._exit(1)


def _say(text):
    with suppress(OSError):  # a Ctrl+C also ends the `tee` that stderr goes to
        print(text, file=sys.stderr, flush=True)


def _end(why):
    _say(f"{why}; where each thread of this rank is:")
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def _doom_all(why, seconds):
    """End this process in `seconds` unless its main thread does so before."""
    global _doom
    _doom = _doom or (time.monotonic() + seconds, why)


class Peers:
    """The ranks of a run as this one sees them."""

    def __init__(self, store, rank, world_size, timeout_s):
        self._store, self._rank = store, rank
        self._others = [str(r) for r in range(world_size) if r != rank]
        self._patience = max(timeout_s - 2 * VERDICT_SECONDS, timeout_s / 2)  # seconds; all ranks end in time then
        self._timeout_s, self._store_lost, self._looked_at = timeout_s, False, time.monotonic()
        self.signs, self._beat_at, self._moved_at = {}, {}, {}  # by rank, as text; times by this rank's clock
        self.tell()

    def tell(self):
        _mine.beat += 1
        # a watch over this thread, which a call that holds the interpreter's lock stops too
        faulthandler.dump_traceback_later(self._timeout_s, exit=True)
        try:
            self._store.set(str(self._rank), json.dumps(asdict(_mine)))
        except RuntimeError:  # rank 0 has left; look() says more
            pass

    def look(self):
        """Tell and hear; a rank without a beat has died, one that holds up the others without end hangs."""
        self.tell()
        try:
            heard = self._store.multi_get(self._others)
        except RuntimeError as error:
            self._store_lost = True
            if self.signs.get("0", Sign()).ended != "done":
                _doom_all(f"rank 0 is gone ({error})", GRACE_SECONDS)
            return
        now = time.monotonic()
        if now - self._looked_at > 10 * BEAT_SECONDS:  # it was this process that stood still, stopped or starved
            self._beat_at, self._moved_at = dict.fromkeys(self.signs, now), dict.fromkeys(self.signs, now)
        self._looked_at = now
        for rank, text in [*zip(self._others, heard, strict=True), (str(self._rank), json.dumps(asdict(_mine)))]:
            self._note(rank, Sign(**json.loads(text)), now)
        self._judge(now)

    def _note(self, rank, sign, now):
        before = self.signs.get(rank)
        self.signs[rank] = sign
        if before is None or sign.beat != before.beat:
            self._beat_at[rank] = now
        if before is None or sign.unhurried or (sign.moves, sign.exchanges) != (before.moves, before.exchanges):
            self._moved_at[rank] = now

    def _judge(self, now):
        _mine.stop |= any(sign.stop for sign in self.signs.values())
        for rank, sign in self.signs.items():
            if sign.verdict:
                _doom_all(sign.verdict, VERDICT_SECONDS)
            elif sign.ended not in ("", "done"):
                _doom_all(f"rank {rank} ended: {sign.ended}", GRACE_SECONDS)
            elif not sign.ended and now - self._beat_at[rank] > DEAD_SECONDS:
                self._pronounce(f"rank {rank} has died: no sign of life for {DEAD_SECONDS:.0f} s")
        if late := self._late(now):
            silent = "; ".join(
                f"rank {rank} hangs: silent for {now - self._moved_at[rank]:.0f} s "
                + (f"in {self.signs[rank].waits_in}" if self.signs[rank].waits_in else "outside any exchange")
                for rank in late
            )
            self._pronounce(f"{silent} (--ddp_timeout_s={self._timeout_s})")

    def _late(self, now):
        """Ranks that the others wait for and that have been silent too long."""
        present = {rank: sign for rank, sign in self.signs.items() if sign.ended != "done"}
        fewest = min((sign.exchanges for sign in present.values()), default=0)
        last = [rank for rank, sign in present.items() if sign.exchanges == fewest]
        silent = {rank for rank in present if now - self._moved_at[rank] > self._patience}
        held_up = any(sign.waits_in for sign in present.values()) or len(silent) == len(present)
        return last if held_up and len(present) > 1 and silent.issuperset(last) else []

    def _pronounce(self, verdict):
        _mine.verdict = _mine.verdict or verdict
        self.tell()
        _doom_all(verdict, VERDICT_SECONDS)

    def blame(self, name, error):
        """Why an exchange failed, and which ranks are gone."""
        time.sleep(VERDICT_SECONDS)
        now, gone = time.monotonic(), ["rank 0 is gone"] if self._store_lost else []
        for rank, sign in sorted(self.signs.items()) if not self._store_lost else ():
            if sign.ended not in ("", "done"):
                gone.append(f"rank {rank} ended: {sign.ended}")
            elif rank != str(self._rank) and now - self._beat_at[rank] >= VERDICT_SECONDS - BEAT_SECONDS / 2:
                gone.append(f"rank {rank} is gone")
        return "; ".join([*gone, f"{name} failed: {error}"])
