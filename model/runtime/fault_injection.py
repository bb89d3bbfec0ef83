"""Inject faults at named sites, so that tests can make a run fail. Costs nothing when CHAT_FAULT is unset.

CHAT_FAULT=site:rank:step:kind[:count], several separated by commas. `site` is one of SITES (optimizer: before the first
weight is written, update: after the last), `rank` a number, last or all, `step` the optimizer step being attempted
(from 1; at the site preflight the attempt, at derive the part, at decoding the run's last), `kind` one of KINDS. A
fault fires `count` times (default 1).
"""

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch

SITES = (
    "preflight", "forward", "loss", "backward_first", "backward", "reduce", "optimizer", "update", "evaluate",
    "generate", "save", "derive", "decoding",
)  # fmt: skip
ERRORS = {  # real: an allocation larger than any machine's memory
    "oom": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.23 GiB (injected)"),
    "cublas": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle) (injected)"
    ),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED (injected)"),
    "nccl": lambda: RuntimeError("NCCL error: unhandled cuda error, Cuda failure 'out of memory' (injected)"),
    "real": lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu"),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes (injected)"),
    "enospc": lambda: OSError(errno.ENOSPC, "No space left on device (injected)"),
    "eio": lambda: OSError(errno.EIO, "Input/output error (injected)"),
}
SIGNALS = {"int": signal.SIGINT, "term": signal.SIGTERM, "kill": signal.SIGKILL}
SIGNAL_SECONDS = 0.1  # the watchdog's thread needs this long to take a signal that this process sends itself
SLEEPS = {"hang": 1e6, "slow": 5.0}  # seconds
KINDS = (*ERRORS, *SIGNALS, *SLEEPS, "nan")


@dataclass
class Fault:
    """A fault that will happen at `site` on `rank`, in step `step`, `count` more times."""

    site: str
    rank: str
    step: int
    kind: str
    count: int

    def matches(self, site, step):
        rank, last = os.environ.get("RANK", "0"), str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        on_this_rank = self.rank in ("all", rank) or (self.rank == "last" and rank == last)
        return self.count > 0 and (self.site, self.step) == (site, step) and on_this_rank


def parse_faults(text):
    """The list of Fault that `text`, the value of CHAT_FAULT, describes; raises ValueError if it is malformed."""
    faults = []
    for word in filter(None, text.split(",")):
        site, rank, step, kind, count = (word.split(":") + ["1"])[:5] if word.count(":") in (3, 4) else [""] * 5
        numbers = step.isdecimal() and count.isdecimal() and (rank.isdecimal() or rank in ("last", "all"))
        if site not in SITES or kind not in KINDS or not numbers or (kind == "nan" and site != "loss"):
            raise ValueError(
                f"CHAT_FAULT={word}: write site:rank:step:kind[:count] with a site of {', '.join(SITES)} "
                f"and a kind of {', '.join(KINDS)} (nan at loss only)"
            )
        faults.append(Fault(site, rank, int(step), kind, int(count)))
    return faults


_faults = parse_faults(os.environ.get("CHAT_FAULT", ""))


def fire(site, step):
    """Trigger the faults planned for this site and step; returns True if the caller must replace its result by NaN."""
    return any([_trigger(fault) for fault in _faults if fault.matches(site, step)])


def _trigger(fault):
    fault.count -= 1
    name = f"{fault.site}:{fault.rank}:{fault.step}:{fault.kind}"
    print(f"CHAT_FAULT {name} fires", file=sys.stderr, flush=True)
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.kind])
        time.sleep(SIGNAL_SECONDS)
    elif fault.kind in SLEEPS:
        time.sleep(SLEEPS[fault.kind])
    elif fault.kind in ERRORS:
        raise ERRORS[fault.kind]()
    return fault.kind == "nan"
