"""Threads that handle signals asking for a stop, check time limits, and exchange heartbeats with the other ranks.

They run while the main thread is inside a library call, so a signal takes effect there too and reaches the other ranks.
One thread waits for signals, one checks time limits, one exchanges heartbeats once a second. If a thread fails, the
process ends. Standard library only: this module runs before torch is imported.
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
    SUSPENDED_SECONDS,
    VERDICT_SECONDS,
    Heartbeat,
    Peers,
    awake_seconds,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPEAT_SECONDS = 3.0  # signals within this time are one request: launchers forward a signal twice
MAX_SAVING_SECONDS = 60.0  # a save that takes longer counts as hung: a repeated signal quits then

_mine = Heartbeat()
_stop_asked_at = None  # time of the first request to stop that reached this process
_signal_thread = _peers = _deadline = None  # _deadline: (time, why the process ends then)
_send_now = threading.Event()  # set to send a request to stop at once, not at the next heartbeat
_training, _go_on = False, ""  # _go_on: the command that goes on with the run
_saving = []  # start time of each block of `saving` that a thread is in


class CollectiveFailed(RuntimeError):
    """A collective failed, mostly since another rank is gone."""


def watch_signals():
    """Start the threads: INT, TERM and USR1 ask for a stop; a repeat after REPEAT_SECONDS quits unless a rank saves.

    The signals are blocked in this thread and in all threads and programs that it starts, and one thread waits for
    them. Handlers alone do not suffice: a library may replace them (LLVM, which compiles Triton's kernels, installs an
    empty one for USR1), and Ctrl+C in a terminal would kill an assembler that this process runs.
    """
    global _signal_thread
    if _signal_thread is not None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _signal_thread = _start(_wait_for_signal)
    _start(_check_time, os.getppid())
    for number in SIGNALS:
        signal.signal(number, _forward)


def watch_ranks(store, rank, world_size, timeout_s):
    """Exchange heartbeats with the other ranks through `store`, and end the run when a rank dies or hangs.

    `store` has set and multi_get, like torch's TCPStore. A rank that the others wait for may be silent for `timeout_s`;
    time in which this process was suspended does not count.
    """
    global _peers
    watch_signals()
    _peers = Peers(store, rank, world_size, timeout_s, _mine)
    _start(_poll_peers)


def leave_ranks(failure=""):
    """Publish that this rank ends, with `failure` unless that is empty, and stop watching the others."""
    global _peers
    peers, _peers = _peers, None
    _mine.ended = failure or "done"
    if peers is not None:
        if failure:  # leaving a process group whose other ranks are gone may block forever
            faulthandler.dump_traceback_later(2 * GRACE_SECONDS, exit=True)
        peers.send()


@contextmanager
def time_limit(seconds, why):
    """Context in which the process ends after `seconds`; it prints `why` and its stacks."""
    global _deadline
    watch_signals()
    _deadline = (awake_seconds() + seconds, why)
    try:
        yield
    finally:
        _deadline = None


def stop_asked():
    """True once any rank was asked to stop. A call counts as progress of this rank."""
    _mine.progress += 1
    return _mine.stop


def standing():
    """(True once any rank was asked to stop, True while this process writes a checkpoint). Counts as no progress."""
    return _mine.stop, bool(_saving)


def training_begins(go_on=""):
    """Call when training starts: from then on a stop waits for the end of the step and for its checkpoint.

    `go_on` is the command that goes on with the run.
    """
    global _training, _go_on
    _training, _go_on = True, go_on


def go_on_hint(error):
    """What to type after `error`, on a line of its own, if it ended a training; else ""."""
    if not _go_on:
        return ""
    lost = "; no checkpoint was written now" if isinstance(error, CollectiveFailed) else ""
    return f"{lost}\nto go on from the newest checkpoint, type:\n{_go_on}"


@contextmanager
def saving():
    """Context for writing a checkpoint: repeated signals are ignored, for MAX_SAVING_SECONDS; threads may overlap."""
    since = awake_seconds()
    _saving.append(since)
    try:
        yield
    finally:
        _saving.remove(since)


@contextmanager
def untimed(what):
    """Context for work without a time limit, such as tokenising or compiling: this rank cannot count as hung in it."""
    _mine.untimed = what
    try:
        yield
    finally:
        _mine.untimed = ""


@contextmanager
def collective(name):
    """Context for a collective; if it fails, the CollectiveFailed names the ranks that are gone."""
    _mine.num_collectives += 1
    _mine.waits_in = name
    try:
        yield
    except RuntimeError as error:
        if _peers is None:
            raise
        time.sleep(VERDICT_SECONDS)
        raise CollectiveFailed(_peers.explain_failure(name, error)) from None
    finally:
        _mine.waits_in = ""
        _mine.progress += 1


def _forward(number, _frame):
    signal.pthread_kill(_signal_thread.ident, number)  # received by a thread that does not block it


def _start(task, *args):
    """Start and return a daemon thread that repeats `task`; if the task raises, the process ends."""
    thread = threading.Thread(target=_repeat, args=(task, *args), name=task.__name__.strip("_"), daemon=True)
    thread.start()
    return thread


def _repeat(task, *args):
    try:
        while True:
            task(*args)
    except BaseException:  # without this thread, signals would be ignored or a dead rank waited for forever
        _end(f"{traceback.format_exc()}the watchdog failed, so this process ends")


def _wait_for_signal():
    # not sigtimedwait: if a suspension outlasts its time-out, CPython returns uninitialised memory as the signal
    _request_stop(signal.Signals(signal.sigwaitinfo(SIGNALS).si_signo).name)


def _check_time(parent):
    """Read the clock a few times a second, and end the process when a time limit is over."""
    global _stop_asked_at
    started = time.monotonic()
    time.sleep(BEAT_SECONDS / 4)
    slept_seconds, now = time.monotonic() - started, awake_seconds()
    if slept_seconds > SUSPENDED_SECONDS:
        _print(f"this process did not run for {slept_seconds:.0f} s (suspended, or no free CPU) and continues")
    _update_saving()
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent and not _mine.stop:
        _request_stop("the launcher is gone")
    if _mine.stop and _stop_asked_at is None:
        _stop_asked_at = now
    if _deadline and now > _deadline[0]:
        _end(_deadline[1])
    if (peers := _peers) and (why := peers.store_failure()):
        _end(why)
    if _mine.stop and not _training and now - _stop_asked_at > GRACE_SECONDS:
        os._exit(_exit_code())


def _poll_peers():
    """Exchange heartbeats once; a verdict sets the deadline of this process."""
    global _deadline
    _send_now.wait(BEAT_SECONDS)
    _send_now.clear()
    if (peers := _peers) and (verdict := peers.poll()):
        why, seconds = verdict
        _deadline = _deadline or (awake_seconds() + seconds, why)


def _update_saving():
    now = awake_seconds()
    _mine.saving_seconds = now - min(_saving, default=now)


def _exit_code():
    """Exit code of a process that was asked to stop and does not end by itself."""
    if _mine.ended:
        return int(_mine.ended != "done")
    # not yet joined (_peers is None): the launcher ends the other ranks only if this one fails
    return int(_peers is None and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def _request_stop(what):
    """Ask all ranks to stop because of `what`; a repeat after REPEAT_SECONDS quits, unless a rank is saving."""
    global _stop_asked_at
    now = awake_seconds()
    if _stop_asked_at is None:
        _stop_asked_at, _mine.stop = now, True
        _send_now.set()
        how = "after this step, with a checkpoint" if _training else "before the first step"
        _print(f"{what}: stopping {how}")
    elif now - _stop_asked_at > REPEAT_SECONDS and not _a_rank_saves():
        if _peers:
            time.sleep(VERDICT_SECONDS)  # a save that another rank has just begun is in its next heartbeats
        if _mine.ended:  # a rank that fails now would end those that still write
            os._exit(_exit_code())
        if not _a_rank_saves():
            _print(f"{what} again: quitting without a checkpoint")
            os._exit(1)


def _a_rank_saves():
    """True if, by the last heartbeats, a rank is writing a checkpoint and does not count as hung."""
    _update_saving()
    peers = _peers
    heartbeats = [_mine, *(peers.heartbeats.values() if peers else ())]
    return any(0 < heartbeat.saving_seconds <= MAX_SAVING_SECONDS for heartbeat in heartbeats)


def _print(text):
    with suppress(OSError, ValueError):  # stderr may be closed: Ctrl+C also ends a `tee` that reads it
        print(text, file=sys.stderr, flush=True)


def _end(why):
    """Print `why` and the stacks, kill this machine's frozen ranks, and exit with 1."""
    try:
        _print(f"{why}; where each thread of this rank is:")
        faulthandler.dump_traceback(2, all_threads=True)
        if peers := _peers:
            peers.kill_frozen_ranks()
        _print(go_on_hint(None).strip())
    finally:
        os._exit(1)
