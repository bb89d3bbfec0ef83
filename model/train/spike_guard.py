"""The spike guard: the gradient norm above which a step is skipped, and the error when too many are skipped."""

import math
from statistics import median

MAX_SKIPPED_STEPS = 10  # in a row
WINDOW, MIN_NORMS = 64, 16  # gradient norms in the median: at most, and at least before the guard acts
SHOWN_IDS = 20


def spike_limit(recent_norms, spike_guard):
    """The gradient norm above which a step is skipped: `spike_guard` times the median of `recent_norms`.

    Infinite if the guard is off (0) or there are fewer than MIN_NORMS norms.
    """
    if not spike_guard or len(recent_norms) < MIN_NORMS:
        return math.inf
    return spike_guard * median(recent_norms)


class TooManySkipped(RuntimeError):
    """More than MAX_SKIPPED_STEPS steps in a row were skipped, or the run's last two steps were not finite."""


def too_many_skipped(num_skipped, work, why, options):
    """Error message after `num_skipped` skipped steps in a row, of which `work` (Work) is the last."""
    ids = work.all_ids
    rest = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    guard = f", or raise --spike_guard (now {options.spike_guard})" if options.spike_guard else ""
    return (
        f"{num_skipped} steps in a row were skipped. The last, step {work.step}, had {why}; its examples (rows of the "
        f"token store) are {ids[:SHOWN_IDS].tolist()}{rest}; the journal's skip lines list those of the others. Lower "
        f"--learn_rate (now {options.learn_rate}), or remove these pairs from the file{guard}. If that fails again and "
        f"the run's checkpoints/ holds more than one folder, delete the newest: the run then resumes from the "
        "one before it"
    )
