"""Does a run survive an out-of-memory error at any site, on any rank, raised under any of its names?

    python -m bench.faults [--worlds 2,4] [--out FILE]

There is one run for each number of processes, failing rank and name of the error. In it the error is raised once at
every site: forward, loss, first and later backward, before the reduction, evaluation, generation, the update, a save.
Runs use GPUs if there are any (one per process, NCCL), else the CPU (Gloo). A run must take at most a minute longer
than the undisturbed run and end with the same weights and optimizer state (sha256), each id once per epoch, and the
same steps, losses and learning rates. Rewrites the table in docs/faults.md; exit code 1 if any run failed.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from model.run.checkpoint import checkpoint_paths
from tests.tiny import NUM_PAIRS, furnish, ids_by_epoch, journal, train, weights_hash
from tests.trials import (
    WITH_KERNELS,
    add_kinds_of_runs,
    kind_of_runs,
    options_of_kind,
    tell,
    typed,
    write_section,
)

STEPS = 12
SITES = dict(
    forward=1, loss=2, backward_first=3, backward=4, reduce=5, evaluate=6, save=7, optimizer=9, update=10, generate=12
)  # {site: step at which it fails}
RANKS, KINDS = ("0", "last", "all"), ("real", "oom", "cublas", "cudnn", "nccl", "cpu")
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

    `failing` is (number of processes, rank, kind of error).
    """
    world, rank, kind = failing
    name, started = f"faulty{world}_{rank}_{kind}", time.monotonic()
    faults = ",".join(f"{site}:{rank}:{step}:{kind}" for site, step in SITES.items())
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
    """The SITES of a run; a recorded step has one backward, so none after the first."""
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


def verdict(record):
    return f"no: {record['wrong'][:200]}" if record["wrong"] else "yes"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", default="2" if torch.cuda.device_count() else "2,4")
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--ranks", default=",".join(RANKS), help="that fail")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of errors")
    add_kinds_of_runs(parser)
    given = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder))
        model = WITH_KERNELS["model"] if torch.cuda.device_count() else "shape.json"
        kind_options = options_of_kind(home, given, model)
        for world in map(int, given.worlds.split(",")):
            calm = calm_run(home, world, kind_options)
            for rank in given.ranks.split(","):
                for kind in given.kinds.split(","):
                    records.append(faulty_run(home, (world, rank, kind), *calm, kind_options))
                    tell(given.out, harness="faults", **records[-1])
    rows = [
        [*(r[name] for name in ("world", "rank", "kind")), len(r["sites"]), r.get("seconds", "–"), verdict(r)]
        for r in records
    ]
    run_kind = ", " * bool(kind_of_runs(given)) + kind_of_runs(given)
    library = "NCCL" if torch.cuda.device_count() else "Gloo"
    where = "GPU" if library == "NCCL" and given.worlds == "1" else library
    note = f"`{typed('bench.faults')}`: each run fails once at each of {', '.join(sites_of(kind_options))}."
    section = "matrix_" + (library + run_kind).lower().replace(", ", "_").replace(" ", "_")
    header = ["processes", "on rank", "error", "times", "seconds over the undisturbed run", "passed"]
    write_section(section, f"Out of memory at every site ({where}{run_kind})", header, rows, note)
    return 1 if any(record["wrong"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
