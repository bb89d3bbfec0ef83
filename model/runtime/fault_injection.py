"""Named places where a test can make a run fail for real. No cost when CHAT_FAULT is unset.

CHAT_FAULT=site:rank:step:kind[:count], several separated by commas. `site` is one of SITES (optimizer: before the first
weight is written, update: after the last), `rank` a number, last or all, `step` the optimizer step being attempted
(from 1; at the site preflight the attempt), `kind` one of KINDS. A fault fires `count` times (1) and is spent.
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
    "generate", "save",
)  # fmt: skip
ERRORS = {  # real: the allocator's own, for more than any machine has
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
HEARD_SECONDS = 0.1  # a signal reaches the watch, beside the thread that sends it here
SLEEPS = {"hang": 1e6, "slow": 5.0}  # seconds
KINDS = (*ERRORS, *SIGNALS, *SLEEPS, "nan")


@dataclass
class Fault:
    site: str
    rank: str
    step: int
    kind: str
    count: int

    def is_for(self, site, step):
        rank, last = os.environ.get("RANK", "0"), str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        here = self.rank in ("all", rank) or (self.rank == "last" and rank == last)
        return self.count > 0 and (self.site, self.step) == (site, step) and here


def parse_faults(text):
    """Faults that `text` describes; raises ValueError for a word that means nothing."""
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
    """Let the faults planned for this place happen; True if the number computed here is to become NaN."""
    return any([_happen(fault) for fault in _faults if fault.is_for(site, step)])


def _happen(fault):
    fault.count -= 1
    words = f"{fault.site}:{fault.rank}:{fault.step}:{fault.kind}"
    print(f"CHAT_FAULT {words} fires", file=sys.stderr, flush=True)
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.kind])
        time.sleep(HEARD_SECONDS)
    elif fault.kind in SLEEPS:
        time.sleep(SLEEPS[fault.kind])
    elif fault.kind in ERRORS:
        raise ERRORS[fault.kind]()
    return fault.kind == "nan"
