"""What plots draw of a journal's lines: points by step, smoothed, by hours of the run; imports no matplotlib."""

from bisect import bisect_left
from itertools import accumulate

from model.display.figures import Figures

SMOOTHED_PARTS = 40


def points_of(records, kind, key):
    """(steps, values) of the lines of a kind that have a value."""
    found = [(record["step"], record[key]) for record in records if record["kind"] == kind and key in record]
    found = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values):
    """The mean of each value and its neighbours, a fortieth of all, as many before it as behind it."""
    sums, reach = [0.0, *accumulate(values)], len(values) // 2 // SMOOTHED_PARTS
    last, means = len(values) - 1, []
    for place in range(len(values)):
        side = min(reach, place, last - place)
        means.append((sums[place + side + 1] - sums[place - side]) / (2 * side + 1))
    return means


def between(steps, values, step):
    """The value at `step`, on a straight line between those of the steps around it."""
    place = min(bisect_left(steps, step), len(steps) - 1)
    if place <= 0 or steps[place] <= step:
        return values[place] if steps else 0
    low, high = steps[place - 1], steps[place]
    return values[place - 1] + (values[place] - values[place - 1]) * (step - low) / (high - low)


def hours_of(records):
    """{id of a record: hours of the run until then}, without the pauses before each start."""
    hours, total, before = {}, 0.0, None
    for record in records:
        if before is not None and record["kind"] != "start":
            total += max(0.0, record["time"] - before) / 3600
        hours[id(record)], before = total, record["time"]
    return hours


def gaps_of(records):
    """[(step, over-fit gap)] of the evaluations that have one."""
    evals = figures_of(records).evals
    return [(record["step"], record["overfit_gap"]) for record in evals if record["overfit_gap"] is not None]


def figures_of(records):
    """The Figures of all lines."""
    figures = Figures()
    for record in records:
        figures.add(record)
    return figures
