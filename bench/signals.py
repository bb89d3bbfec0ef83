"""Does every signal, to any process, in any phase, stop the run in time without loss?

    python -m bench.signals [--trials 100] [--launcher 12]
    python -m bench.signals --phases compiling --trials 12 --launcher 0      on two GPUs
    python -m bench.signals --kills 10 [--runs 20] [--worlds 1,2]           SIGKILL at random moments instead

On the largest of --worlds (2) a trial sends INT, TERM or USR1, once or twice in a row, to one rank or to all of them in
one phase. All ranks must exit with 0 within 20 s and leave a checkpoint of the last step that all did, or of the last
saved step if they did none. In the phase compiling, a trial waits for a random number of compiled kernels. Some trials
signal the launcher instead, or do what a scheduler does: INT to the group and to every descendant, TERM after 30 s,
then KILL. Each run is resumed for the next trial and must in the end equal an undisturbed run. A run that finishes
during a trial has missed the signal.

With --kills each run is killed so many times: in or before a save, before its first step, one process or all. It is
resumed after each and must end with the bits of an undisturbed run, each example once an epoch; a process that was not
killed must end by itself. Both print a JSON line a trial and replace their table in bench/results/faults.md.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

import psutil
import torch

from tests.faulty_runs import killed_run
from tests.ranks import kill_all, launch, launcher
from tests.tiny import furnish, words
from tests.trials import (
    WITH_KERNELS,
    Disturbed,
    add_kinds_of_runs,
    calm_hash,
    kind_of_runs,
    options_of_kind,
    tell,
    typed,
    write_section,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PHASES = ("before the first step", "tokenising", "training", "evaluation", "generation", "saving")
COMPILING = "compiling"  # only on GPUs: the run compiles kernels into an empty cache
TARGETS = ("rank 0", "rank 1", "every rank")
AT_LAUNCHER = ("the launcher", "the launcher, before the first step", "scheduled stop")
STOP_SECONDS = 20
STEPS_PER_EPOCH, LONG_LINES = 6, 4000
OPTIONS = dict(epochs=40, save_steps=1000, bleu_pairs=2, max_new_tokens=4)
TRIALS_PER_RUN = 8
KILLED = dict(epochs=20, save_steps=1, ddp_timeout_s=45)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--launcher", type=int, default=12, help="how many of the trials signal a launcher")
    parser.add_argument("--phases", default=",".join(PHASES), help="phases in which ranks are signalled")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--kills", type=int, default=0, help="of each run, in place of signals")
    parser.add_argument("--runs", type=int, default=20, help="that are killed")
    parser.add_argument(
        "--worlds",
        default="1,2",
        help="numbers of processes; runs that are killed use them in turn, signals the largest",
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--model", default="shape.json", help="a model of config.py; default: the smallest possible")
    parser.add_argument("--dropout", type=float, default=0.1)
    add_kinds_of_runs(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder))
        records = kill_runs(home, given) if given.kills else signal_runs(home, given, parser)
    return 1 if any(record["wrong"] for record in records) else 0


def signal_runs(home, given, parser):
    """The records of all trials with signals."""
    draw, phases, on_gpus = random.Random(given.seed), given.phases.split(","), torch.cuda.device_count() > 1
    known = (*PHASES, COMPILING) if on_gpus else PHASES
    if unknown := set(phases).difference(known):
        parser.error(
            f"--phases={given.phases}: {', '.join(sorted(unknown))} is unknown; choose from {', '.join(known)}"
        )
    options = OPTIONS | (WITH_KERNELS if on_gpus else {})
    # Each phase comes once before any comes again, so that few trials reach all of them.
    plain = [(phase, TARGETS[(i + n) % len(TARGETS)]) for i in range(len(TARGETS)) for n, phase in enumerate(phases)]
    chosen = [next(pairs) for pairs in [cycle(plain)] for _ in range(given.trials - given.launcher)]
    chosen += [(phase, "the launcher") for phase, _ in zip(cycle(AT_LAUNCHER), range(given.launcher), strict=False)]
    world = max(map(int, given.worlds.split(",")))
    records = list(trials(home, world, chosen, draw, options, given.out))
    write(records, world, on_gpus)
    return records


def trials(home, world, chosen, draw, options, out=None):
    """Yield one record for each (phase, target) of `chosen` on `world` processes; TRIALS_PER_RUN trials share a run."""
    (home / "long.jsonl").write_bytes((home / "train.jsonl").read_bytes() * LONG_LINES)
    calm = calm_hash(home, world, **options)
    num_kernels = kernels_of_a_start(home, world, options) if COMPILING in dict(chosen) else 0
    for first in range(0, len(chosen), TRIALS_PER_RUN):
        run = Disturbed(home, f"run{first}", world, **options)
        records = []
        for number, (phase, target) in enumerate(chosen[first : first + TRIALS_PER_RUN], start=first):
            record = dict(phase=phase, target=target, signal=draw.choice(SIGNALS).name, times=draw.choice((1, 1, 2)))
            if phase == COMPILING:
                record |= dict(after_kernels=draw.randint(1, num_kernels), of_kernels=num_kernels)
            record |= trial_at_launcher(run, record, draw) if "launcher" in target else trial(run, number, record, draw)
            records.append(record)
        problem = run.ends_calmly(calm)
        for record in records:
            record["wrong"] = record["wrong"] or (f"the run's end: {problem}" if problem else "")
            tell(out, harness="signals", **record)
            yield record


def kernels_of_a_start(home, world, options):
    """Number of kernels that a run with these options compiles until its first step is done."""
    run, kernels = Disturbed(home, "cold", world, **options), home / "kernels"
    processes = run.start(env=dict(TRITON_CACHE_DIR=kernels))
    run.wait_for("first step", run.lines, processes)
    num_kernels = len(list(kernels.iterdir()))
    kill_all(processes)
    return num_kernels


def trial(run, number, record, draw):
    """Signal ranks in one phase; returns dict(seconds until all ended, wrong)."""
    phase, lines = record["phase"], run.lines()
    step = last_step(run, "stop") // STEPS_PER_EPOCH * STEPS_PER_EPOCH + STEPS_PER_EPOCH  # last of the next epoch
    site = dict(evaluation="evaluate", generation="generate", saving="save").get(phase)
    fault = f"{site}:{'0' if site == 'save' else 'all'}:{step}:slow" if site else ""
    kernels = run.home / f"kernels{number}"
    env = dict(TRITON_CACHE_DIR=kernels) if phase == COMPILING else {}
    processes = tokenise(run, number) if phase == "tokenising" else run.start(fault, env=env)
    ready = {
        "before the first step": lambda: len(list(run.home.glob("rank*.txt"))) == run.world,
        COMPILING: lambda: len(list(kernels.glob("*"))) >= record["after_kernels"],
        "tokenising": lambda: list(run.home.glob("model_save/tokens/.*.tmp/ids.arrow")),
        "training": lambda: run.lines() > lines + 1,
        "evaluation": lambda: last_step(run, "train") >= step,
        "generation": lambda: last_step(run, "train") >= step,
        "saving": run.in_save,
    }[phase]
    reached = run.wait_for(phase, ready, processes)
    time.sleep(draw.uniform(0, 0.8) if phase == "before the first step" else draw.uniform(0.05, 0.3))
    targets = {"rank 0": processes[:1], "rank 1": processes[1:2]}.get(record["target"], processes)
    sent_at = time.monotonic()
    for repeat in range(record["times"]):
        time.sleep(0.5 * repeat)
        for process in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.Signals[record["signal"]])
    for process in processes:
        process.join(max(sent_at + STOP_SECONDS - time.monotonic(), 0))
    seconds, codes = time.monotonic() - sent_at, [process.exitcode for process in processes]
    kill_all(processes)
    wrong = [] if reached else ["the run ended before the phase"]
    wrong += [f"exit codes {codes}"] if any(codes) else []
    wrong += [] if phase == "tokenising" else stop_problems(run)
    if wrong:
        wrong.append("".join(path.read_text()[-1500:] for path in sorted(run.home.glob("rank*.txt"))))
    return dict(seconds=round(seconds, 2), wrong="; ".join(wrong))


def tokenise(run, number):
    """Processes of another run, whose data are not tokenised yet."""
    other = Disturbed(run.home, f"beside{number}", run.world, **run.options)
    return other.start(train_file="long.jsonl", max_seq_len=33 + number)


def last_step(run, kind):
    """Largest step among the journal's lines of a kind; 0 if there are none."""
    return max((line["step"] for line in journal_lines(run) if line["kind"] == kind), default=0)


def journal_lines(run):
    path = run.dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def stop_problems(run):
    """Problems with the end of a run: its checkpoint must be of every rank's last step, and a signal its reason."""
    samples = [path.read_text().splitlines() for path in run.dir.glob("samples_rank*.jsonl")]
    steps = {json.loads(lines[-1])["step"] if lines else 0 for lines in samples} or {0}
    latest = run.dir / "checkpoints" / "LATEST"
    saved = int(latest.read_text().removeprefix("step_")) if latest.exists() else 0
    problems = [] if steps == {saved} else [f"last steps {steps}, checkpoint of {saved}"]
    finished = any(line["kind"] == "stop" and line["reason"] != "asked" for line in journal_lines(run))
    return [*problems, *["it ended without the signal"] * finished]


def trial_at_launcher(run, record, draw):
    """Signal accelerate's or torch's launcher, or stop the run as a scheduler does."""
    options = run.options | dict(output_dir=run.name, is_keep_training="auto")
    lines, name = run.lines(), draw.choice(("accelerate", "torchrun"))
    process = launch([*launcher(name, run.world), *words(**options)], run.home)
    deadline = time.monotonic() + 120
    before = record["phase"].endswith("before the first step")
    wanted, until = lines + (1 if before else 2), time.monotonic() + draw.uniform(3, 12)
    while run.lines() < wanted and not (before and time.monotonic() > until):
        assert time.monotonic() < deadline and process.poll() is None, (run.home / "launch.txt").read_text()
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    sent_at = time.monotonic()
    if record["phase"] == "scheduled stop":
        record["signal"] = "SIGINT"
        os.killpg(process.pid, signal.SIGINT)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGINT)
    else:
        for repeat in range(record["times"]):
            time.sleep(0.5 * repeat)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.Signals[record["signal"]])
    _, alive = psutil.wait_procs(family, STOP_SECONDS)
    seconds = time.monotonic() - sent_at
    for number in (signal.SIGTERM, signal.SIGKILL) if alive else ():  # as a scheduler does after 30 s
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wrong = [f"{len(alive)} processes still ran after {STOP_SECONDS} s"] if alive else []
    wrong += stop_problems(run)
    if wrong:
        wrong.append((run.home / "launch.txt").read_text()[-3000:])
    return dict(launcher=name, seconds=round(seconds, 2), wrong="; ".join(wrong))


def write(records, world, on_gpus):
    counts = Counter((record["phase"], record["target"]) for record in records)
    rows = []
    for (phase, target), count in counts.items():
        group = [record for record in records if (record["phase"], record["target"]) == (phase, target)]
        passed = sum(not record["wrong"] for record in group)
        rows.append([phase, target, count, passed, f"{max(record['seconds'] for record in group):.1f}"])
    passed = sum(not record["wrong"] for record in records)
    rows.append(["all", "all", len(records), passed, f"{max(record['seconds'] for record in records):.1f}"])
    header = ["phase", "sent to", "trials", "passed", "most seconds to end"]
    note = f"`{typed('bench.signals')}` on {world} processes."
    name, where = ("signals_gpu", " (GPUs)") if on_gpus else ("signals", "")
    write_section(name, f"INT, TERM and USR1, once or twice in a row{where}", header, rows, note)


def kill_runs(home, given):
    """The records of the runs that were killed."""
    options = KILLED | dict(deterministic=given.deterministic, model=given.model, dropout=given.dropout)
    options |= options_of_kind(home, given, given.model)
    worlds, records = [int(world) for world in given.worlds.split(",")], []
    for number in range(given.runs):
        world, draw = worlds[number % len(worlds)], random.Random(given.seed + number)
        record = killed_run(home, f"run{number}", world, draw, given.kills, **options)
        tell(given.out, harness="kills", run=number, seed=given.seed, **record)
        records.append(record)
    device, kind = "gpu" if torch.cuda.is_available() else "cpu", kind_of_runs(given)
    mode = "deterministic" if given.deterministic else "default"
    suffix = f"_lora_{given.base_precision}" if given.lora_rank else "_recorded" * given.recorded
    write_section(
        f"kills_{device}_{mode}{suffix}",
        f"SIGKILL at random moments ({device.upper()}, {mode} mode{', ' * bool(kind)}{kind})",
        ["processes", "runs", "kills", "during a save", "before the first step", "survivor ended after, s (worst)",
         "runs with the undisturbed run's sha256", "runs with each id once"],
        [row(world, [r for r in records if r["world"] == world]) for world in worlds],
        f"`{typed('bench.signals')}`: a run of 120 steps that saves after each step.",
    )  # fmt: skip
    return records


def row(world, records):
    """Cells of the runs on `world` processes."""
    survivors = [seconds for r in records for seconds in r["survivor_seconds"]]
    return [
        world, len(records), *(sum(r[name] for r in records) for name in ("kills", "in_save", "at_start")),
        f"{max(survivors):.1f}" if survivors else "–",
        *(sum(name not in r["wrong"] for r in records) for name in ("sha256", "ids_once")),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
