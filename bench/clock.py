"""Timing of a training loop (start-up, warm-up, timed windows) and of one call."""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

WINDOWS = 5


@dataclass(frozen=True)
class Pace:
    """Duration of a loop's warm-up and of its timed part."""

    warm_steps: int
    warm_seconds: float
    timed_seconds: float
    cycle: int = WINDOWS  # the number of timed steps is a multiple: loops sorted by length need whole rounds


class StepClock:
    """Counts a loop's steps and decides when the measurement is complete.

    Step i belongs to window i % WINDOWS, so each window has steps of all lengths. On a GPU a step is timed with CUDA
    events, so the clock does not make the loop wait.
    """

    def __init__(self, device, pace, gate=None, on_start=lambda: None, forgets_peak=True):
        self.device, self.pace, self.gate, self.on_start = device, pace, gate, on_start
        self.forgets_peak = forgets_peak  # whether timing resets the peak; replaying a CUDA graph allocates nothing
        self.steps, self.first_step_at, self.first_step_seconds = 0, None, None
        self.marks, self.pairs, self.tokens = [], [], []
        self.peak_bytes, self.cpu_seconds = 0, 0.0
        self.waited_seconds = gate.enter() if gate else 0.0

    def tick(self, pairs, tokens):
        """Count one step of `pairs` and real `tokens` (number or tensor); returns True when enough is measured."""
        self.steps += 1
        if self.steps == 1:
            self._wait()
            self.first_step_at = time.time()
            started_at = float(os.environ.get("STARTED_AT", self.first_step_at))
            self.first_step_seconds = self.first_step_at - started_at - self.waited_seconds
        if not self.marks:
            if self.steps >= self.pace.warm_steps and time.time() - self.first_step_at >= self.pace.warm_seconds:
                self._start()
            return False
        self.marks.append(self._mark())
        self.pairs.append(pairs)
        self.tokens.append(tokens)
        enough = time.perf_counter() - self.started >= self.pace.timed_seconds
        if not (enough and len(self.pairs) % self.pace.cycle == 0 and len(self.pairs) >= WINDOWS):
            return False
        self._wait()
        self.cpu_seconds = time.process_time() - self.cpu_started
        self.peak_bytes = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return True

    def result(self):
        """The measured figures; a rate is the median over the windows."""
        times = [self._seconds(one, other) for one, other in zip(self.marks, self.marks[1:], strict=False)]
        tokens = [float(count) for count in self.tokens]
        windows = [slice(i, None, WINDOWS) for i in range(WINDOWS)]
        rates = [sum(tokens[w]) / sum(times[w]) for w in windows]
        return dict(
            tokens_per_second=median(rates),
            spread=(max(rates) - min(rates)) / median(rates),
            pairs_per_second=median(sum(self.pairs[w]) / sum(times[w]) for w in windows),
            step_ms=1e3 * median(sum(times[w]) / len(times[w]) for w in windows),
            peak_gib=self.peak_bytes / 2**30,
            first_step_seconds=self.first_step_seconds,
            tokens_per_cpu_second=sum(tokens) / self.cpu_seconds,  # all threads; comparable on a busy machine too
            timed_steps=len(times),
        )

    def median_ms(self):
        """Of the timed steps: a step that is captured, once for each bucket, does not count."""
        return 1e3 * median(self._seconds(one, other) for one, other in zip(self.marks, self.marks[1:], strict=False))

    def _start(self):
        self._wait()
        self.on_start()
        if self.gate:
            torch.cuda.empty_cache()  # other processes are set up while this one waits
            self.gate.have_alone()
        if self.device.type == "cuda" and self.forgets_peak:
            torch.cuda.reset_peak_memory_stats()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        self.marks.append(self._mark())

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, one, other):
        return other - one if self.device.type != "cuda" else one.elapsed_time(other) / 1e3

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Gate:
    """File lock on a GPU: several processes may share it while they are set up, one has it alone while it is timed.

    With `alone` the process also has it alone during set-up, because its plan depends on the GPU's free memory.
    """

    def __init__(self, path, alone=False):
        self.file, self.alone = open(Path(path), "w"), alone

    def enter(self):
        """Wait until the GPU may be used; returns the seconds waited."""
        began = time.time()
        fcntl.flock(self.file, fcntl.LOCK_EX if self.alone else fcntl.LOCK_SH)
        return time.time() - began

    def have_alone(self):
        fcntl.flock(self.file, fcntl.LOCK_EX)


def time_call(call, device, seconds=0.3, at_least=5):
    """Median milliseconds of `call()`, which the caller has warmed up; on a GPU measured with CUDA events."""
    on_gpu, times, started = device.type == "cuda", [], time.perf_counter()
    while len(times) < at_least or time.perf_counter() - started < seconds:
        if on_gpu:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            call()
            marks[1].record()
            torch.cuda.synchronize()
            times.append(marks[0].elapsed_time(marks[1]))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return median(times)


def memory_of_call(call, device):
    """Peak bytes that `call()` allocates above what was allocated before; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
