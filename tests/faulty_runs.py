"""Runs that fail on purpose: out of memory at every site, SIGKILL at random moments; each compared with a calm run."""

import hashlib
import json
import os
import signal
import time
from itertools import cycle

import torch

from model.run.checkpoint import checkpoint_paths
from tests.ranks import kill_all
from tests.tiny import NUM_PAIRS, ids_by_epoch, journal, train, weights_hash
from tests.trials import WITH_KERNELS, Disturbed, calm_hash

ENDED_SECONDS = 60  # longer than ddp_timeout_s: that long a rank waits for the others to start

STEPS = 12
SITES = dict(
    forward=1, loss=2, backward_first=3, reduce=4, backward=5, evaluate=6, save=7, optimizer=9, update=10, generate=12
)  # {site: step at which it fails}; an epoch's last step may be too small for several micro-batches on each of 8 ranks
RANKS = ("0", "last", "all")
HANG_SECONDS = 60


def options(world, kind_options):
    """Options of a run of STEPS steps; every rank has several micro-batches per step, if `kind_options` let it."""
    batch = max(4 * world, 8)  # so that an epoch has 6 steps at most
    steps_per_epoch = -(-NUM_PAIRS // batch)
    kernels = WITH_KERNELS if torch.cuda.device_count() else dict(dropout=0.1)
    return kernels | dict(
        global_batch_size=batch, epochs=STEPS // steps_per_epoch, micro_batch_tokens=64, save_steps=1,
        bleu_pairs=2 * world, max_new_tokens=4,
    ) | kind_options  # fmt: skip


def calm_run(home, world, kind_options):
    """(run directory, seconds) of the undisturbed run."""
    started = time.monotonic()
    done = train(home, world, output_dir=f"calm{world}", seconds=600, **options(world, kind_options))
    assert done.codes == [0] * world, done.text
    return home / f"calm{world}", time.monotonic() - started


def faulty_run(home, failing, calm, calm_seconds, kind_options):
    """Record of the run in which an error is raised on a rank at every site; `wrong` lists the checks that failed.

    `failing` is (number of processes, rank, kind of error); several kinds, with + between them, take turns.
    """
    world, rank, kind = failing
    name, started = f"faulty{world}_{rank}_{kind}", time.monotonic()
    turns = zip(SITES.items(), cycle(kind.split("+")), strict=False)
    faults = ",".join(f"{site}:{rank}:{step}:{each}" for (site, step), each in turns)
    record = dict(world=world, rank=rank, kind=kind)
    try:
        done = train(
            home, world, faults, output_dir=name, seconds=calm_seconds + HANG_SECONDS, **options(world, kind_options)
        )
    except AssertionError as error:
        return record | dict(sites=[], wrong=f"hung: {error}"[:2000])
    seconds = round(time.monotonic() - started - calm_seconds, 1)
    if done.codes != [0] * world:
        return record | dict(sites=[], seconds=seconds, wrong=f"exit codes {done.codes}: {done.text[-2000:]}")
    sites = fired(home / name)
    expected = set(sites_of(kind_options)) - (set() if rank in ("0", "all") else {"save"})  # only rank 0 saves
    wrong = [f"{check} differs" for check, holds in checks(home / name, calm).items() if not holds]
    wrong += [f"{site} did not fire" for site in expected.difference(sites)]
    return record | dict(sites=sites, seconds=seconds, wrong="; ".join(wrong))


def sites_of(kind_options):
    """The SITES of a run; a captured step has one backward, so none after the first."""
    return [site for site in SITES if site != "backward" or not kind_options.get("compile")]


def checks(run_dir, calm):
    """{name of the check: whether the run equals the undisturbed one in it}."""
    found, expected = (
        [(line["step"], line["loss"], line["learn_rate"]) for line in journal(path, "train")]
        for path in (run_dir, calm)
    )
    ids = ids_by_epoch(run_dir)
    return dict(
        weights=weights_hash(run_dir) == weights_hash(calm),
        optimizer_state=optimizer_hash(run_dir) == optimizer_hash(calm),
        example_ids=ids == ids_by_epoch(calm) and all(mine == list(range(NUM_PAIRS)) for mine in ids.values()),
        steps_losses_and_rates=found == expected and len(found) == STEPS,
    )


def optimizer_hash(run_dir):
    return hashlib.sha256((checkpoint_paths(run_dir)[0] / "optimizer.safetensors").read_bytes()).hexdigest()


def fired(run_dir):
    """Sites at which memory ran out according to the journal, including lines that a later resume undid."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {step: site for site, step in SITES.items()}
    named = [line for line in lines if line["kind"] == "oom" or (line["kind"] == "save" and "error" in line)]
    return [steps.get(line["step"], "?") for line in named]


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
