"""Does a run on eight processes always start in an empty directory?

    python -m bench.start_eight [--times 10] [--processes 8]

Each time it trains a tiny model for a few steps with accelerate launch on the CPU, in a new directory without token
store, logs or run. Exit code 1 if any start failed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.ranks import launch, launcher, wait_for_launch
from tests.tiny import NUM_PAIRS, furnish, ids_by_epoch, train, words

OPTIONS = dict(output_dir="run", epochs=1, save_steps=1000)
LIMIT_SECONDS = 300


def main():
    parser = argparse.ArgumentParser(description="Start a run on many processes in an empty directory, repeatedly.")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    failures = 0
    for attempt in range(1, options.times + 1):
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            problem = start_many(Path(folder), options.processes, use_launcher=True)
        failures += bool(problem)
        print(
            f"start {attempt}: {'failed' if problem else 'ok'}, {time.monotonic() - started:.1f} s {problem}",
            flush=True,
        )
    print(f"{options.times - failures} of {options.times} starts on {options.processes} processes succeeded")
    return 1 if failures else 0


def start_many(folder, world, use_launcher):
    """Run on `world` processes in the empty directory `folder`; returns the problem, or "" if there is none."""
    furnish(folder)
    if use_launcher:
        process = launch([*launcher("accelerate", world), *words(**OPTIONS)], folder)
        code, text = wait_for_launch(process, folder, LIMIT_SECONDS)
    else:
        done = train(folder, world, seconds=LIMIT_SECONDS, **OPTIONS)
        code, text = max(done.codes, key=abs), done.text
    if code != 0:
        return f"exit code {code}:\n{text}"
    ids = ids_by_epoch(folder / "run")
    return "" if ids == {1: list(range(NUM_PAIRS))} else f"wrong examples: {ids}"


if __name__ == "__main__":
    sys.exit(main())
