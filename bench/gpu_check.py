"""Check a GPU machine with one command and without a network: do kernels and training work, and how fast?

    python -m bench.gpu_check --output_dir DIR [--minutes 9]

Parts: the tests marked gpu, parity of the kernels among them; milliseconds of attention and of the loss;
bench.compare --short for the model small. Each part is a process with its own time limit. Its output is printed when it
ends and kept in DIR/<part>.log; DIR/gpu_check.jsonl has one line per part.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import psutil
import torch

from bench.children import Job, gpu_slots, run_jobs

LIMIT_SECONDS = {"tests": 150, "kernels": 210, "compare": 400}


def main():
    parser = argparse.ArgumentParser(description="GPU tests, kernels timed, the short comparison.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--parts", default=",".join(LIMIT_SECONDS))
    parser.add_argument("--minutes", type=float, default=9)
    options = parser.parse_args()
    if unknown := set(options.parts.split(",")) - LIMIT_SECONDS.keys():
        known = ", ".join(LIMIT_SECONDS)
        parser.error(f"--parts={options.parts}: {', '.join(sorted(unknown))} is unknown; choose from {known}")
    folder = Path(options.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if on_gpu else "no GPU: all parts run on the CPU with small sizes", flush=True)
    deadline, failures = psutil.Process().create_time() + options.minutes * 60, 0
    with open(folder / "gpu_check.jsonl", "a") as file:
        for part in options.parts.split(","):  # one at a time, since each is timed
            words = words_of(part, folder, on_gpu, deadline - time.time())
            job = Job(part, words, LIMIT_SECONDS[part])
            for done in run_jobs([job], folder, gpu_slots(int(on_gpu)), deadline - time.time()):
                failures += bool(done.problem)
                line = json.dumps(dict(part=part, problem=done.problem, seconds=round(done.seconds, 1)))
                print(done.text, line, sep="", flush=True)
                print(line, file=file, flush=True)
    return 1 if failures else 0


def words_of(part, folder, on_gpu, seconds_left):
    """The command line of a part; on a CPU with sizes that take seconds."""
    module = [sys.executable, "-m"]
    small = [] if on_gpu else ["--tokens", 512, "--width", 32]
    if part == "tests":
        return [*module, "pytest", "-q", "-m", "gpu", "tests"]
    if part == "kernels":
        return [*module, "bench.kernels", *small]
    how = ["--models", "small"] if on_gpu else ["--cpu", "--models", "tiny"]
    minutes = max(min(seconds_left, LIMIT_SECONDS["compare"]) - 20, 1) / 60  # leaves time to write its table
    return [*module, "bench.compare", "--output_dir", folder / "compare", "--short", "--minutes", minutes, *how]


if __name__ == "__main__":
    sys.exit(main())
