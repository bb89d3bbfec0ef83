"""What a process keeps an eye on beside its work: signals that ask for a stop, and whether the other ranks live.

Threads do it, so a signal counts, and reaches the other ranks, while the main thread waits inside a library's call: one
waits for signals, one looks at the clock, one tells the other ranks once a second how far this one is. A thread that
fails ends the process. Standard library only: it runs before torch is imported.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress

from model.runtime.peers import (
    BEAT_SECONDS,
    GRACE_SECONDS,
    STILL_SECONDS,
    VERDICT_SECONDS,
    Heartbeat,
    Peers,
    awake_seconds,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPEAT_SECONDS = 3.0  # signals this close together are one request: launchers forward them twice
MOST_SAVING_SECONDS = 60.0  # a disk that takes longer for a checkpoint hangs: repeated signals quit again

_mine = Heartbeat()
_asked_at = None  # when this process first heard that it should stop
_listener = _peers = _doom = None
_news = threading.Event()  # the other ranks must hear of a stop at once
_training = False
_saving = []  # since when, for each block of `saving` that some thread is in


def watch_signals():
    """From now on INT, TERM and USR1 ask for a stop; a repeat later than REPEAT_SECONDS quits unless a rank saves.

    They are blocked for this thread and for every thread and program that it starts, and the watch takes them up: a
    handler may be replaced (LLVM, which compiles Triton's kernels, puts one that does nothing in USR1's place), and a
    terminal's Ctrl+C would kill the assembler that this process waits for.
    """
    global _listener
    if _listener is not None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _listener = _start(_listen)
    _start(_beat, os.getppid())
    for number in SIGNALS:
        signal.signal(number, _pass_on)


def watch_ranks(store, rank, world_size, timeout_s):
    """Tell the other ranks through `store` how this one is, and end the run when one has died or hangs.

    `store` has set and multi_get, as torch's TCPStore; a rank that holds up the others is given `timeout_s`, in which
    the time that this process stood still does not count.
    """
    global _peers
    watch_signals()
    _peers = Peers(store, rank, world_size, timeout_s, _mine)
    _start(_look)


def leave_ranks(failure=""):
    """Tell the other ranks that this one ends, well or with `failure`."""
    global _peers
    peers, _peers = _peers, None
    _mine.ended = failure or "done"
    if peers is not None:
        if failure:  # leaving a group whose other ranks are gone may never end
            faulthandler.dump_traceback_later(2 * GRACE_SECONDS, exit=True)
        peers.tell()


@contextmanager
def at_most(seconds, why):
    """Inside, this process ends with `why`, shown with its stacks, once so many seconds are over."""
    global _doom
    watch_signals()
    _doom = (awake_seconds() + seconds, why)
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
    since = awake_seconds()
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
        if _peers is None:
            raise
        time.sleep(VERDICT_SECONDS)
        raise RuntimeError(_peers.blame(name, error)) from None
    finally:
        _mine.waits_in = ""
        _mine.moves += 1


def _pass_on(number, _frame):
    signal.pthread_kill(_listener.ident, number)  # a thread older than the watch was given it


def _start(task, *args):
    """The thread, started, that does `task` again and again; it ends with the process, and the process with it."""
    thread = threading.Thread(target=_repeat, args=(task, *args), name=task.__name__.strip("_"), daemon=True)
    thread.start()
    return thread


def _repeat(task, *args):
    try:
        while True:
            task(*args)
    except BaseException:  # without this thread the run would obey no signal, or wait for a dead rank without end
        _end(f"{traceback.format_exc()}this process can be watched no more, so it ends")


def _listen():
    # not sigtimedwait: where a suspension outlasts its time, CPython's gives whatever lies in memory for a signal
    _hear(signal.Signals(signal.sigwaitinfo(SIGNALS).si_signo).name)


def _beat(parent):
    """Let the clock go on, and end the process where it does not end by itself."""
    global _asked_at
    slept_at = time.monotonic()
    time.sleep(BEAT_SECONDS / 4)
    still_seconds, now = time.monotonic() - slept_at, awake_seconds()
    if still_seconds > STILL_SECONDS:
        _say(f"this process stood still for {still_seconds:.0f} s, suspended or starved, and goes on")
    _note_saving()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent and not _mine.stop:
        _hear("the launcher is gone")
    if _mine.stop and _asked_at is None:
        _asked_at = now
    if _doom and now > _doom[0]:
        _end(_doom[1])
    if (peers := _peers) and (why := peers.unanswered()):
        _end(why)
    if _mine.stop and not _training and now - _asked_at > GRACE_SECONDS:
        os._exit(_exit_code())


def _look():
    """Tell and hear the other ranks once."""
    global _doom
    _news.wait(BEAT_SECONDS)
    _news.clear()
    if (peers := _peers) and (verdict := peers.look()):
        why, seconds = verdict
        _doom = _doom or (awake_seconds() + seconds, why)


def _note_saving():
    now = awake_seconds()
    _mine.saving_seconds = now - min(_saving, default=now)


def _exit_code():
    """Of a process that was asked to stop and does not end by itself; `_peers` are there while it is among them."""
    if _mine.ended:
        return int(_mine.ended != "done")
    # before it joined the others only a failure makes the launcher end them
    return int(_peers is None and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def _hear(what):
    global _asked_at
    now = awake_seconds()
    if _asked_at is None:
        _asked_at, _mine.stop = now, True
        _news.set()
        how = "after this step, with a checkpoint" if _training else "before the first step"
        _say(f"{what}: stopping {how}")
    elif now - _asked_at > REPEAT_SECONDS:
        _note_saving()
        heartbeats = [_mine, *(_peers.heartbeats.values() if _peers else ())]
        if not any(0 < heartbeat.saving_seconds <= MOST_SAVING_SECONDS for heartbeat in heartbeats):
            _say(f"{what} again: quitting without a checkpoint")
            os._exit(1)


def _say(text):
    with suppress(OSError, ValueError):  # a Ctrl+C also ends the `tee` that stderr goes to; it may be closed
        print(text, file=sys.stderr, flush=True)


def _end(why):
    try:
        _say(f"{why}; where each thread of this rank is:")
        faulthandler.dump_traceback(2, all_threads=True)
        if peers := _peers:
            peers.end_those_that_cannot_hear()
    finally:
        os._exit(1)
