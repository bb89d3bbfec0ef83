"""The learning rate, a pure function of the number of pairs seen."""

import math
from dataclasses import dataclass

from config import MAX_DEFAULT_WARMUP_STEPS


@dataclass(frozen=True)
class LearnRate:
    """The learning rate at every position: rises to the peak over the warm-up, falls to 0 at the run's end.

    cosine: half a cosine from the peak to 0. wsd (warm-up, stable, decay: MiniCPM, arXiv 2404.06395): stays at the
    peak, then falls linearly to 0 over the last fifth of the run.
    """

    peak: float
    lr_schedule: str  # cosine, wsd
    warmup_pairs: int
    total_pairs: int

    def at(self, pairs_seen):
        """Learning rate after `pairs_seen` pairs."""
        if pairs_seen < self.warmup_pairs:
            return self.peak * pairs_seen / self.warmup_pairs
        if self.lr_schedule == "cosine":
            progress = (pairs_seen - self.warmup_pairs) / max(self.total_pairs - self.warmup_pairs, 1)
            return self.peak * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        left = max(self.total_pairs - pairs_seen, 0) / self.total_pairs
        return self.peak * min(left / 0.2, 1.0)


def warmup_pairs(config, total_pairs, first_batch):
    """Number of pairs over which the learning rate rises.

    The run has `total_pairs`; a warm-up given in steps counts steps of `first_batch` pairs, those at the run's start.
    """
    if config.warmup_steps >= 0:
        return config.warmup_steps * first_batch
    return min(total_pairs // 10, MAX_DEFAULT_WARMUP_STEPS * first_batch)


def check_warmup(config, typed, warmup_steps, num_steps):
    """Raise ValueError if --warmup_steps is in `typed`, the options given now, and the run ends within the warm-up."""
    if "warmup_steps" in typed and (problem := warmup_problem(config, warmup_steps, num_steps)):
        raise ValueError(problem)


def warmup_problem(config, warmup_steps, num_steps):
    """Error message if a run of `num_steps` ends within its warm-up, with what to type; "" otherwise."""
    if warmup_steps < num_steps or not warmup_steps:
        return ""
    reached = config.learn_rate * num_steps / warmup_steps
    return (
        f"the warm-up of {warmup_steps:.0f} steps must be shorter than the run of {num_steps:.0f}: the learning rate "
        f"would reach only {reached:.2g} of {config.learn_rate:g}; leave --warmup_steps out for a tenth of the run, or "
        f"type --warmup_steps={int(num_steps) // 10}"
    )
