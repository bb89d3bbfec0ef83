"""Gives mutated inputs to every reader: each must raise a clear ValueError of this project or read correctly.

    python -m bench.fuzz [--inputs 12000] [--seed 0] [--table docs/faults.md]

An input is a function of (seed, target, number). Inputs are judged in child processes: if one crashes or hangs, the
input it was reading has failed. The table replaces the text between <!-- fuzz --> and <!-- /fuzz -->.
"""

import argparse
import multiprocessing
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from bench.fuzz_checkpoint import tiny_run
from bench.fuzz_targets import TARGETS

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = ("refused", "correct", "wrong", "traceback", "hang", "crash")
GOOD = ("refused", "correct")
INPUT_SECONDS, WORKER_SECONDS, SPARE_BYTES = 10, 60, 6 * 2**30


class Hang(BaseException):
    """An input took longer than INPUT_SECONDS."""


def judge(name, number, seed=0):
    """(outcome, details) of one input; the outcome is one of OUTCOMES."""
    draw = random.Random(f"{seed}/{name}/{number}")
    signal.signal(signal.SIGALRM, _raise_hang)
    signal.alarm(INPUT_SECONDS)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
            TARGETS[name](draw, Path(folder))
        return "correct", ""
    except Hang:
        return "hang", f"more than {INPUT_SECONDS} s"
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
        signal.alarm(0)


def _raise_hang(number, frame):
    raise Hang


def _work(name, numbers, seed, folder, results):
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))
    tiny_run()  # before the first input: on a busy machine its imports take longer than INPUT_SECONDS
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


def table(counts, seed, seconds):
    """The counts as a markdown section."""
    total = sum(counter.total() for counter in counts.values())
    lines = [
        "## Mutated inputs", "",
        f"`python -m bench.fuzz --seed {seed}`: {total:,} inputs in {seconds:.0f} s. Refused: this project raised a "
        "ValueError. Correct: read, and equal to the original or to what an independent reader gives.", "",
        "| input | " + " | ".join(OUTCOMES) + " |", "| ---" * (1 + len(OUTCOMES)) + " |",
    ]  # fmt: skip
    for name, counter in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        lines.append(f"| {name} | " + " | ".join(f"{counter[outcome]:,}" for outcome in OUTCOMES) + " |")
    return "\n".join(lines)


def write_section(path, text):
    """Put `text` between the fuzz markers of a markdown file, or at its end if it has none."""
    path, section = Path(path), f"<!-- fuzz -->\n{text}\n<!-- /fuzz -->"
    old = path.read_text(encoding="utf-8") if path.exists() else "# Faults\n"
    if "<!-- fuzz -->" not in old:
        old += "\n<!-- fuzz -->\n<!-- /fuzz -->\n"
    path.write_text(re.sub("<!-- fuzz -->.*<!-- /fuzz -->", lambda _: section, old, flags=re.S), encoding="utf-8")


def main():
    """Fuzz all targets and print the failures; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description="Give mutated inputs to every reader.")
    parser.add_argument("--inputs", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--table", default="", help="markdown file whose section is replaced")
    options = parser.parse_args()
    started, counts = time.monotonic(), {}
    for name in [options.only] if options.only else TARGETS:
        found = fuzz(name, -(-options.inputs // len(TARGETS)), options.seed)
        counts[name] = Counter(outcome for _, outcome, _ in found)
        print(name, dict(counts[name]), flush=True)
        for number, outcome, detail in found:
            if outcome not in GOOD:
                print(f"--- {name} {number}: {outcome}\n{detail}", flush=True)
    text = table(counts, options.seed, time.monotonic() - started)
    print(text)
    if options.table:
        write_section(options.table, text)
    sys.exit(any(counter[outcome] for counter in counts.values() for outcome in OUTCOMES if outcome not in GOOD))


if __name__ == "__main__":
    main()
