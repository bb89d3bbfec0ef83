"""Parts of one tensor that ranks send to each other."""

import functools

import torch
import torch.distributed as dist

from model.runtime.distributed import broadcast
from model.runtime.watchdog import collective

# Their names since torch 2.13, and before it.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def send_parts(tensor, out):
    """Send equal part r of `tensor` (numbers,) to rank r; returns a function that waits for the other ranks' parts.

    They are then in `out` (numbers,), in rank order.
    """
    with collective("an exchange of parts"):  # as bytes: Gloo has no bf16
        sending = dist.all_to_all_single(out.view(torch.uint8), tensor.view(torch.uint8), async_op=True)
    return functools.partial(_wait_for, sending)


def collect_parts(part, out):
    """Send `part` (numbers,) to all ranks; returns a function that waits for those of the other ranks.

    They are then in `out` (ranks * numbers,), in rank order; `part` may be this rank's place there.
    """
    with collective("a gather of parts"):
        collecting = ALL_GATHER(out.view(torch.uint8), part.view(torch.uint8), async_op=True)
    return functools.partial(_wait_for, collecting)


def sum_parts(ranks, parts):
    """Write the sum of all ranks' parts[r] to parts[r] of rank r; `parts` lie one after the other in one tensor.

    The other parts are unknown then.
    """
    with collective("a sum of parts"):
        if _are_equal(parts):
            REDUCE_SCATTER(parts[ranks.rank], _whole(parts))
        else:
            for rank, part in enumerate(parts):
                if len(part):
                    dist.reduce(part, rank)


def exchange_parts(ranks, parts):
    """Send parts[rank] to all ranks, into its place in their `parts`, which lie one after the other in one tensor."""
    if _are_equal(parts):
        collect_parts(parts[ranks.rank], _whole(parts))()
    elif ranks.backend == "nccl":  # its gather takes parts of several lengths
        with collective("an exchange of parts"):
            dist.all_gather(list(parts), parts[ranks.rank])
    else:
        for rank, part in enumerate(parts):
            broadcast(ranks, [part] * bool(len(part)), rank)


def _are_equal(parts):
    return len({len(part) for part in parts}) == 1


def _whole(parts):
    """The tensor in which equal parts lie one after the other."""
    return parts[0].as_strided((len(parts) * len(parts[0]),), (1,))


def _wait_for(work):
    """Wait for a collective; on a GPU its stream waits, and the host does not."""
    with collective("parts of a sum"):
        work.wait()
