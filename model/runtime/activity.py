"""What this process is doing now, for those who ask from another thread. Standard library only.

The activity is one value that is replaced as a whole, so a reader never sees half of it.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pace:
    """How a training goes at its newest steps."""

    loss: float  # of the newest step that is known; NaN before one is finite
    tokens_per_second: float  # of all ranks
    step_seconds: float


@dataclass(frozen=True)
class Activity:
    name: str
    done: int = 0
    total: int | None = None  # None: unknown
    pace: Pace | None = None  # of a training, from its second step on


_current = Activity("starting")


def now_doing(name: str, done: int = 0, total: int | None = None, pace: Pace | None = None) -> None:
    """Say what this process does from now on, and how much of it is done."""
    global _current
    _current = Activity(name, done, total, pace)


def advance(count: int) -> None:
    """Say that `count` more of the current activity are done."""
    global _current
    _current = replace(_current, done=_current.done + count)


def current_activity() -> Activity:
    return _current
