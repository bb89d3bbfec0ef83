"""Does a run that is killed repeatedly, at random moments, end with the same weights as an undisturbed run?

    python -m bench.kills [--runs 20] [--kills 10] [--worlds 1,2] [--deterministic]

Each run is killed --kills times with SIGKILL: all its processes, or one, and then the others must end within a minute.
Then it may finish. Exit code 1 if a run's weights differ, an example id came twice or never, or a half-written file is
left. On GPUs use --deterministic --model tiny. --lora_rank 4 kills runs that train an adapter,
--recorded kills runs whose steps are recorded.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.ranks import kill_all
from tests.tiny import furnish
from tests.trials import (
    Disturbed,
    add_kinds_of_runs,
    calm_hash,
    kind_of_runs,
    options_of_kind,
    tell,
    typed,
    write_section,
)

OPTIONS = dict(epochs=20, save_steps=1, ddp_timeout_s=45)
ENDED_SECONDS = 60  # longer than ddp_timeout_s: that long a rank waits for the others to start


def main():
    parser = argparse.ArgumentParser(description="Runs that are killed at random moments and resumed.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10, help="per run")
    parser.add_argument("--worlds", default="1,2", help="numbers of processes; runs use them in turn")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--model", default="shape.json", help="a model of config.py; default: the smallest possible")
    parser.add_argument("--dropout", type=float, default=0.1)
    add_kinds_of_runs(parser)
    parser.add_argument("--out", help="file for the JSON lines")
    given = parser.parse_args()
    worlds = [int(world) for world in given.worlds.split(",")]
    options = OPTIONS | dict(deterministic=given.deterministic, model=given.model, dropout=given.dropout)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder))
        options |= options_of_kind(home, given, given.model)
        for number in range(given.runs):
            world, draw = worlds[number % len(worlds)], random.Random(given.seed + number)
            record = killed_run(home, f"run{number}", world, draw, given.kills, **options)
            tell(given.out, harness="kills", run=number, seed=given.seed, **record)
            records.append(record)
    device = "gpu" if torch.cuda.is_available() else "cpu"
    kind, mode = kind_of_runs(given), "deterministic" if given.deterministic else "default"
    suffix = f"_lora_{given.base_precision}" if given.lora_rank else "_recorded" * given.recorded
    write_section(
        f"kills_{device}_{mode}{suffix}",
        f"SIGKILL at random moments ({device.upper()}, {mode} mode{', ' * bool(kind)}{kind})",
        ["processes", "runs", "kills", "during a save", "before the first step", "survivor ended after, s (worst)",
         "runs with the undisturbed run's sha256", "runs with each id once"],
        [row(world, [r for r in records if r["world"] == world]) for world in worlds],
        f"`{typed('bench.kills')}`: a run of 120 steps that saves after each step.",
    )  # fmt: skip
    return 1 if any(record["wrong"] for record in records) else 0


def row(world, records):
    survivors = [seconds for r in records for seconds in r["survivor_seconds"]]
    return [
        world, len(records), *(sum(r[name] for r in records) for name in ("kills", "in_save", "at_start")),
        f"{max(survivors):.1f}" if survivors else "–",
        *(sum(name not in r["wrong"] for r in records) for name in ("sha256", "ids_once")),
    ]  # fmt: skip


def killed_run(home, name, world, draw, kills, **options):
    """Kill a run `kills` times at random moments, let it finish, and return its record."""
    calm = calm_hash(home, world, **options)
    run = Disturbed(home, name, world, **options)
    record = dict(world=world, kills=0, in_save=0, at_start=0, survivor_seconds=[])
    while record["kills"] < kills:
        processes = run.start()
        at_start = wait_for_a_moment(run, processes, draw)
        if any(process.exitcode is not None for process in processes):
            kill_all(processes)
            break  # the run finished before the last kill
        victims = draw.choice([processes, processes[:1], processes[-1:]])
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        for process in processes:
            process.join(ENDED_SECONDS)
        if len(victims) < world:
            record["survivor_seconds"].append(time.monotonic() - killed_at)
        kill_all(processes)
        record["kills"] += 1
        record["at_start"] += at_start
        record["in_save"] += run.in_save()
    late = [seconds for seconds in record["survivor_seconds"] if seconds >= ENDED_SECONDS]
    record["wrong"] = run.ends_calmly(calm) + (f" survivors {late}" if late else "")
    return record


def wait_for_a_moment(run, processes, draw):
    """Wait for a random moment after a start; returns True if no step was logged since."""
    lines, kind = run.lines(), draw.random()
    if kind < 0.15:
        time.sleep(draw.uniform(0, 1))
    else:
        run.wait_for("step", lambda: run.lines() > lines, processes)
        time.sleep(draw.uniform(0, 0.2))
    if kind > 0.6:
        run.wait_for("save", run.in_save, processes)
        time.sleep(draw.uniform(0, 0.01))
    return run.lines() == lines


if __name__ == "__main__":
    sys.exit(main())
