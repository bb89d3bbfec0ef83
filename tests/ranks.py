"""Start the ranks of a test as real processes, forked from one parent that has imported torch, which takes seconds.

A rank has the environment that a launcher would set and writes stdout and stderr to <folder>/rank<r>.txt. It is killed
if it runs for too long.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from model.runtime import fault_injection
from model.runtime.watchdog import watch_signals

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    codes: list  # exit code of each rank; the negative signal number for a killed one
    text: str  # output of all ranks


def run_ranks(world, function, *args, folder, env=None, seconds=90):
    """Run `function(*args)` on `world` ranks in `folder` and return Ended; its result is the rank's exit code.

    A tuple of folders stands for machines without a shared disk, with one rank in each folder.
    """
    return wait_for(fork_ranks(world, function, *args, folder=folder, env=env), folder, seconds)


def fork_ranks(world, function, *args, folder, env=None):
    """Start the ranks of `run_ranks` and return their processes; a single rank is started as by plain python."""
    port, processes = free_port(), []
    for rank, (place, local_rank) in enumerate(_places(world, folder)):
        launched = dict(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        values = dict(OMP_NUM_THREADS=1) | (launched if world > 1 else {}) | (env or {})
        values = {name: str(value) for name, value in values.items()}
        processes.append(_context().Process(target=_run_rank, args=(rank, place, values, function, args)))
    for process in processes:
        process.start()
    return processes


def _places(world, folder):
    """(Folder, local rank) of each rank."""
    return [(each, 0) for each in folder] if isinstance(folder, tuple) else [(folder, rank) for rank in range(world)]


def wait_for(processes, folder, seconds=90):
    """Wait for ranks and return Ended; after `seconds`, running ones are killed and the test fails."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    hung = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    kill_all(processes)
    places = enumerate(_places(len(processes), folder))
    text = "".join(Path(place, f"rank{rank}.txt").read_text() for rank, (place, _) in places)
    assert not hung, f"ranks {hung} were still running after {seconds} s:\n{text}"
    return Ended([process.exitcode for process in processes], text)


def wait_for_word(word, *paths):
    """Wait until each of the files contains `word`."""
    deadline = time.monotonic() + 60
    while not all(path.exists() and word in path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"no {word} in {paths}"
        time.sleep(0.01)


def kill_all(processes):
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def send(processes, number=signal.SIGINT):
    for process in processes:
        os.kill(process.pid, number)


def launcher(name, world=2):
    """Command that starts train_low_mem.py on `world` ranks; `name` is python, accelerate or torchrun."""
    folder, script = Path(sys.executable).parent, ROOT / "train_low_mem.py"
    return {
        "python": [sys.executable],
        "torchrun": [folder / "torchrun", "--nproc_per_node", world, "--master_port", free_port()],
        "accelerate": [
            folder / "accelerate", "launch", "--multi_gpu", "--num_processes", world, "--main_process_port", free_port()
        ],
    }[name] + [script]  # fmt: skip


def launch(words, folder, env=None):
    """Start a command in `folder` in its own process group, with output to <folder>/launch.txt; returns the Popen."""
    with open(Path(folder, "launch.txt"), "ab") as file:
        return subprocess.Popen(
            [str(word) for word in words], cwd=folder, env=os.environ | dict(OMP_NUM_THREADS="1") | (env or {}),
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def wait_for_launch(process, folder, seconds=120):
    """(exit code, output) of a launched command; after `seconds` its process group is killed and the test fails."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    text = Path(folder, "launch.txt").read_text()
    assert code is not None, f"still running after {seconds} s:\n{text}"
    return code, text


def free_port():
    """A free port below the ephemeral range, so that no outgoing connection takes it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def fork(function, *args):
    """Start `function(*args)` in a process that has imported torch, and return it."""
    process = _context().Process(target=function, args=args)
    process.start()
    return process


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_low_mem", "tests.ranks", "transformers.models.t5.modeling_t5"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # the parent of the ranks does not have pytest's path
        forkserver.ensure_running()
    return context


def _run_rank(rank, folder, env, function, args):
    os.chdir(folder)
    watch_signals()  # as train_low_mem.py does first
    with open(f"rank{rank}.txt", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    importlib.reload(fault_injection)  # read CHAT_FAULT
    sys.exit(function(*args))
