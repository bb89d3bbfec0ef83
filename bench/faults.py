"""Does a run survive an out-of-memory error at any site, on any rank, raised under any of its names?

    python -m bench.faults [--worlds 2,4] [--out FILE]
    python -m bench.faults --disks                     damaged checkpoints and disks instead

There is one run for each number of processes, failing rank and name of the error. In it the error is raised once at
every site: forward, loss, first and later backward, before the reduction, evaluation, generation, the update, a save.
Runs use GPUs if there are any (one per process, NCCL), else the CPU (Gloo). A run must take at most a minute longer
than the undisturbed run and end with the same weights and optimizer state (sha256), each id once per epoch, and the
same steps, losses and learning rates.

--disks: each file of the newest checkpoint has a byte flipped, is truncated or is deleted; the run must say so, resume
from the older checkpoint and end like an undisturbed run. While a run saves after each step, its disk (a small tmpfs)
is filled, its checkpoint directory is made read-only (a bind mount), or its whole directory is deleted; training must
go on, the journal must have the failed saves, earlier checkpoints must stay intact, and the run must end like an
undisturbed run. Rows that need a mount say so where mounting is not allowed.

Both rewrite their table in bench/results/faults.md; exit code 1 if any run failed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.disk_trials import damage_trials, disk_trials
from tests.faulty_runs import RANKS, calm_run, faulty_run, sites_of
from tests.tiny import furnish
from tests.trials import WITH_KERNELS, add_kinds_of_runs, kind_of_runs, options_of_kind, tell, typed, write_section

KINDS = ("real", "oom", "cublas", "cudnn", "nccl", "cpu")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", default="2" if torch.cuda.device_count() else "2,4")
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--ranks", default=",".join(RANKS), help="that fail")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of errors")
    parser.add_argument("--disks", action="store_true")
    add_kinds_of_runs(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = furnish(Path(folder))
        records = disturb_disks(home, given.out) if given.disks else run_out_of_memory(home, given)
    return 1 if any(record["wrong"] for record in records) else 0


def verdict(record):
    return f"no: {record['wrong'][:200]}" if record["wrong"] else "yes"


def disturb_disks(home, out):
    """The records of damaged checkpoints and of disks that fail."""
    records = [*damage_trials(home), *disk_trials(home)]
    for record in records:
        tell(out, harness="disks", **record)
    rows = [[record["trial"], record["said"], verdict(record)] for record in records]
    note = "passed: the run continued or resumed, its sha256 and ids are the undisturbed run's."
    header = ["what happened", "what the run said", "passed"]
    title = "Damaged, full, read-only and deleted disks"
    write_section("disks", title, header, rows, f"`python -m bench.faults --disks`; {note}")
    return records


def run_out_of_memory(home, given):
    """The records of the runs that fail at every site."""
    model, records = WITH_KERNELS["model"] if torch.cuda.device_count() else "shape.json", []
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
    return records


if __name__ == "__main__":
    sys.exit(main())
