"""Run jobs as child processes, each with its own time limit, a fixed number at a time."""

import math
import os
import queue
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    name: str
    words: list  # the command line
    limit_seconds: float
    env: dict = field(default_factory=dict)
    folder: Path = ROOT  # working directory


@dataclass(frozen=True)
class Done:
    job: Job
    problem: str  # empty if the job succeeded
    seconds: float
    text: str  # stdout and stderr


def gpu_slots(num_gpus, together=1):
    """One environment per concurrent job: `together` jobs on each GPU, or one job on the CPU if there are 0 GPUs."""
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    gpus = visible or [str(i) for i in range(num_gpus)]
    return [dict(CUDA_VISIBLE_DEVICES=gpu) for _ in range(together) for gpu in gpus[:num_gpus]] or [{}]


def run_jobs(jobs, logs_dir, slots, total_seconds=math.inf):
    """Yield Done for each job as it ends. `slots` are the environments; each runs one job at a time.

    After `total_seconds` running jobs are killed and waiting jobs are not started.
    """
    deadline = time.time() + total_seconds
    Path(logs_dir).mkdir(parents=True, exist_ok=True)
    free = queue.Queue()
    for slot in slots:
        free.put(slot)

    def work(job):
        slot = free.get()
        try:
            left = replace(job, limit_seconds=min(job.limit_seconds, deadline - time.time()))
            return run_job(left, Path(logs_dir) / f"{job.name.replace('/', '_')}.log", slot)
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(slots)) as pool:
        for future in as_completed([pool.submit(work, job) for job in jobs]):
            yield future.result()


def run_job(job, log, slot):
    """Run one job and return its Done; at its time limit the job and all its children are killed."""
    if job.limit_seconds <= 0:
        return Done(job, "not started: no time left", 0.0, "")
    started = time.time()
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | slot | job.env | dict(PYTHONPATH=paths, PYTHONUNBUFFERED="1", STARTED_AT=str(started))
    with open(log, "wb") as file:
        process = subprocess.Popen(
            list(map(str, job.words)), cwd=job.folder, env=env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(job.limit_seconds)
        problem = "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"not done after {job.limit_seconds:.0f} s"
        for child in psutil.Process(process.pid).children(recursive=True):  # some lead a process group of their own
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):  # kills what is still running, for example compile workers
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    text = log.read_text(errors="replace")
    return Done(job, problem, time.time() - started, text)
