"""When a step is left out: the spike guard's limit, and the words for a run that leaves out too many."""

import math
from statistics import median

MAX_SKIPPED_STEPS = 10  # steps in a row that may be left out
WINDOW, LEAST = 64, 16  # gradient norms whose median is taken: at most, and before the guard acts
SHOWN_IDS = 20


def spike_limit(recent_norms, spike_guard):
    """The gradient norm above which a step is left out: `spike_guard` times the median of `recent_norms`.

    Infinite while the guard is off (0) or knows fewer than LEAST norms.
    """
    if not spike_guard or len(recent_norms) < LEAST:
        return math.inf
    return spike_guard * median(recent_norms)


class TooManySkipped(RuntimeError):
    """More steps in a row were left out than a run bears."""


def too_many_skipped(number, step, why, ids, config):
    """What to tell the user after `number` skipped steps in a row, the last with the examples `ids`."""
    rest = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    guard = f", or raise --spike_guard (now {config.spike_guard})" if config.spike_guard else ""
    return (
        f"{number} steps in a row were left out, the last, step {step}, for {why}; its examples (rows of the token "
        f"store) are {ids[:SHOWN_IDS].tolist()}{rest}, the others' stand in the journal's skip lines: lower "
        f"--learn_rate (now {config.learn_rate}), or take these pairs out of the file{guard}; where that fails again "
        f"and {config.output_dir}/checkpoints holds more than one folder, delete the newest: the run goes on from the "
        "one before"
    )
