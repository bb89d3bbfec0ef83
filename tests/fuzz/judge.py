"""Judges mutated inputs: each reader must raise a clear ValueError of this project or read correctly.

An input is a function of (seed, target, number). `fuzz` judges inputs in child processes: if one crashes or hangs, the
input it was reading has failed.
"""

import multiprocessing
import random
import resource
import signal
import tempfile
import traceback
from pathlib import Path

import torch

from tests.fuzz.checkpoint import tiny_run
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("refused", "correct", "wrong", "traceback", "hang", "crash")
GOOD = ("refused", "correct")
INPUT_SECONDS = 10  # of the processor, which a busy machine does not stretch
WAIT_SECONDS = 60  # by the clock
WORKER_SECONDS, SPARE_BYTES = 2 * WAIT_SECONDS, 6 * 2**30


class Hang(BaseException):
    """An input took longer than INPUT_SECONDS of the processor, or than WAIT_SECONDS."""


def judge(name, number, seed=0):
    """(outcome, details) of one input; the outcome is one of OUTCOMES."""
    draw = random.Random(f"{seed}/{name}/{number}")
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, _raise_hang)
    _limit(INPUT_SECONDS, WAIT_SECONDS)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            TARGETS[name](draw, Path(folder))
        return "correct", ""
    except Hang:
        return "hang", f"more than {INPUT_SECONDS} s of the processor, or {WAIT_SECONDS} s"
    except AssertionError as error:
        return "wrong", traceback.format_exc() if not str(error) else str(error)
    except SystemExit as end:
        return ("refused", "") if end.code == 2 else ("traceback", f"exit {end.code}")
    except ValueError as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = ROOT / "model" in last.parents or last == ROOT / "config.py"
        return ("refused", str(error)) if ours and str(error) else ("traceback", traceback.format_exc())
    except BaseException:  # a panic in a Rust library is not an Exception
        return "traceback", traceback.format_exc()
    finally:
        _limit(0, 0)


def _limit(processor_seconds, clock_seconds):
    """Raise Hang after either; 0 ends the limit."""
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, clock_seconds)


def _raise_hang(number, frame):
    raise Hang


def _work(name, numbers, seed, folder, results):
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))
    tiny_run()  # before the first input: its imports are no part of that input's time
    for number in numbers:
        results.send((number, *judge(name, number, seed)))
    results.send(None)


def fuzz(name, inputs, seed=0):
    """[(number, outcome, details)] of the first `inputs` inputs of a target."""
    found, ending = [], "not begun"
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:  # a killed worker leaves its files behind
        while ending and len(found) < inputs:
            mine, theirs = multiprocessing.Pipe(duplex=False)
            worker = multiprocessing.get_context("fork").Process(
                target=_work, args=(name, range(len(found), inputs), seed, folder, theirs)
            )
            worker.start()
            theirs.close()
            ending = _collect(mine, found)
            worker.kill()
            worker.join()
            if ending:
                found.append((len(found), ending, f"exit code {worker.exitcode}"))
    return found


def _collect(results, found):
    """Add a worker's results to `found`; returns "crash" or "hang", or "" if the worker finished."""
    while results.poll(WORKER_SECONDS):
        try:
            result = results.recv()
        except EOFError:
            return "crash"
        if result is None:
            return ""
        found.append(result)
    return "hang"
