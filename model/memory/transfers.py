"""Predicts what a step takes beside its computation: what ranks send each other, and state that passes the device."""

from dataclasses import dataclass

AVERAGES_BYTES, MASTER_BYTES = 8, 4  # of a weight in host memory: what AdamW's update takes to the device and back


@dataclass(frozen=True)
class Links:
    """Bytes a second of a GPU's links."""

    host: float  # to page-locked host memory, either way
    peer: float  # to other GPUs
    memory: float  # that host memory reads and writes
    measured: tuple = ()  # names of those that were measured; the others are assumed


# PCIe 4.0 with 16 lanes, over which GPUs without NVLink send through the host, and two channels of DDR4
ASSUMED = Links(host=20e9, peer=10e9, memory=35e9)


def transfer_seconds(spec, links, sends_bf16):
    """Seconds that a step of a MemorySpec sends over Links, as if nothing of it were hidden behind computation."""
    moved = spec.num_ranks > 1 and _peer_bytes(spec, 2 if sends_bf16 or not spec.has_masters else 4) / links.peer
    if spec.offloads:
        numbers = spec.own_part.numbers if spec.own_part else spec.trained
        passing = AVERAGES_BYTES + MASTER_BYTES * spec.has_masters  # while others return, which the memory bears too
        moved += numbers * passing / min(links.host, links.memory / 2)
    return float(moved)


def _peer_bytes(spec, gradient_bytes):
    """Bytes that a rank sends: its gradients to those who add them, then their sums, or weights where these share."""
    others = spec.trained * (spec.num_ranks - 1) / spec.num_ranks
    return others * (gradient_bytes + (spec.number_bytes if spec.own_part else gradient_bytes))
