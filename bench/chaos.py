"""Does a run that something befalls every 20 seconds end with the weights of a run that nothing befell?

    python -m bench.chaos [--minutes 20] [--every 20]

Two processes. Half of the misfortunes come from outside: SIGKILL to one or all, a signal that asks for a stop, a
damaged newest checkpoint, a full disk; half are injected where a step is worked on (CHAT_FAULT): out of memory (once,
so that the plan stays), numbers that are not finite, a slow or hanging rank, a save that fails, a kill in a save. Each
time that the run ends, it is started again. After so many minutes it may finish. Its steps sleep a moment, which
changes no bit and lets the calm run be over sooner.
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
STEPS_AN_EPOCH = NUM_PAIRS // 64
INSIDE = {
    "out of memory": ("forward", "oom"), "cuBLAS without memory": ("backward", "cublas"),
    "host out of memory": ("backward_first", "cpu"), "not finite": ("loss", "nan"), "slow rank": ("forward", "slow"),
    "hanging rank": ("backward", "hang"), "killed before the reduction": ("reduce", "kill"),
    "killed before the update": ("optimizer", "kill"), "rank that fails": ("forward", "eio"),
    "term on one rank": ("forward", "term"),
}  # fmt: skip
SAVE_KINDS = {"save without space": "enospc", "save with a broken disk": "eio", "killed in a save": "kill"}


def main():
    parser = argparse.ArgumentParser(description="A run that something befalls again and again.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=20, help="seconds between misfortunes")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--epochs", type=int, default=0, help="length of the run; 0: as its pace and --minutes ask")
    parser.add_argument("--out", help="file for the JSON lines")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        met, result = disturb(furnish(Path(folder)), given)
    tell(given.out, harness="chaos", **result)
    right = result["sha256_equal"] and result["ids_once"] and not any(result["codes"])
    told = "{misfortunes} misfortunes in {minutes} minutes, {lives} lives, {steps} steps on two processes; "
    end = "at the end the calm run's sha256 and each id once" if right else f"**it failed: {result}**"
    rows, note = [[kind, count] for kind, count in sorted(met.items())], "`python -m bench.chaos`: "
    write_section("chaos", "Chaos", ["misfortune", "times"], rows, note + told.format(**result) + end)
    return 0 if right else 1


def disturb(home, given):
    """(How often each misfortune came, what became of the run beside a calm one)."""
    texts = (home / "train.jsonl").read_text().splitlines()
    (home / "many.jsonl").write_text("\n".join(texts[n % len(texts)] for n in range(NUM_PAIRS)) + "\n")
    pace = 1 / (SLEEP_SECONDS + 1 / measure_pace(home))
    epochs = given.epochs or math.ceil(0.9 * given.minutes * 60 * pace / STEPS_AN_EPOCH)
    disk = home / "disk"
    disk.mkdir()
    mounted = mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", disk) == 0
    try:
        run = Disturbed(home, "disk/run", 2, function=sleepy_main, epochs=epochs, **OPTIONS)
        met, lives, minutes = chaos(run, given, random.Random(given.seed), pace, mounted)
        done = wait_for(run.start(), home, 7200)
        disturbed_hash = weights_hash(run.dir)
        ids_once = ids_by_epoch(run.dir) == {e: list(range(NUM_PAIRS)) for e in range(1, epochs + 1)}
        steps, plans = journal(run.dir, "stop")[-1]["step"], count_plans(run)
    finally:
        if mounted:
            os.system(f"umount {disk}")
    calm = train(home, 2, output_dir="calm", seconds=7200, dropout=0.1, epochs=epochs, **OPTIONS)
    return met, dict(
        steps=steps, lives=lives, minutes=round(minutes, 1), misfortunes=sum(met.values()), plans=plans,
        codes=[*done.codes, *calm.codes], sha256_equal=disturbed_hash == weights_hash(home / "calm"),
        ids_once=ids_once,
    )  # fmt: skip


def measure_pace(home):
    """Steps a second of a run that nothing befalls."""
    done = train(home, 2, output_dir="pace", seconds=600, epochs=1, **OPTIONS)
    assert done.codes == [0, 0], done.text
    lines = journal(home / "pace", "train")
    return (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])


def chaos(run, given, draw, pace, mounted):
    """Let misfortunes befall the run for the time given; returns how many of each kind, its lives, the minutes."""
    met, lives, barren, started = Counter(), 0, 0, time.monotonic()
    over = started + 60 * given.minutes
    outside = ["kill all", "kill one", "stop all", "stop one", "damage", *(["full disk"] if mounted else [])]
    while time.monotonic() < over:
        plan, lines = plan_inside(run, draw, pace * given.every), run.lines()
        processes, lives = run.start(",".join(fault for fault, _ in plan)), lives + 1
        kind, life = draw.choice(outside), draw.uniform(1.0, 3.0) * given.every
        until = min(time.monotonic() + life, over)
        while time.monotonic() < until and all(process.exitcode is None for process in processes):
            time.sleep(0.05)
        if all(process.exitcode is None for process in processes) and time.monotonic() < over:
            befall(run, processes, kind, draw)
            met[kind] += 1
            tell(given.out, harness="chaos", outside=kind)
        elif time.monotonic() >= over:
            kill_all(processes)
        for process in processes:
            process.join(60)
        assert all(process.exitcode is not None for process in processes), f"{kind}: a rank lived on for 60 s"
        kill_all(processes)
        barren = 0 if run.lines() > lines else barren + 1
        assert barren < 10, "".join(path.read_text()[-2000:] for path in run.home.glob("rank*.txt"))
        for name in fired(run, plan):
            met[name] += 1
            tell(given.out, harness="chaos", inside=name)
        if all(process.exitcode == 0 for process in processes) and journal(run.dir, "stop")[-1]["reason"] == "finished":
            break
    return met, lives, (time.monotonic() - started) / 60


def plan_inside(run, draw, steps_between):
    """(fault, its name) of what is to befall the run's next life from inside."""
    step = max((path_step(path) for path in checkpoint_paths(run.dir)[:1]), default=0)
    plan = []
    for _ in range(4):
        step += max(int(draw.uniform(0.5, 1.5) * steps_between), 1)
        if draw.random() < 0.25:
            name = draw.choice(list(SAVE_KINDS))
            step = -(-step // STEPS_AN_EPOCH) * STEPS_AN_EPOCH  # a step that is saved
            plan.append((f"save:0:{step}:{SAVE_KINDS[name]}", name))
        else:
            name = draw.choice(list(INSIDE))
            site, kind = INSIDE[name]
            plan.append((f"{site}:{draw.choice('01')}:{step}:{kind}", name))
    return plan


def path_step(path):
    return int(path.name.removeprefix("step_"))


def fired(run, plan):
    """Names of the planned faults that really befell the life that just ended."""
    texts = "".join(path.read_text() for path in run.home.glob("rank*.txt"))
    return [name for fault, name in plan if f"CHAT_FAULT {fault} fires" in texts]


def count_plans(run):
    """How many different plans the run's out of memory events came to: none, since each fired once."""
    return sum(line["before"] != line["after"] for line in journal(run.dir, "oom"))


def befall(run, processes, kind, draw):
    """One misfortune from outside."""
    one = draw.choice(processes)
    if kind in ("kill all", "kill one", "damage"):
        for process in processes if kind != "kill one" else [one]:
            process.kill()  # which lets one be that has just ended by itself
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
