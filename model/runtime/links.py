"""How fast this machine's GPU exchanges data with host memory and with another GPU."""

import time

import torch

TRIED_BYTES = 2**27


def measured_links():
    """{name: bytes a second} of the links of this machine's first GPU: host, and peer where there is a second one."""
    if not torch.cuda.is_available():
        return {}
    device, on_host = _buffer("cuda:0"), torch.empty(TRIED_BYTES, dtype=torch.uint8, pin_memory=True)
    found = dict(host=_speed(device, on_host))
    if torch.cuda.device_count() > 1:
        found["peer"] = _speed(_buffer("cuda:1"), device)
    return found


def _buffer(device):
    return torch.empty(TRIED_BYTES, dtype=torch.uint8, device=device)


def _speed(target, source):
    """Bytes a second of a copy, the second one: the first wakes the link."""
    seconds = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(target.device)
        seconds = time.perf_counter() - started
    return TRIED_BYTES / seconds
