"""The only door to accelerate and torch.distributed: start, agree, sum, and the CPU side channel for votes.

Collectives here are all_reduce, broadcast and all_gather only: Gloo offers no more on CUDA tensors.
"""

import functools
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from glob import glob

import torch
import torch.distributed as dist
import ujson
from accelerate import Accelerator, InitProcessGroupKwargs

from model.runtime.nccl_check import in_words, preflight
from model.runtime.peers import DEAD_SECONDS
from model.runtime.watchdog import at_most, exchange, leave_ranks, stop_asked, unhurried, watch_ranks

PATIENCE = timedelta(days=7)  # torch's own time limits count a suspension too; the watch ends what hangs


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str  # nccl, gloo or none
    cpu_group: object = field(repr=False)  # CPU (Gloo) process group; None when alone

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def is_local_main(self):
        return self.local_rank == 0


def told_by_main(timeout_s, function, *args):
    """What `function(*args)` (plain values) gives on rank 0, on every rank, before they join; so is its ValueError.

    Needs no backend: the ranks meet in the store at MASTER_ADDR:MASTER_PORT, where they join later. The process ends
    where not all come within `timeout_s`.
    """
    _refuse_launches_that_cannot_work()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return function(*args)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with at_most(timeout_s, f"not all processes came within --ddp_timeout_s={timeout_s}"):
        store = _meeting_point()
        if rank == 0:
            store.set("told", ujson.dumps(_outcome(function, *args)))
        kind, value = ujson.loads(store.get("told"))
        store.set(f"heard/{rank}", "")
        if rank == 0:  # which may host the store
            store.wait([f"heard/{other}" for other in range(world_size)])
    return _value_of(kind, value)


@functools.cache
def _meeting_point():
    """The store in which the ranks meet; kept for the life of the process, since others join through the same one."""
    store, *_ = next(dist.rendezvous("env://", timeout=PATIENCE))
    return dist.PrefixStore(f"told_by_main/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def start_ranks(backend="auto", timeout_s=600):
    """Join the run's processes as the launcher set them up; alone under plain python.

    Raises RuntimeError when the processes cannot be what the launcher promised, ValueError where it is a launch that
    cannot work.
    """
    _refuse_launches_that_cannot_work()
    on_cpu = must_use_cpu()
    if on_cpu and backend == "nccl":
        raise ValueError("--backend=nccl needs GPUs and there are none here: leave it out")
    # What fails without it depends on which NUMA node a process starts on, so one preflight cannot clear it.
    os.environ.setdefault("NCCL_CUMEM_HOST_ENABLE", "0")
    gloo = on_cpu or backend == "gloo" or os.environ.get("ACCELERATE_USE_GLOO") == "1"
    gloo = gloo or _nccl_fails(backend)
    backend, launched = "gloo" if gloo else "nccl", "WORLD_SIZE" in os.environ
    # whose word says more than torch's, which may also try for half as long again to reach a rank 0 that has died
    limit = at_most(timeout_s, f"not all processes came within --ddp_timeout_s={timeout_s}")
    with limit if launched else nullcontext():
        ranks = _join(backend if launched else None, on_cpu)
        store = _store_on_main(ranks) if ranks.cpu_group is not None else None
    if store is not None:
        watch_ranks(store, ranks.rank, ranks.world_size, timeout_s)
    return ranks


def _join(backend, on_cpu):
    """Ranks as the launcher set them up; alone where `backend` is None."""
    handlers = [InitProcessGroupKwargs(backend=backend, timeout=PATIENCE)] if backend else []
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=handlers)
    promised, real = int(os.environ.get("WORLD_SIZE", "1")), accelerator.num_processes
    if promised != real:
        raise RuntimeError(f"the launcher promised {promised} processes and this group has {real}: start them again")
    device = accelerator.device
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # alone, accelerate leaves the index out
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # steps cannot be recorded on the default one
    place = accelerator.process_index, real, accelerator.local_process_index, device
    if real == 1:
        return Ranks(*place, "none", cpu_group=None)
    return Ranks(*place, dist.get_backend(), dist.new_group(backend="gloo", timeout=PATIENCE))


def _store_on_main(ranks):
    """A small store of texts that rank 0 keeps for the ranks' signs of life; each rank's is there from the start."""
    host, patience = os.environ["MASTER_ADDR"], timedelta(seconds=DEAD_SECONDS)
    store = None
    if ranks.is_main:
        store = dist.TCPStore(host, 0, is_master=True, timeout=patience, wait_for_workers=False)
        for rank in range(ranks.world_size):
            store.set(str(rank), "{}")
    port = gather_json(ranks, store.port if store else 0)[0]
    return store or dist.TCPStore(host, port, is_master=False, timeout=patience)


def _refuse_launches_that_cannot_work():
    # `accelerate launch --cpu --num_processes N` starts one process and leaves only these traces of N
    wanted_many = "MASTER_ADDR" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    if wanted_many and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "accelerate launch --cpu starts one process whatever --num_processes says: "
            "type accelerate launch --multi_gpu --num_processes N ./train_low_mem.py …, which works without GPUs too"
        )
    # `torchrun --master_port 0` passes the 0 on, and each process waits for the others at another port
    if os.environ.get("MASTER_PORT") == "0":
        raise ValueError("MASTER_PORT=0: the processes have no port to meet at: type torchrun --standalone")
    # an accelerate configuration for these would split the weights, and no step could be done again
    for name in ("DEEPSPEED", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1"):
            raise ValueError(
                f"ACCELERATE_USE_{name} is set, by accelerate's configuration file or by hand: this trainer keeps "
                "whole weights on each GPU, which a model of this size does not fill; launch with --multi_gpu"
            )


def must_use_cpu(devices="/dev/nvidia[0-9]*", driver="/proc/driver/nvidia/version"):
    """True without a GPU; raises RuntimeError where torch cannot see the one there is and nobody asked for the CPU.

    `devices` (a pattern) and `driver` are where the kernel shows them.
    """
    if torch.cuda.is_available():
        return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    asked = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or "ACCELERATE_USE_CPU" in os.environ
    if (glob(devices) or os.path.exists(driver)) and not asked:
        raise RuntimeError(
            f"this machine has an NVIDIA GPU or driver but torch {torch.__version__} sees none: install a CUDA build "
            "of torch that the driver supports (nvidia-smi shows its version), or set CUDA_VISIBLE_DEVICES= for the CPU"
        )
    return True


def _nccl_fails(backend):
    """True where Gloo must stand in for NCCL between this machine's GPUs; sets the variables that NCCL needs here.

    Raises RuntimeError where `backend` is nccl and nothing makes it work.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE", "1") != str(world_size):
        return False  # alone, or on several machines, where this one cannot tell for the others
    verdict, path = preflight(world_size, stop_asked)
    os.environ.update(verdict.env)
    if verdict.failures and backend == "nccl" != verdict.backend:
        raise RuntimeError("NCCL does not work here: leave --backend=nccl out\n  " + "\n  ".join(verdict.failures))
    if verdict.failures and os.environ.get("LOCAL_RANK") == "0":
        chosen = in_words(verdict.backend, verdict.env)
        print(f"preflight: {chosen} is used; delete {path} to try the others again", file=sys.stderr, flush=True)
    return verdict.backend == "gloo"


def vote(ranks, *numbers):
    """Each number's maximum over ranks, on the CPU: what all ranks act on together."""
    votes = torch.tensor(numbers, dtype=torch.int64)
    if ranks.cpu_group is not None:
        with exchange("a vote"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=ranks.cpu_group)
    return votes.tolist()


def sum_over_ranks(ranks, tensor):
    """Add `tensor` over all ranks, in place, on the device's backend."""
    if ranks.world_size > 1:
        with exchange("a sum over ranks"):
            dist.all_reduce(tensor)
    return tensor


def broadcast(ranks, tensors, source=0):
    """Give every rank the values that `tensors` have on rank `source`, in place."""
    if ranks.world_size > 1:
        with exchange("a broadcast"):
            for tensor in tensors:
                dist.broadcast(tensor, source)


def gather_json(ranks, value):
    """Every rank's `value` (plain values), in rank order, on every rank."""
    if ranks.cpu_group is None:
        return [value]
    data = torch.frombuffer(bytearray(ujson.dumps(value).encode()), dtype=torch.uint8)
    (longest,) = vote(ranks, len(data))
    padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in range(ranks.world_size)]
    with exchange("a gathering of values"):
        dist.all_gather(parts, padded, group=ranks.cpu_group)
    return [ujson.loads(bytes(part.tolist()).decode()) for part in parts]


def from_main(ranks, function, *args):
    """What `function(*args)` (plain values) gives on rank 0, on every rank; so are its ValueError and RuntimeError."""
    return _value_of(*gather_json(ranks, _outcome(function, *args) if ranks.is_main else None)[0])


def _outcome(function, *args):
    """("value", what `function(*args)` gives) or (kind of its error, message), as plain values."""
    try:
        return "value", function(*args)
    except (ValueError, RuntimeError) as error:
        return ("RuntimeError" if isinstance(error, RuntimeError) else "ValueError"), str(error)


def _value_of(kind, value):
    """The value of an `_outcome`; raises its error."""
    if kind != "value":
        raise (RuntimeError if kind == "RuntimeError" else ValueError)(value)
    return value


def local_main_first(ranks, function):
    """What `function()` gives, called on the other ranks of a machine once its main one is done, however long that is.

    An error on a main rank, or a stop that it was asked for, ends all of them.
    """
    value, error = None, None
    if ranks.is_local_main:
        try:
            with unhurried("building what the other ranks wait for"):
                value = function()
        except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as caught:
            error = caught
    endings = (None, KeyboardInterrupt, ValueError, RuntimeError)
    mine = next((i for i, kind in enumerate(endings) if kind and isinstance(error, kind)), 3) if error else 0
    (worst,) = vote(ranks, mine)
    if error or worst:
        raise error or endings[worst]("the main rank of this or another machine failed: its message tells why")
    return value if ranks.is_local_main else function()


def agree(ranks, what, value):
    """Raise RuntimeError, naming which ranks have what, unless `value` (plain values) is the same on every rank.

    Of dicts the message holds only the keys that differ.
    """
    values = gather_json(ranks, value)
    if all(other == values[0] for other in values):
        return
    holders = {}
    for rank, text in enumerate(_what_differs(values)):
        holders.setdefault(text, []).append(str(rank))
    told = "; ".join(f"rank {', '.join(held)} has {text}" for text, held in holders.items())
    raise RuntimeError(f"the ranks disagree about {what}: {told}: start them with the same options and files")


def _what_differs(values):
    """Each value as text; of dicts, what is not the same in all of them."""
    if not all(isinstance(value, dict) for value in values):
        return [str(value) for value in values]
    names = sorted({name for value in values for name in value})
    differ = [name for name in names if any(value.get(name) != values[0].get(name) for value in values)]
    return [", ".join(f"{name}={value.get(name)}" for name in differ) for value in values]


def stop_ranks(failure=""):
    """Leave the process group, well or with `failure`."""
    leave_ranks(failure)
    if dist.is_initialized():
        dist.destroy_process_group()
