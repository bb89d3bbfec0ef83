"""The only user of accelerate, with exchange.py of torch.distributed: start, agree, sums, and votes on a CPU group."""

import functools
import gc
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import ujson

from model.runtime.device_memory import check_allocator
from model.runtime.laps import lap
from model.runtime.launch import check_launch, must_use_cpu
from model.runtime.nccl_check import in_words, preflight
from model.runtime.peers import DEAD_SECONDS
from model.runtime.watchdog import collective, leave_ranks, stop_asked, time_limit, untimed, watch_ranks

NO_TIME_OUT = timedelta(days=7)  # torch's own time-outs would count a suspension; the watchdog ends a hung rank


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes of the run, its device and its process groups."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str  # nccl, gloo or none
    cpu_group: object = field(repr=False)  # Gloo process group for CPU tensors; None if world_size is 1

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def is_local_main(self):
        return self.local_rank == 0


ALONE = Ranks(0, 1, 0, torch.device("cpu"), "none", None)  # one process that computes on the CPU


def from_main_before_joining(timeout_s, function, *args):
    """`from_main` for use before start_ranks: runs `function(*args)` on rank 0, returns or raises the same everywhere.

    Needs no process group: the ranks use the store at MASTER_ADDR:MASTER_PORT, through which they join later. The
    process ends if not all ranks connect within `timeout_s` seconds.
    """
    check_launch()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return function(*args)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with time_limit(timeout_s, f"not all processes came within --ddp_timeout_s={timeout_s}"):
        store = _rendezvous_store()
        if rank == 0:
            store.set("result", ujson.dumps(_outcome(function, *args)))
        kind, value = ujson.loads(store.get("result"))
        store.set(f"received/{rank}", "")
        if rank == 0:  # it may host the store, so it must not leave first
            store.wait([f"received/{other}" for other in range(world_size)])
    return _value_of(kind, value)


@functools.cache
def _rendezvous_store():
    """The launcher's store; kept for the life of the process, because the ranks join through the same one."""
    store, *_ = next(dist.rendezvous("env://", timeout=NO_TIME_OUT))
    return dist.PrefixStore(f"from_main/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def start_ranks(backend="auto", timeout_s=600):
    """Join the process group that the launcher set up and return this process's Ranks; a single rank without launcher.

    Raises ValueError for a launch that cannot work, RuntimeError if the group differs from what the launcher announced.
    """
    lap("imports")
    gc.freeze()  # what the imports made stays: no later collection looks through it
    check_launch()
    on_cpu = must_use_cpu()
    if on_cpu and backend == "nccl":
        raise ValueError("--backend=nccl needs GPUs and there are none here: leave it out")
    # Whether NCCL fails without this depends on the NUMA node that a process starts on: one check cannot rule it out.
    os.environ.setdefault("NCCL_CUMEM_HOST_ENABLE", "0")
    gloo = on_cpu or backend == "gloo" or os.environ.get("ACCELERATE_USE_GLOO") == "1"
    gloo = gloo or _nccl_fails(backend)
    backend, launched = "gloo" if gloo else "nccl", "WORLD_SIZE" in os.environ
    # Our time-out: its message is clearer, and torch may wait 50 % longer for a rank 0 that has died.
    limit = time_limit(timeout_s, f"not all processes came within --ddp_timeout_s={timeout_s}")
    with limit if launched else nullcontext():
        ranks = _join(backend if launched else None, on_cpu)
        store = _store_on_main(ranks) if ranks.cpu_group is not None else None
    if store is not None:
        watch_ranks(store, ranks.rank, ranks.world_size, timeout_s)
    lap("device")
    return ranks


def _join(backend, on_cpu):
    """Ranks of the group that the launcher set up; a single rank if `backend` is None."""
    place = _place_in_group(backend, on_cpu) if backend else (0, 1, 0, torch.device("cpu" if on_cpu else "cuda:0"))
    _, num_processes, _, device = place
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced != num_processes:
        raise RuntimeError(
            f"the launcher announced {announced} processes and this group has {num_processes}: start them again"
        )
    if device.type == "cuda":
        check_allocator(torch.cuda.get_allocator_backend())
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # CUDA graphs cannot be captured on the default stream
    if num_processes == 1:
        return Ranks(*place, "none", cpu_group=None)
    return Ranks(*place, dist.get_backend(), dist.new_group(backend="gloo", timeout=NO_TIME_OUT))


def _place_in_group(backend, on_cpu):
    """(rank, world size, local rank, device) of this process in the group that accelerate joins."""
    from accelerate import Accelerator, InitProcessGroupKwargs  # imported here: a process by itself does not need it

    handlers = [InitProcessGroupKwargs(backend=backend, timeout=NO_TIME_OUT)]
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=handlers)
    device = accelerator.device
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # a group of one has no index
    return accelerator.process_index, accelerator.num_processes, accelerator.local_process_index, device


def _store_on_main(ranks):
    """Key-value store for heartbeats, hosted by rank 0; each rank has an empty heartbeat in it from the start."""
    host, time_out = os.environ["MASTER_ADDR"], timedelta(seconds=DEAD_SECONDS)
    store = None
    if ranks.is_main:
        store = dist.TCPStore(host, 0, is_master=True, timeout=time_out, wait_for_workers=False)
        for rank in range(ranks.world_size):
            store.set(str(rank), "{}")
    port = gather_json(ranks, store.port if store else 0)[0]
    return store or dist.TCPStore(host, port, is_master=False, timeout=time_out)


def _nccl_fails(backend):
    """True if NCCL fails between this machine's GPUs and Gloo must replace it; sets the variables that NCCL needs.

    Raises RuntimeError if `backend` is nccl and NCCL fails with every remedy.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE", "1") != str(world_size):
        return False  # a single rank, or several machines, which this one cannot check
    verdict, path = preflight(world_size, stop_asked)
    os.environ.update(verdict.env)
    if verdict.failures and backend == "nccl" != verdict.backend:
        raise RuntimeError("NCCL does not work here: leave --backend=nccl out\n  " + "\n  ".join(verdict.failures))
    if verdict.failures and os.environ.get("LOCAL_RANK") == "0":
        chosen = in_words(verdict.backend, verdict.env)
        print(f"preflight: {chosen} is used; delete {path} to try the others again", file=sys.stderr, flush=True)
    return verdict.backend == "gloo"


def vote(ranks, *numbers):
    """Maximum of each integer over all ranks, as a list; uses the CPU group."""
    votes = torch.tensor(numbers, dtype=torch.int64)
    if ranks.cpu_group is not None:
        with collective("a vote"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=ranks.cpu_group)
    return votes.tolist()


def sum_over_ranks(ranks, tensor):
    """Sum `tensor` over all ranks in place, with the backend of its device; returns it."""
    if ranks.world_size > 1:
        with collective("a sum over ranks"):
            dist.all_reduce(tensor)
    return tensor


def broadcast(ranks, tensors, source=0):
    """Copy the values of `tensors` on rank `source` to all ranks, in place."""
    if ranks.world_size > 1:
        with collective("a broadcast"):
            for tensor in tensors:
                dist.broadcast(tensor, source)


def gather_json(ranks, value):
    """List of every rank's `value` (JSON types) in rank order, on every rank."""
    if ranks.cpu_group is None:
        return [value]
    data = torch.frombuffer(bytearray(ujson.dumps(value).encode()), dtype=torch.uint8)
    (longest,) = vote(ranks, len(data))
    padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in range(ranks.world_size)]
    with collective("a gather of values"):
        dist.all_gather(parts, padded, group=ranks.cpu_group)
    return [ujson.loads(bytes(part.tolist()).decode()) for part in parts]


def from_main(ranks, function, *args):
    """Run `function(*args)` on rank 0; all ranks return its result (JSON types) or raise its Value- or RuntimeError."""
    return _value_of(*gather_json(ranks, _outcome(function, *args) if ranks.is_main else None)[0])


def _outcome(function, *args):
    """("value", result of `function(*args)`) or (name of its error, message), as JSON types."""
    try:
        return "value", function(*args)
    except (ValueError, RuntimeError) as error:
        return ("RuntimeError" if isinstance(error, RuntimeError) else "ValueError"), str(error)


def _value_of(kind, value):
    """The value of an `_outcome`; raises if it is an error."""
    if kind != "value":
        raise (RuntimeError if kind == "RuntimeError" else ValueError)(value)
    return value


def local_main_first(ranks, function):
    """Run `function()` on each machine's main rank, without a time limit, then on the machine's other ranks.

    Returns this rank's own result. An error or a KeyboardInterrupt on any main rank is raised on all ranks.
    """
    value, error = None, None
    if ranks.is_local_main:
        try:
            with untimed("building what the other ranks wait for"):
                value = function()
        except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as caught:
            error = caught
    outcomes = (None, KeyboardInterrupt, ValueError, RuntimeError)
    mine = next((i for i, kind in enumerate(outcomes) if kind and isinstance(error, kind)), 3) if error else 0
    (worst,) = vote(ranks, mine)
    if error or worst:
        raise error or outcomes[worst]("the main rank of this or another machine failed: see its message")
    return value if ranks.is_local_main else function()


def agree(ranks, what, value):
    """Raise RuntimeError, with each rank's value, unless `value` (JSON types) is equal on all ranks.

    `what` names the value in the message. For dicts the message has only the keys that differ.
    """
    values = gather_json(ranks, value)
    if all(other == values[0] for other in values):
        return
    ranks_by_text = {}
    for rank, text in enumerate(_what_differs(values)):
        ranks_by_text.setdefault(text, []).append(str(rank))
    differences = "; ".join(f"rank {', '.join(names)} has {text}" for text, names in ranks_by_text.items())
    raise RuntimeError(f"the ranks disagree about {what}: {differences}: start them with the same options and files")


def _what_differs(values):
    """Each value as text; for dicts only the entries that are not equal in all of them."""
    if not all(isinstance(value, dict) for value in values):
        return [str(value) for value in values]
    names = sorted({name for value in values for name in value})
    differ = [name for name in names if any(value.get(name) != values[0].get(name) for value in values)]
    return [", ".join(f"{name}={value.get(name)}" for name in differ) for value in values]


def stop_ranks(failure=""):
    """Leave the process group; `failure` is the reason that the other ranks show, "" for success."""
    leave_ranks(failure)
    if dist.is_initialized():
        dist.destroy_process_group()
