"""Check in child processes, with a time limit, that NCCL can all-reduce between this machine's GPUs.

A process reads NCCL's variables once, so each remedy is tried in fresh processes, before the run's own processes join
their group. The verdict is stored in FOLDER; after a reboot or a change of the installation the check runs again.
"""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from glob import glob
from pathlib import Path

from model.runtime.atomic_io import open_own, write_file
from model.runtime.module_process import start_module
from model.runtime.peers import awake_seconds

FOLDER = "model_save/preflight"
REMEDIES = (  # in this order, then Gloo
    {},
    {"NCCL_CUMEM_HOST_ENABLE": "0"},  # NCCL >= 2.26 on asymmetric NUMA: NVIDIA/nccl issue 2190
    {"NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_SHM_DISABLE": "1"},  # a small or closed /dev/shm
)
IMPORT_SECONDS, ANSWER_SECONDS = 120, 30  # time limits: for importing torch, and for the all-reduce after it


@dataclass(frozen=True)
class Verdict:
    """Which backend works on this machine."""

    backend: str  # nccl or gloo
    env: dict  # environment variables that it needs
    failures: list  # what failed before, one line per attempt
    seconds: float  # duration of the check


def preflight(num_gpus, stop, folder=FOLDER):
    """(Verdict for this machine's first `num_gpus` GPUs, path where it is stored); one rank checks, the others wait.

    Raises KeyboardInterrupt and stores nothing if `stop()` is true after the check: the signal that asked for the stop
    may have killed the children.
    """
    path = Path(folder) / f"{_fingerprint(num_gpus)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks wait here, then read what the first one stored
        verdict = _read_verdict(path)
        if verdict is None:
            verdict = find_backend(num_gpus)
            if stop():
                raise KeyboardInterrupt
            write_file(path, json.dumps(asdict(verdict)).encode())
    return verdict, path


def _read_verdict(path):
    """The stored Verdict; None if there is none that can be read."""
    try:
        return Verdict(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find_backend(world_size, backend="nccl", seconds=ANSWER_SECONDS):
    """Verdict of the first attempt that works: `backend` with each of REMEDIES in order; Gloo if all fail."""
    started, failures, tried = time.monotonic(), [], []
    for env in REMEDIES:
        changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
        if changed in tried:
            continue
        tried.append(changed)
        problem = try_backend(backend, world_size, changed, len(tried), seconds)
        if not problem:
            return Verdict(backend, changed, failures, time.monotonic() - started)
        failures.append(f"{in_words(backend, changed)} failed: {problem}")
        print(f"preflight: {failures[-1]}", file=sys.stderr, flush=True)
    return Verdict("gloo", {}, failures, time.monotonic() - started)


def in_words(backend, env):
    """A backend and its environment variables as text, as in "NCCL NCCL_SHM_DISABLE=1"."""
    return " ".join([dict(nccl="NCCL", gloo="Gloo")[backend], *(f"{name}={value}" for name, value in env.items())])


def try_backend(backend, world_size, env=None, attempt=1, seconds=ANSWER_SECONDS):
    """All-reduce between `world_size` child processes, one per GPU with nccl; returns what failed, "" if it worked.

    `attempt` is the step of the fault site preflight; the all-reduce may take `seconds` after all have imported torch.
    """
    drop = ("TORCHELASTIC_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    base |= {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"} | (env or {})
    with tempfile.TemporaryDirectory(prefix="preflight_") as folder:
        children = []
        for rank in range(world_size):
            with open(Path(folder, f"{rank}.txt"), "wb") as file:
                words = "model.runtime.nccl_check", backend, folder, attempt
                pipes = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
                children.append(start_module(*words, env=base | {"RANK": str(rank)}, **pipes))
        try:
            return _wait_for(children, Path(folder), seconds)
        finally:
            for child in children:
                child.kill()
                child.wait()


def _wait_for(children, folder, seconds):
    """What failed in `children`, whose output is in `folder`; "" when all have succeeded."""
    deadline, ready = awake_seconds() + IMPORT_SECONDS, False
    while awake_seconds() < deadline:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code:
                lines = (folder / f"{rank}.txt").read_text(errors="replace").strip().splitlines()
                return f"rank {rank} ended with code {code}: {lines[-1][:300] if lines else 'no output'}"
        if None not in codes:
            return ""
        if not ready and len(list(folder.glob("ready*"))) == len(children):
            ready, deadline = True, awake_seconds() + seconds
        time.sleep(0.05)
    return f"no answer within {seconds if ready else IMPORT_SECONDS} s"


def _all_reduce(backend, folder, attempt):
    """Body of a child: join the other children and sum a one from each; raises if anything fails."""
    signal.alarm(IMPORT_SECONDS + ANSWER_SECONDS)  # ends this child if its parent was killed
    import torch
    import torch.distributed as dist

    from model.runtime import fault_injection

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder, f"ready{rank}").touch()
    fault_injection.fire("preflight", attempt)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    store = dist.FileStore(f"{folder}/store", world_size)
    limit = timedelta(seconds=ANSWER_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if ones.item() != world_size:
        raise RuntimeError(f"the sum of {world_size} ones came back as {ones.item()}")
    dist.destroy_process_group()


def _fingerprint(num_gpus):
    """Hash of all that the verdict depends on: machine, boot, driver, GPUs, torch version, environment variables."""
    import torch

    places = (
        "/proc/sys/kernel/random/boot_id",
        "/proc/driver/nvidia/version",
        *glob("/proc/driver/nvidia/gpus/*/info*"),
    )
    texts = [Path(place).read_text(errors="replace") for place in sorted(places) if Path(place).exists()]
    names = ("NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_")
    variables = sorted(item for item in os.environ.items() if item[0].startswith(names))
    return hashlib.sha256(repr((os.uname(), torch.__version__, num_gpus, texts, variables)).encode()).hexdigest()[:16]


if __name__ == "__main__":
    _all_reduce(sys.argv[1], sys.argv[2], int(sys.argv[3]))
