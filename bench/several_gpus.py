"""Several GPUs: how speed grows with them, and whether runs on them keep their promises; on CPUs a rehearsal.

    python -m bench.several_gpus [--parts scaling,backends,machines,equal,recorded,faults,kills,signals,starts,
        whole_1.7b,whole_4b,lora_7b] [--minutes 9] [--gpus 4 | --rehearse]
        [--models small,chatlm] [--optimizers muon,adamw_rms] [--pairs 64,256] [--worlds 1,2,4] [--folder DIR]

Parts: `scaling` times a step (bench.votes) with so many pairs on each GPU; `backends` runs accelerate's launcher with
NCCL, with Gloo (ACCELERATE_USE_GLOO=1) and with three processes; `machines` trains under two launchers with a folder
each, kills one and resumes; `equal` trains with one global batch on each number of GPUs, a job for each objective
(bench.equal_losses); `faults` and `signals` are those benchmarks, and so are `recorded`, faults in captured steps, and
`kills`, signals with --kills; `starts` starts eight processes in an empty directory three times, on CPUs where there
are fewer GPUs; `whole_1.7b`, `whole_4b` and `lora_7b` are bench.whole_networks on each number of GPUs. Each job is a
process with its own group and time limit. Its results are printed when it ends. The folder, $OUT if that is set, gets
results.jsonl, table.md, faults.md and a log of each job, which is written while it runs. A cell of fewer processes than
GPUs is timed on all GPUs at once, and the slowest counts: GPUs at their power limit differ by some percent, and the
slowest sets the pace of all. With --alone the first GPUs time it alone. Exit code 1 if a job failed or a result is
wrong; a scaling below its bar is told, and is no failure.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from bench.children import Job, run_jobs
from bench.corpus import write_corpus
from bench.equal_losses import OBJECTIVES, equal
from bench.several_machines import CHILDREN as MACHINES
from tests.trials import hardware

WHOLE = dict(zip(("whole_1.7b", "whole_4b", "lora_7b"), ("1.7b", "4b", "lora-7b"), strict=True))
PARTS = ("scaling", "backends", "machines", "equal", "recorded", "faults", "kills", "signals", "starts", *WHOLE)
CHILDREN = MACHINES | {f"equal-{objective}": partial(equal, objective) for objective in OBJECTIVES}
BARS = {(256, 2): 1.93, (256, 4): 3.8, (256, 8): 7.5, (64, 2): 1.8, (64, 4): 3.5, (64, 8): 6.8}  # times one GPU
LIMIT_SECONDS = dict(
    scaling=240, backends=150, machines=200, equal=240, recorded=200, faults=300, kills=300, signals=420, starts=200
) | {"whole_1.7b": 480, "whole_4b": 900, "lora_7b": 480}  # fmt: skip
REHEARSAL_SECONDS = 600  # of a job; processes share few cores
# The benchmarks that are parts; GPUs compute equal bits only with --deterministic and without dropout.
ON_GPUS = dict(
    recorded=["bench.faults", "--recorded", "--kinds", "real,nccl"],
    faults=["bench.faults"],
    kills=["bench.signals", "--kills", 2, "--runs", 4, "--deterministic", "--recorded"],
    signals=["bench.signals", "--trials", 21, "--launcher", 3],
)
REHEARSED = dict(
    recorded=["bench.faults", "--ranks", "0", "--kinds", "nccl"],
    faults=["bench.faults", "--kinds", "oom"],
    kills=["bench.signals", "--kills", 1, "--runs", 1],
    signals=["bench.signals", "--trials", 4, "--launcher", 1],
)
STEPS = ["--warm_steps", 20, "--steps", 60, "--rounds", 1]
REHEARSED_STEPS = ["--warm_steps", 2, "--steps", 4, "--rounds", 1]


def main():
    given, options = arguments()
    if given.child:
        return CHILDREN[given.child](Path(given.folder), given.num_gpus)
    folder = Path(given.folder or os.environ.get("OUT") or tempfile.mkdtemp()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{hardware()}: {'' if given.num_gpus else 'a rehearsal on CPU processes, '}results in {folder}", flush=True)
    deadline, results, problems = time.time() + 60 * given.minutes, [], 0
    for part in given.parts.split(","):
        for jobs, slots in scaling(given, options, folder) if part == "scaling" else [others(part, given, folder)]:
            for done in run_jobs(jobs, folder / "logs", slots, deadline - time.time()):
                found = results_of(part, done)
                problems += any(result["wrong"] for result in found)
                results += found
                tell(folder, found, results)
    print((folder / "table.md").read_text())
    return 1 if problems else 0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=60, help="jobs that are unfinished by then are stopped")
    parser.add_argument("--gpus", type=int, default=8, help="at most so many; 0: a rehearsal")
    parser.add_argument("--rehearse", dest="gpus", action="store_const", const=0, help="on CPU processes")
    parser.add_argument("--models", default="")
    parser.add_argument("--optimizers", default="muon,adamw_rms")
    parser.add_argument("--pairs", default="", help="on each GPU")
    parser.add_argument("--worlds", default="", help="numbers of processes")
    parser.add_argument("--alone", action="store_true", help="time a cell on its GPUs alone")
    parser.add_argument("--folder", default="")
    parser.add_argument("--child", default="", choices=["", *CHILDREN], help=argparse.SUPPRESS)
    given, options = parser.parse_known_args()
    if unknown := set(given.parts.split(",")) - set(PARTS):
        parser.error(f"--parts={given.parts}: {', '.join(sorted(unknown))} is unknown; choose from {', '.join(PARTS)}")
    given.num_gpus = take_gpus(given.gpus)
    given.models = given.models or ("small,chatlm" if given.num_gpus else "tiny")
    given.pairs = given.pairs or ("64,256" if given.num_gpus else "4")
    sizes = [world for world in (1, 2, 4, 8) if world <= (given.num_gpus or 2)]
    given.worlds = [int(world) for world in given.worlds.split(",") if world] or sizes
    return given, options


def scaling(given, options, folder):
    """Yield (jobs of one model and number of processes, one for each group of GPUs, and these groups)."""
    write_corpus(folder / "corpus", 51_200 if given.num_gpus else 600)
    for world in given.worlds:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", world]
        words += ["-m", "bench.votes", "--corpus", folder / "corpus", *(STEPS if given.num_gpus else REHEARSED_STEPS)]
        words += ["--pairs", given.pairs, "--optimizers", given.optimizers, *options]
        groups, limit = gpus_of(world, given), limit_of("scaling", given)
        for model in given.models.split(","):
            yield [Job(f"{model}/{world}/{n}", [*words, "--model", model], limit) for n in range(len(groups))], groups


def gpus_of(world, given):
    """An environment for each group of `world` GPUs that may be used at a time."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(given.num_gpus)))
    gpus = [gpu for gpu in visible.split(",") if gpu]
    groups = [gpus[start : start + world] for start in range(0, len(gpus) - world + 1, world)]
    return [dict(CUDA_VISIBLE_DEVICES=",".join(group)) for group in groups[: 1 if given.alone else None]] or [{}]


def take_gpus(most):
    """Number of the GPUs that this process and its jobs use; from now on they see no others."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:most])
    return min(count, most)


def others(part, given, folder):
    """([Job] of a part whose jobs use all GPUs, the environment of each that may run at a time)."""
    names = [name for name in CHILDREN if name == part or name.startswith(f"{part}-")] or [part]
    env, limit = dict(FAULTS_PAGE=str(folder / "faults.md")), limit_of(part, given)
    jobs = [Job(name, [sys.executable, "-m", *words_of(name, given)], limit, env) for name in names]
    return jobs, [{}] * (len(jobs) if given.num_gpus else 1)  # those of `equal` are hardly at work on GPUs


def words_of(name, given):
    """The module and the words of a job; what is large is written beside the results' folder, which others may copy."""
    worlds, work = ",".join(map(str, given.worlds)), Path(tempfile.mkdtemp()) / name
    if name in CHILDREN:
        return ["bench.several_gpus", "--child", name, "--folder", work]
    if name in WHOLE:
        own = ["--network", WHOLE[name], "--worlds", worlds, "--steps", 40, "--unsaved", "--folder", work]
        return ["bench.whole_networks", *own, *["--rehearse"] * (not given.num_gpus)]
    several = worlds.removeprefix("1,") if name == "kills" else max(2, *given.worlds)
    return [*(ON_GPUS if given.num_gpus else REHEARSED)[name], "--worlds", several]


def limit_of(part, given):
    """Seconds that one job of a part may take."""
    return LIMIT_SECONDS[part] if given.num_gpus else REHEARSAL_SECONDS


def results_of(part, done):
    """The JSON lines that a job printed, and one for the job; each has `part`, `job` and `wrong`, "" if it is right."""
    lines = [json.loads(line) for line in done.text.splitlines() if line.startswith('{"')]
    results = [dict(part=part, job=done.job.name, **line) | dict(wrong=line.get("wrong") or "") for line in lines]
    problem = done.problem and f"{done.problem}: {done.text[-300:]}"
    return [*results, dict(part=part, job=done.job.name, seconds=round(done.seconds, 1), wrong=problem, is_end=True)]


def tell(folder, found, results):
    """Print the new results, append them to results.jsonl, and write the table of all."""
    with open(folder / "results.jsonl", "a") as file:
        for result in found:
            print(json.dumps(result), flush=True)
            print(json.dumps(result), file=file)
    (folder / "table.md").write_text(
        "\n".join([*scaling_table(results), "", *whole_table(results), "", *parts_table(results)]) + "\n"
    )


def scaling_table(results):
    """Markdown lines: each timed cell beside the same on one GPU, of several groups of GPUs the slowest."""
    cells = [((r["world"], r["model"], r["optimizer"], r["pairs"]), r) for r in results if "exchange_ms" in r]
    timed = dict(sorted(cells, key=lambda cell: (cell[0], -cell[1]["tokens_per_second"])))  # the slowest comes last
    yield "| model | optimizer | pairs each | ranks | step, ms | real tokens/s | times one | bar | sum, ms | vote, ms |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for (world, *kind), r in timed.items():
        one = timed.get((1, *kind))
        speed = r["tokens_per_second"]
        times = f"{speed / one['tokens_per_second']:.2f}" if one else "–"
        cells = (*kind, world, f"{r['step_ms']:.2f}", f"{speed:,}", times)
        cells += (BARS.get((r["pairs"], world), "–"), f"{r['exchange_ms']:.2f}", f"{r['vote_ms']:.2f}")
        yield "| " + " | ".join(map(str, cells)) + " |"


def whole_table(results):
    """Markdown lines: the cases of bench.whole_networks."""
    names = "network", "case", "cards", "peak_gib", "predicted_gib", "step_ms", "tokens_per_second", "times_one", "bar"
    yield f"| {' | '.join(name.replace('_', ' ') for name in names)} |"
    yield "| --- " * len(names) + "|"
    for result in (r for r in results if "peak_gib" in r):
        yield f"| {' | '.join(str(result[name]) for name in names)} |"


def parts_table(results):
    """Markdown lines: what each job but a timed one found."""
    yield "| part | job | results | wrong | seconds |"
    yield "| --- | --- | --- | --- | --- |"
    for end in (r for r in results if r.get("is_end")):
        own = [r for r in results if r["part"] == end["part"] and r["job"] == end["job"] and r is not end]
        wrong = "; ".join(r["wrong"].replace("\n", " ")[:160] for r in (*own, end) if r["wrong"])
        if end["part"] != "scaling" or wrong:
            yield f"| {end['part']} | {end['job']} | {len(own)} | {wrong or 'none'} | {end['seconds']} |"


if __name__ == "__main__":
    sys.exit(main())
