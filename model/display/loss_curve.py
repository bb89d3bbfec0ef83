"""The smoothed training loss of a run, drawn with characters."""

import math

from model.display.figures import Figures

BARS = " ▁▂▃▄▅▆▇█"
TINY_LOSS = 1e-6
LABEL_WIDTH = 8


def loss_curve(figures: Figures, width: int, height: int = 1) -> list[str]:
    """`height` lines of `width` characters, on a logarithmic scale, the highest and the lowest loss beside them.

    None for fewer than two points, or where there is no room.
    """
    values, columns = figures.losses.values, width - LABEL_WIDTH - 1
    if len(values) < 2 or columns < 2 or height < 1:
        return []
    means = [_mean(values[start:end]) for start, end in _parts(len(values), columns)]
    levels = [math.log(max(mean, TINY_LOSS)) for mean in means]
    low, high = min(levels), max(levels)
    scale = (height * (len(BARS) - 1) - 1) / (high - low) if high > low else 0
    eighths = [1 + round((level - low) * scale) for level in levels]
    labels = {0: max(means), height - 1: min(means)} if height > 1 else {0: means[-1]}
    return [_line(eighths, height - 1 - row, labels.get(row)) for row in range(height)]


def _parts(count, columns):
    """Which of `count` points each column shows, the same point in several where there are few."""
    for column in range(columns):
        start = column * count // columns
        yield start, max(start + 1, (column + 1) * count // columns)


def _mean(values):
    return sum(values) / len(values)


def _line(eighths, rows_below, label):
    bars = "".join(BARS[min(max(height - 8 * rows_below, 0), 8)] for height in eighths)
    return f"{'' if label is None else f'{label:.4f}':>{LABEL_WIDTH}.{LABEL_WIDTH}} {bars}"
