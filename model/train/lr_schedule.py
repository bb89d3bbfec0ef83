"""The learning rate, a pure function of the pairs seen."""

import math

from config import MOST_OWN_WARMUP_STEPS


def learn_rate_at(pairs_seen, config, warmup_pairs, total_pairs):
    """Learning rate when `pairs_seen` pairs are done: up to the peak over `warmup_pairs`, down to 0 at `total_pairs`.

    cosine: half a cosine from the peak to 0. wsd: the peak, then a straight line to 0 over the last fifth
    (warm-up, stable, decay: MiniCPM, arXiv 2404.06395).
    """
    if pairs_seen < warmup_pairs:
        return config.learn_rate * pairs_seen / warmup_pairs
    if config.lr_schedule == "cosine":
        progress = (pairs_seen - warmup_pairs) / max(total_pairs - warmup_pairs, 1)
        return config.learn_rate * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    left = max(total_pairs - pairs_seen, 0) / total_pairs
    return config.learn_rate * min(left / 0.2, 1.0)


def warmup_pairs(config, total_pairs, first_batch):
    """Pairs over which the learning rate rises: of a run of `total_pairs` that began with steps of `first_batch`."""
    if config.warmup_steps >= 0:
        return config.warmup_steps * first_batch
    return min(total_pairs // 10, MOST_OWN_WARMUP_STEPS * first_batch)


def check_warmup(config, typed, warmup_steps, num_steps):
    """Raise ValueError where --warmup_steps is among the options `typed` now and the run never gets beyond it."""
    if "warmup_steps" in typed and (problem := warmup_problem(config, warmup_steps, num_steps)):
        raise ValueError(problem)


def warmup_problem(config, warmup_steps, num_steps):
    """Why a run of `num_steps` never gets beyond its warm-up and what to type, or nothing."""
    if warmup_steps < num_steps or not warmup_steps:
        return ""
    reached = config.learn_rate * num_steps / warmup_steps
    return (
        f"the warm-up of {warmup_steps:.0f} steps is not shorter than the run, {num_steps:.0f}: the learning rate "
        f"comes to {reached:.2g} of {config.learn_rate:g} at most; leave --warmup_steps out for a tenth of the run, or "
        f"type --warmup_steps={int(num_steps) // 10}"
    )
