"""Does a run with a fault every 20 seconds end with the same weights as an undisturbed run?

    python -m bench.chaos [--minutes 20] [--every 20]

Two processes. Half of the faults come from outside: SIGKILL to one process or all, a signal that asks for a stop, a
damaged newest checkpoint, a full disk. The other half are injected into a step (CHAT_FAULT): out of memory (once per
site, so the plan does not change), non-finite numbers, a slow or hanging rank, a failing save, a kill during a save.
Whenever the run ends, it is started again; after --minutes it may finish. Its steps sleep for SLEEP_SECONDS, which
changes no result; the undisturbed run does not sleep and takes less time.
"""

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from model.run.checkpoint import checkpoint_paths
from tests.ranks import kill_all
from tests.tiny import furnish, ids_by_epoch, journal, train, wait_for, weights_hash
from tests.trials import SLEEP_SECONDS, Disturbed, delete, fill, flip, mount, sleepy_main, tell, truncate, write_section

OPTIONS = dict(
    train_file="many.jsonl", global_batch_size=64, logging_steps=5, save_steps=10_000, save_seconds=3, ddp_timeout_s=30,
    micro_batch_tokens=512,
)  # fmt: skip
NUM_PAIRS = 6400
STEPS_PER_EPOCH = NUM_PAIRS // 64
INSIDE = {
    "out of memory": ("forward", "oom"), "cuBLAS without memory": ("backward", "cublas"),
    "host out of memory": ("backward_first", "cpu"), "not finite": ("loss", "nan"), "slow rank": ("forward", "slow"),
    "hanging rank": ("backward", "hang"), "killed before the reduction": ("reduce", "kill"),
    "killed before the update": ("optimizer", "kill"), "rank that fails": ("forward", "eio"),
    "term on one rank": ("forward", "term"),
}  # fmt: skip
SAVE_KINDS = {"save without space": "enospc", "save with a broken disk": "eio", "killed in a save": "kill"}


def main():
    parser = argparse.ArgumentParser(description="A run with repeated faults, compared with an undisturbed run.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=20, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--epochs", type=int, default=0, help="length of the run; 0: computed from --minutes")
    parser.add_argument("--out", help="file for the JSON lines")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, result = disturb(furnish(Path(folder)), given)
    tell(given.out, harness="chaos", **result)
    passed = result["sha256_equal"] and result["ids_once"] and not any(result["codes"])
    summary = "{misfortunes} faults in {minutes} minutes, {lives} starts, {steps} steps on two processes; "
    end = "the final weights have the undisturbed run's sha256, each id came once per epoch"
    end = end if passed else f"**it failed: {result}**"
    rows, note = [[kind, count] for kind, count in sorted(counts.items())], "`python -m bench.chaos`: "
    write_section("chaos", "Chaos", ["fault", "times"], rows, note + summary.format(**result) + end)
    return 0 if passed else 1


def disturb(home, given):
    """(Counter of the faults, comparison of the disturbed run with an undisturbed one)."""
    texts = (home / "train.jsonl").read_text().splitlines()
    (home / "many.jsonl").write_text("\n".join(texts[n % len(texts)] for n in range(NUM_PAIRS)) + "\n")
    steps_per_second = 1 / (SLEEP_SECONDS + 1 / measure_pace(home))
    epochs = given.epochs or math.ceil(0.9 * given.minutes * 60 * steps_per_second / STEPS_PER_EPOCH)
    disk = home / "disk"
    disk.mkdir()
    mounted = mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", disk) == 0
    try:
        run = Disturbed(home, "disk/run", 2, function=sleepy_main, epochs=epochs, **OPTIONS)
        counts, lives, minutes = chaos(run, given, random.Random(given.seed), steps_per_second, mounted)
        done = wait_for(run.start(), home, 7200)
        disturbed_hash = weights_hash(run.dir)
        ids_once = ids_by_epoch(run.dir) == {e: list(range(NUM_PAIRS)) for e in range(1, epochs + 1)}
        steps, plans = journal(run.dir, "stop")[-1]["step"], count_plans(run)
    finally:
        if mounted:
            os.system(f"umount {disk}")
    calm = train(home, 2, output_dir="calm", seconds=7200, dropout=0.1, epochs=epochs, **OPTIONS)
    return counts, dict(
        steps=steps, lives=lives, minutes=round(minutes, 1), misfortunes=sum(counts.values()), plans=plans,
        codes=[*done.codes, *calm.codes], sha256_equal=disturbed_hash == weights_hash(home / "calm"),
        ids_once=ids_once,
    )  # fmt: skip


def measure_pace(home):
    """Steps per second of an undisturbed run."""
    done = train(home, 2, output_dir="pace", seconds=600, epochs=1, **OPTIONS)
    assert done.codes == [0, 0], done.text
    lines = journal(home / "pace", "train")
    return (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])


def chaos(run, given, draw, steps_per_second, mounted):
    """Inject faults into the run for `given.minutes`; returns (Counter of faults, number of starts, minutes)."""
    counts, lives, idle_lives, started = Counter(), 0, 0, time.monotonic()
    deadline = started + 60 * given.minutes
    outside = ["kill all", "kill one", "stop all", "stop one", "damage", *(["full disk"] if mounted else [])]
    while time.monotonic() < deadline:
        plan, lines = plan_inside(run, draw, steps_per_second * given.every), run.lines()
        processes, lives = run.start(",".join(fault for fault, _ in plan)), lives + 1
        kind, life = draw.choice(outside), draw.uniform(1.0, 3.0) * given.every
        until = min(time.monotonic() + life, deadline)
        while time.monotonic() < until and all(process.exitcode is None for process in processes):
            time.sleep(0.05)
        if all(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            inflict(run, processes, kind, draw)
            counts[kind] += 1
            tell(given.out, harness="chaos", outside=kind)
        elif time.monotonic() >= deadline:
            kill_all(processes)
        for process in processes:
            process.join(60)
        assert all(process.exitcode is not None for process in processes), f"{kind}: a rank still ran after 60 s"
        kill_all(processes)
        idle_lives = 0 if run.lines() > lines else idle_lives + 1
        assert idle_lives < 10, "".join(path.read_text()[-2000:] for path in run.home.glob("rank*.txt"))
        for name in fired(run, plan):
            counts[name] += 1
            tell(given.out, harness="chaos", inside=name)
        if all(process.exitcode == 0 for process in processes) and journal(run.dir, "stop")[-1]["reason"] == "finished":
            break
    return counts, lives, (time.monotonic() - started) / 60


def plan_inside(run, draw, steps_between):
    """[(CHAT_FAULT text, name)] of the faults to inject after the next start."""
    step = max((path_step(path) for path in checkpoint_paths(run.dir)[:1]), default=0)
    plan = []
    for _ in range(4):
        step += max(int(draw.uniform(0.5, 1.5) * steps_between), 1)
        if draw.random() < 0.25:
            name = draw.choice(list(SAVE_KINDS))
            step = -(-step // STEPS_PER_EPOCH) * STEPS_PER_EPOCH  # the last of an epoch, which is saved
            plan.append((f"save:0:{step}:{SAVE_KINDS[name]}", name))
        else:
            name = draw.choice(list(INSIDE))
            site, kind = INSIDE[name]
            plan.append((f"{site}:{draw.choice('01')}:{step}:{kind}", name))
    return plan


def path_step(path):
    return int(path.name.removeprefix("step_"))


def fired(run, plan):
    """Names of the planned faults that fired since the last start."""
    texts = "".join(path.read_text() for path in run.home.glob("rank*.txt"))
    return [name for fault, name in plan if f"CHAT_FAULT {fault} fires" in texts]


def count_plans(run):
    """Number of out-of-memory events that changed the plan; 0 is expected, since each fault fires once."""
    return sum(line["before"] != line["after"] for line in journal(run.dir, "oom"))


def inflict(run, processes, kind, draw):
    """Do one fault from outside to the run."""
    one = draw.choice(processes)
    if kind in ("kill all", "kill one", "damage"):
        for process in processes if kind != "kill one" else [one]:
            process.kill()  # does nothing if the process has just ended
        if kind == "damage":
            kill_all(processes)
            paths = checkpoint_paths(run.dir)
            if len(paths) > 1:
                draw.choice((flip, truncate, delete))(draw.choice(sorted(paths[0].iterdir())))
    elif kind == "full disk":
        heal = fill(run.dir)
        time.sleep(5)
        heal()
        kill_all(processes)
    else:
        number = draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        for process in processes if kind == "stop all" else [one]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
