"""The learning rate, a pure function of the number of pairs seen."""

import math
from dataclasses import dataclass

# Of steps relative to the weights: the sum of their squared learning rates up to which runs were steady. What such
# steps move at random grows with that sum; why a run with more of it diverged is not known.
MOST_SQUARES = 5.0
MEAN_SQUARES = dict(cosine=3 / 8, wsd=13 / 15)  # of the learning rates of a run whose peak is 1


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


def steady_peak(lr_schedule, num_steps):
    """The highest peak with which steps relative to the weights keep a run of `num_steps` steady.

    Measured with the model small (bench/results/study_small_data.md): 0.03 is steady for 14,800 steps and 0.0185 for
    38,900, where 0.03 is not.
    """
    return math.sqrt(MOST_SQUARES / (MEAN_SQUARES[lr_schedule] * max(num_steps, 1)))


def warmup_problem(peak, warmup_steps, num_steps):
    """Error message if a run of `num_steps` to the rate `peak` ends within its warm-up; "" otherwise."""
    if warmup_steps < num_steps or not warmup_steps:
        return ""
    reached = peak * num_steps / warmup_steps
    whole = math.ceil(num_steps)  # the last step may be smaller
    return (
        f"the warm-up of {warmup_steps:.0f} steps must be shorter than the run of {whole}: the learning rate would "
        f"reach only {reached:.2g} of {peak:g}; leave --warmup_steps out for a tenth of the run, or "
        f"type --warmup_steps={int(num_steps) // 10}"
    )
