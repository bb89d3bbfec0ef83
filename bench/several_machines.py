"""Whole runs under real launchers, for bench.several_gpus: backends, two machines without a shared disk.

Each function is the work of one process, prints a JSON line for each result, and returns the exit code. The processes
that it starts belong to its process group, so whoever ends the group ends them too.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

from tests.ranks import free_port, launcher
from tests.tiny import NUM_PAIRS, furnish, ids_by_epoch, journal, weights_hash, words
from tests.trials import WITH_KERNELS, tell

RUN_SECONDS = 200  # of one run, at most
ENDED_SECONDS = 60  # in which the ranks that are left end after a kill
OPTIONS = dict(bleu_pairs=2, max_new_tokens=4, save_steps=1, ddp_timeout_s=45)


def backends(folder, num_gpus):
    """The launcher's usual backend, Gloo where it is asked for, and three processes, which then resume."""
    furnish_in(folder)
    cases = [("two", 2, {}, {}), ("gloo", 2, dict(ACCELERATE_USE_GLOO="1"), {})]
    if num_gpus > 2 or not num_gpus:
        cases += [("three", 3, {}, {}), ("three", 3, {}, dict(is_keep_training=True, epochs=3))]
    for name, world, env, more in cases:
        line = [*launcher("accelerate", world), *words(output_dir=name, **options(num_gpus) | more)]
        started = time.monotonic()
        wrong = failure_of([launch(line, folder, env)], [folder])
        wanted = "nccl" if num_gpus and not env else "gloo"
        begun = journal(folder / name, "start")[-1] if not wrong else {}
        if begun and (begun["world"], begun["backend"]) != (world, wanted):
            wrong = f"{begun['world']} processes on {begun['backend']}"
        wrong = wrong or problem_of_ids([folder / name], more.get("epochs", 2))
        tell(
            case=name, world=world, env=env, resumed=bool(more), backend=begun.get("backend"),
            seconds=round(time.monotonic() - started, 1), wrong=wrong,
        )  # fmt: skip
    return 0


def machines(folder, num_gpus):
    """Two launchers with a folder each: a calm run, then one whose second machine is killed, and which resumes."""
    homes = [folder / "first", folder / "second"]
    for home in homes:
        furnish_in(home)
    processes = max(num_gpus // 2, 1)
    tell(case="calm", world=2 * processes, wrong=failure_of(start_machines(homes, "calm", num_gpus), homes))
    launched = start_machines(homes, "killed", num_gpus)
    reached = wait_until(lambda: lines_of(homes[0] / "killed") > 3, launched)
    end_family(launched[1])
    killed_at = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launched[0].wait(ENDED_SECONDS)
    seconds, ended = time.monotonic() - killed_at, launched[0].poll() is not None
    wrong = "" if ended and reached else "the first machine went on for a minute" if reached else "it never trained"
    end_family(launched[0])
    tell(case="kill of a machine", seconds=round(seconds, 1), wrong=wrong)
    wrong = failure_of(start_machines(homes, "killed", num_gpus), homes)
    if not wrong and weights_hash(homes[0] / "killed") != weights_hash(homes[0] / "calm"):
        wrong = "other weights than those of the calm run"
    wrong = wrong or problem_of_ids([home / "killed" for home in homes], 4)
    tell(case="resumed", wrong=wrong)
    return 0


def start_machines(homes, name, num_gpus):
    """The launchers of a run on two machines; each sees its half of the GPUs."""
    port, each, launched = free_port(), max(num_gpus // 2, 1), []
    for rank, home in enumerate(homes):
        line = [
            launcher("accelerate")[0], "launch", "--multi_gpu", "--num_machines", 2, "--num_processes", 2 * each,
            "--machine_rank", rank, "--main_process_ip", "127.0.0.1", "--main_process_port", port,
            launcher("python")[1],
            *words(output_dir=name, is_keep_training="auto", **options(num_gpus) | dict(epochs=4)),
        ]  # fmt: skip
        gpus = ",".join(str(rank * each + place) for place in range(each))
        launched.append(launch(line, home, dict(CUDA_VISIBLE_DEVICES=gpus) if num_gpus else {}))
    return launched


def options(num_gpus):
    return OPTIONS | (WITH_KERNELS if num_gpus else {})


def furnish_in(folder):
    folder.mkdir(parents=True)
    furnish(folder)


def launch(line, folder, env):
    """Start a command in `folder`, in this process's group, with output to <folder>/launch.txt; returns the Popen."""
    with open(folder / "launch.txt", "ab") as file:
        return subprocess.Popen(
            [str(word) for word in line], cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | dict(OMP_NUM_THREADS="1") | env,
        )  # fmt: skip


def failure_of(launched, folders):
    """Wait for launchers; "" if all succeeded, else the exit codes and the end of their output."""
    deadline = time.monotonic() + RUN_SECONDS
    for process in launched:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
    codes = [process.poll() for process in launched]
    for process in launched:
        end_family(process)
    said = "".join(Path(folder, "launch.txt").read_text()[-1000:] for folder in folders)
    return "" if not any(code != 0 for code in codes) else f"exit codes {codes}: {said}"


def end_family(process):
    """Kill a launcher and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (family := psutil.Process(process.pid)).children(recursive=True) + [family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def wait_until(ready, launched):
    """True once `ready()` holds; False if a launcher ends first or nothing happens for RUN_SECONDS."""
    deadline = time.monotonic() + RUN_SECONDS
    while not ready():
        if time.monotonic() > deadline or any(process.poll() is not None for process in launched):
            return False
        time.sleep(0.01)
    return True


def lines_of(run_dir):
    """Number of train lines in a run's journal."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b'"kind":"train"') if path.exists() else 0


def problem_of_ids(run_dirs, epochs):
    """ "" if each example came once an epoch, on all machines together; else the ids."""
    together = {}
    for run_dir in run_dirs:
        for epoch, ids in ids_by_epoch(run_dir).items():
            together.setdefault(epoch, []).extend(ids)
    wanted = {epoch: list(range(NUM_PAIRS)) for epoch in range(1, epochs + 1)}
    return "" if {epoch: sorted(ids) for epoch, ids in together.items()} == wanted else f"wrong examples: {together}"


def starts(folder, num_gpus, times=3, world=8):
    """Runs of eight processes, on as many GPUs or on CPUs, each in a directory without token store, logs or run."""
    on_gpus = num_gpus >= world
    more, env = (WITH_KERNELS, {}) if on_gpus else ({}, dict(CUDA_VISIBLE_DEVICES=""))
    for number in range(times):
        home, started = folder / str(number), time.monotonic()
        furnish_in(home)
        line = [*launcher("accelerate", world), *words(output_dir="run", epochs=1, save_steps=1000, **more)]
        wrong = failure_of([launch(line, home, env)], [home])
        wrong = wrong or problem_of_ids([home / "run"], 1)
        tell(case="start", number=number, world=world, seconds=round(time.monotonic() - started, 1), wrong=wrong)
    return 0


CHILDREN = dict(backends=backends, machines=machines, starts=starts)
