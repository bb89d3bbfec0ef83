"""How long the parts of this process's start took, from its beginning on. Standard library only."""

import os
import time

_laps, _ends_at = {}, 0.0  # seconds of each part; when the last one ended, in seconds since the process began


def lap(name: str) -> None:
    """Say that the part `name` of the start ends now; it began where the last one ended. Later calls add to it."""
    global _ends_at
    now = seconds_since_start()
    _laps[name], _ends_at = _laps.get(name, 0.0) + now - _ends_at, now


def laps() -> dict[str, float]:
    """{part: its seconds}, in the order in which they ended."""
    return dict(_laps)


def seconds_since_start() -> float:
    """Seconds since this process began, the interpreter's own start included."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22, starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
