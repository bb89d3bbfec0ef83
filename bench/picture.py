"""Draw the picture of README.md: the losses of a run, from its journal, and the speed table of docs/benchmarks.md.

python -m bench.picture RUN_DIR [--output docs/images/overview.png]
"""

import argparse
import re
import sys
from pathlib import Path

from model.display.plots import draw_losses
from model.run.journal import read_journal

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "overview.png"
COLOURS = {"this trainer": "tab:blue", "Seq2SeqTrainer": "tab:orange", "hand-tuned": "tab:green"}
ROW = re.compile(r"^\| (\S+)[^|]* \| ([^|]+) \| ([^|]+) \| ([\d,]+) k \| ([\d.]+) \|$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the picture of README.md.")
    parser.add_argument("run_dir", type=Path, help="the run whose losses are drawn")
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    try:
        records = read_journal(options.run_dir / "metrics.jsonl")
        rows = speed_rows(BENCHMARKS.read_text(encoding="utf-8"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    draw(options.output, records, rows)
    return 0


def speed_rows(page: str) -> list[tuple[str, str, str, int]]:
    """(model, loop, pairs per step, thousands of tokens per second) of each row of the speed table in `page`.

    Raises ValueError if there is no such table.
    """
    rows = [(model, loop, pairs, int(rate.replace(",", ""))) for model, loop, pairs, rate, _ in ROW.findall(page)]
    if not rows:
        raise ValueError(
            "no speed table: write rows like `| model | loop | pairs per step | 1,234 k | 5.6 |` in docs/benchmarks.md"
        )
    return rows


def draw(path: Path, records: list[dict], rows: list[tuple[str, str, str, int]]) -> None:
    """Write the picture to `path`: the losses on the left, one panel of speeds per model on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplot_mosaic([["losses", model] for model in dict.fromkeys(row[0] for row in rows)])
    draw_losses(panels["losses"], records)
    panels["losses"].set_title(describe(records), fontsize=10)
    panels["losses"].legend(loc="upper right")
    for model, axes in panels.items():
        if model != "losses":
            draw_speeds(axes, model, [row[1:] for row in rows if row[0] == model])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def describe(records: list[dict]) -> str:
    """One line that describes the run of a journal."""
    start = next(record for record in records if record["kind"] == "start")
    size = f"{start['parameters'] / 1e6:.1f} M parameters"
    pairs = f"{start['total_pairs']:,} pairs, {start['global_batch']} per step"
    return f"{size}; {pairs}; {start['dtype']}; {start['world']} × {start['device']}"


def draw_speeds(axes, model: str, rows: list[tuple[str, str, int]]) -> None:
    """Draw one bar for each (loop, pairs per step, thousands of tokens per second), the first at the top."""
    labels = [f"{loop.split(',')[0] if 'this' not in loop else loop}, {pairs}" for loop, pairs, _ in rows]
    colours = [next((colour for name, colour in COLOURS.items() if name in loop), "gray") for loop, _, _ in rows]
    bars = axes.barh(labels, [rate for _, _, rate in rows], color=colours)
    axes.bar_label(bars, [f"{rate:,} k" for _, _, rate in rows], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_title(f"{model}: tokens per second (loop, pairs per step)", fontsize=10)


if __name__ == "__main__":
    sys.exit(main())
