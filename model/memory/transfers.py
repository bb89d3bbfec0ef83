"""Predicts what a step takes beside its computation: what ranks send each other, and an update in host memory."""

from dataclasses import dataclass

# Bytes of host memory that AdamW's update of a weight reads and writes: averages, gradient and weight, then masters.
AVERAGES_BYTES, SENT_BYTES, MASTER_BYTES = 16, 12, 8


@dataclass(frozen=True)
class Links:
    """Bytes a second of a GPU's links."""

    host: float  # to page-locked host memory, either way
    peer: float  # to other GPUs
    memory: float  # of the host's memory to its CPU
    measured: tuple = ()  # names of those that were measured; the others are assumed


# PCIe 4.0 with 16 lanes, over which GPUs without NVLink send through the host, and two channels of DDR4
ASSUMED = Links(host=20e9, peer=10e9, memory=35e9)


def transfer_seconds(spec, links, sends_bf16):
    """Seconds that a step of a MemorySpec sends over Links, as if nothing of it were hidden behind computation."""
    moved = spec.num_ranks > 1 and _peer_bytes(spec, 2 if sends_bf16 or not spec.has_masters else 4) / links.peer
    if spec.offloads:
        numbers = spec.own_part.numbers if spec.own_part else spec.trained
        weights = spec.number_bytes * (1 if spec.has_masters else 2)  # they return; without masters they come, too
        updated = AVERAGES_BYTES + SENT_BYTES + MASTER_BYTES * spec.has_masters
        moved += numbers * ((spec.gradient_bytes + weights) / links.host + updated / links.memory)
    return float(moved)


def _peer_bytes(spec, gradient_bytes):
    """Bytes that a rank sends: its gradients to those who add them, then their sums, or weights where these share."""
    others = spec.trained * (spec.num_ranks - 1) / spec.num_ranks
    return others * (gradient_bytes + (spec.number_bytes if spec.own_part else gradient_bytes))
