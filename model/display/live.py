"""While a run trains: each rank writes its status twice a second, and a terminal shows the screen.

The screen is a process of its own (model/display/watch.py). If it dies, this one restores the terminal and prints plain
lines on it.
"""

import atexit
import logging
import math
import os
import subprocess
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from model.display.captured_output import NAME, TerminalLog, discard
from model.display.catalogue import texts_here
from model.display.console import progress_note
from model.display.trackers import Trackers
from model.display.watch import LEAVE
from model.run.status import Status, write_status
from model.runtime.activity import Pace, current_activity, now_doing
from model.runtime.cgroup import host_memory
from model.runtime.device_memory import memory_cap, peak_memory
from model.runtime.module_process import start_module
from model.runtime.terminal import in_foreground
from model.runtime.watchdog import standing
from model.train.commit import OnHost

LOGGER = logging.getLogger("chat_trainer")
STATUS_SECONDS = 0.5
PACE_STEPS = 20  # newest steps that the speed is measured over
CLOSE_SECONDS = 5.0  # that the screen has to restore the terminal
UNKNOWN = Pace(loss=0.0, tokens_per_second=0.0, step_seconds=0.0)
DUMB_TERMINALS = ("", "dumb", "unknown")


@contextmanager
def live(ranks, run_dir, screen, limit_gb, tracker):
    """Inside the block this rank writes its status; rank 0 has the screen and the trackers that are asked for.

    `screen` is auto, on or off, `tracker` as check_installed has it. `limit_gb` is the GPU memory that the run may use,
    in GiB; 0: all.
    """
    now_doing("starting")
    identity = identity_of(ranks, limit_gb)
    if ranks.is_main:
        discard(run_dir)
    screen = screen_of(ranks, run_dir, screen)
    trackers = Trackers(run_dir, tracker if ranks.is_main else "")
    ended = threading.Event()

    def keep_writing():
        while not ended.is_set():
            with suppress(OSError):  # without a free descriptor, for example
                write_status(run_dir, status_now(identity, ranks.device))
            screen.check()
            trackers.check()
            ended.wait(STATUS_SECONDS)

    thread = threading.Thread(target=keep_writing, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        trackers.close()
        screen.close()


def identity_of(ranks, limit_gb):
    """The fields of a Status that do not change."""
    device, gpu = ranks.device, {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = dict(
            device=properties.name,
            uuid=str(properties.uuid).removeprefix("GPU-"),
            limit_bytes=memory_cap(device, limit_gb),
        )
    return dict(rank=ranks.rank, host=os.uname().nodename, pid=os.getpid()) | gpu


def status_now(identity, device):
    """The Status of this rank. It asks PyTorch's allocator, never the device, which may be capturing a CUDA graph."""
    _, peak_bytes, rss_bytes = peak_memory(device)
    reserved_bytes = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    host_available, host_total = host_memory()
    stopping, saving = standing()
    doing = current_activity()
    pace = doing.pace or UNKNOWN
    return Status(
        **identity, time=time.time(), reserved_bytes=reserved_bytes, peak_bytes=peak_bytes, rss_bytes=rss_bytes,
        host_used_bytes=host_total - host_available, host_total_bytes=host_total, activity=doing.name, done=doing.done,
        total=doing.total or 0, saving=saving, stopping=stopping, loss=pace.loss if math.isfinite(pace.loss) else 0.0,
        tokens_per_second=pace.tokens_per_second, step_seconds=pace.step_seconds,
    )  # fmt: skip


class Pacing:
    """The Pace of a training from its second step on, looked at twice a second without waiting for the device.

    A loss is on the device: its copy is asked for after a step and read after the next one, whose own check has waited
    for the device.
    """

    def __init__(self, device, limit_gb):
        self._device, self._cap_bytes = device, memory_cap(device, limit_gb)
        self._steps = deque(maxlen=PACE_STEPS)  # (tokens, seconds)
        self._is_first, self._coming, self._looked_at = True, None, -STATUS_SECONDS
        self._loss, self._shown = math.nan, ("", None)

    def after(self, result):
        """(note of the progress bar, Pace) after this StepResult; ("", None) after the first."""
        if not self._is_first:  # that one may have compiled kernels
            self._steps.append((result.tokens, result.step_seconds))
        self._is_first = False
        if self._coming is not None:
            self._shown = self._look()
        if time.monotonic() - self._looked_at >= STATUS_SECONDS:
            self._looked_at, self._coming = time.monotonic(), OnHost(result.loss)
        return self._shown

    def _look(self):
        loss, self._coming = self._coming.read(), None
        self._loss = loss if math.isfinite(loss) else self._loss  # not that of a step that was left out
        tokens, seconds = map(sum, zip(*self._steps, strict=True))
        reserved_bytes = torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
        pace = Pace(self._loss, tokens / seconds, seconds / len(self._steps))
        return progress_note(pace.loss, pace.tokens_per_second, reserved_bytes, self._cap_bytes), pace


def screen_of(ranks, run_dir, option):
    """What this rank does for the screen; `option` is auto, on or off."""
    if option == "on" and ranks.is_main and not os.isatty(2):
        LOGGER.warning(texts_here()("screen.plain"))
    shares_terminal = ranks.rank == ranks.local_rank  # with rank 0, whose machine it is on
    if option == "off" or not os.isatty(2) or not shares_terminal:
        return NoScreen()
    if option == "auto" and (os.environ.get("TERM", "") in DUMB_TERMINALS or not in_foreground()):
        return NoScreen()
    return OwnScreen(run_dir) if ranks.is_main else OthersScreen(run_dir)


class NoScreen:
    def check(self):
        pass

    def close(self):
        pass


class OwnScreen:
    """Rank 0's: it starts the screen's process and ends it."""

    def __init__(self, run_dir):
        self._log, self._texts = None, texts_here()
        try:
            self._log = TerminalLog(run_dir)
            pipes = dict(stdin=subprocess.PIPE, stdout=self._log.terminal, stderr=self._log.fileno())
            self._process = start_module("model.display.watch", run_dir, **pipes)
        except OSError as error:
            self._end()
            LOGGER.warning(self._texts("screen.none", error=error))

    def check(self):
        """Print plain lines again if the screen's process has died."""
        if self._log is not None and self._process.poll() is not None:
            self._end(self._process.returncode)
            LOGGER.warning(self._texts("screen.ended"))

    def close(self):
        """End the screen; the terminal then shows the last lines that were printed meanwhile."""
        if self._log is None:
            return
        with suppress(OSError):
            self._process.stdin.close()  # its end is what the screen waits for
        try:
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._end(code)

    def _end(self, code=0):
        log, self._log = self._log, None
        if log is not None and code < 0:  # killed by a signal: it could not restore the terminal itself
            with suppress(OSError):
                os.write(log.terminal, LEAVE)
        if log is not None:
            log.give_back(self._texts("earlier"))


class OthersScreen:
    """For a rank above 0 on the terminal of rank 0: rank 0's screen shows what this rank prints."""

    def __init__(self, run_dir):
        self._run_dir, self._log, self._texts = run_dir, None, texts_here()
        atexit.register(self.check_log)  # an error is printed after `close`

    def check(self):
        if self._log is None and Path(self._run_dir, NAME).exists():
            with suppress(OSError):
                self._log = TerminalLog(self._run_dir)
        self.check_log()

    def check_log(self):
        """Print on the terminal again once the screen is gone."""
        if self._log is not None and self._log.is_over:
            log, self._log = self._log, None
            log.give_back(self._texts("earlier"))

    def close(self):
        self.check_log()
