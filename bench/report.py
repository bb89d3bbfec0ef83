"""Write the results of bench.compare as a markdown table and a figure."""

import platform

import numpy as np
import torch
import transformers

from bench.corpus import draw_lengths
from bench.loops import SHAPES, smallest_shape

LOOPS = {"ours": "ours", "a": "A: Seq2SeqTrainer", "b": "B: by hand"}
HEAD = ("model", "loop", "pairs per step", "real tokens/s", "spread", "ms per step", "peak GiB", "s to first step")


def report(folder, results):
    """Write table.md and compare.png into `folder`; print the table."""
    results = [*results, *mixtures(results)]
    lines = [machine_line(), "", *table(results), "", *ratio_lines(results)]
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)
    draw(folder / "compare.png", results)


def machine_line():
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    numbers = "bf16" if gpu else "float32"
    return f"{name}, {numbers}; torch {torch.__version__}, transformers {transformers.__version__}"


def mixtures(results):
    """Yield loop B over the whole corpus for each model: each padded shape has its share of the pairs and its speed."""
    lengths = draw_lengths(200_000, np.random.default_rng(0))
    shares = np.bincount(smallest_shape(lengths), minlength=len(SHAPES)) / len(lengths)
    tokens_per_pair = lengths.sum(axis=1).mean()
    for model in dict.fromkeys(result["model"] for result in results):
        parts = [r for r in results if r["model"] == model and r["loop"] == "b" and not r["problem"]]
        if len(parts) < len(SHAPES):
            continue
        parts.sort(key=lambda part: SHAPES.index(tuple(part["shape"])))
        seconds_per_pair = sum(share / part["pairs_per_second"] for share, part in zip(shares, parts, strict=True))
        yield dict(
            model=model, loop="b", name=f"{model}/b/all four shapes", problem="", rounds=1,
            pairs=round(sum(share * part["pairs"] for share, part in zip(shares, parts, strict=True))),
            tokens_per_second=float(tokens_per_pair / seconds_per_pair), spread=max(part["spread"] for part in parts),
            step_ms=float(sum(share * part["step_ms"] for share, part in zip(shares, parts, strict=True))),
            peak_gib=max(part["peak_gib"] for part in parts),
            first_step_seconds=sum(part["first_step_seconds"] for part in parts),
        )  # fmt: skip


def table(results):
    """Yield the markdown lines of the table of results."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| " + " | ".join("---" for _ in HEAD) + " |"
    for r in sorted(results, key=lambda r: (r["model"], r["loop"] != "ours", r["name"])):
        kind = f"{LOOPS[r['loop']]} {r['name'].split('/')[2]}"
        if r["problem"]:
            yield f"| {r['model']} | {kind} | {r['pairs'] * r['rounds']} | {r['problem'].replace('|', '/')} | | | | |"
            continue
        figures = (
            f"{r['tokens_per_second']:,.0f}", f"{r['spread']:.1%}", f"{r['step_ms']:.1f}", f"{r['peak_gib']:.2f}",
            f"{r['first_step_seconds']:.0f}",
        )  # fmt: skip
        yield f"| {r['model']} | {kind} | {r['pairs'] * r['rounds']} | " + " | ".join(figures) + " |"


def ratio_lines(results):
    """Yield, for each model and baseline, our best speed relative to the baseline's best."""
    for model in dict.fromkeys(result["model"] for result in results):
        best = {loop: best_rate(results, model, loop) for loop in LOOPS}
        for loop in ("a", "b"):
            if best["ours"] and best[loop]:
                yield f"{model}: ours is {best['ours'] / best[loop]:.2f} x {LOOPS[loop]} at its best"


def best_rate(results, model, loop):
    """Tokens/s of a loop's fastest cell; cells of a single padded shape of B do not count, only their mixture."""
    rates = [
        r["tokens_per_second"]
        for r in results
        if (r["model"], r["loop"]) == (model, loop) and not r["problem"] and "shape" not in r
    ]
    return max(rates, default=0)


def draw(path, results):
    """Plot tokens/s and peak GiB over pairs per step, one column per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(result["model"] for result in results))
    figure, axes = pyplot.subplots(2, len(models), squeeze=False, figsize=(5 * len(models), 7), layout="constrained")
    for column, model in enumerate(models):
        for loop, label in LOOPS.items():
            cells = [r for r in results if (r["model"], r["loop"]) == (model, loop) and not r["problem"]]
            cells = sorted((r for r in cells if "shape" not in r), key=lambda r: r["pairs"] * r["rounds"])
            pairs = [r["pairs"] * r["rounds"] for r in cells]
            for row, figure_name in enumerate(("tokens_per_second", "peak_gib")):
                heights = [r[figure_name] for r in cells]
                axes[row][column].plot(pairs, heights, "o-" if loop == "ours" else "o", label=label)
        axes[0][column].set(title=model, ylabel="real tokens/s", ylim=0)
        axes[1][column].set(xlabel="pairs per step", ylabel="peak GiB", ylim=0)
        axes[0][column].legend()
    figure.savefig(path, dpi=120)
