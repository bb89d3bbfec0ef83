"""Pictures of README.md and the options page, and the table and figure of bench.compare's results.

    python -m bench.pictures screen RUN_DIR OUT.svg [--columns 120] [--lines 30]
    python -m bench.pictures page ADDRESS OUT.png QUESTION… [--size 1440x900] [--language zh] [--dark] [--press CSS]

screen: the screen as it stood when the run wrote its last status; CHAT_LANG chooses the language. page: the page of a
server that runs at ADDRESS, after these questions; below 600 pixels a phone's.
"""

import io
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import fire
import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from bench.corpus import draw_lengths
from bench.loops import SHAPES, smallest_shape
from model.display.catalogue import Texts, language_of
from model.display.screen import draw as draw_screen
from model.display.watch import Follower
from tests.browser import Page, new_browser
from tests.served import wait_until

SHOWN_SECONDS = 3  # until the panel of a run has been asked for again
COMPARED = ("ours", "a", "b")
LOOPS = dict(ours="ours", a="A: Seq2SeqTrainer", b="B: by hand", dropout="ours, dropout", profile="run_train.sh")
HEAD = ("model", "loop", "pairs per step", "real tokens/s", "spread", "ms per step", "peak GiB", "s to first step")


def report(folder, results):
    """Write table.md and compare.png into `folder`; print the table."""
    results = [*results, *mixtures(results)]
    lines = [machine_line(), "", *table(results), "", *ratio_lines(results)]
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)
    draw_cells(folder / "compare.png", results)


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
    """Yield our best speed beside each baseline's, ours with dropout beside without, each profile beside the first."""
    for model in dict.fromkeys(result["model"] for result in results):
        best = {loop: best_rate(results, model, loop) for loop in COMPARED}
        for loop in ("a", "b"):
            if best["ours"] and best[loop]:
                yield f"{model}: ours is {best['ours'] / best[loop]:.2f} x {LOOPS[loop]} at its best"
        done = [r for r in results if r["model"] == model and not r["problem"]]
        for pairs in dict.fromkeys(r["pairs"] for r in done if r["loop"] == "dropout"):
            rates = {False: [], True: []}
            for r in (r for r in done if (r["loop"], r["pairs"]) == ("dropout", pairs)):
                rates[float(r["options"]["dropout"]) > 0].append(r["tokens_per_second"])
            if all(rates.values()):
                without, with_it = map(statistics.median, rates.values())
                yield f"{model}, {pairs} pairs: with dropout {with_it / without:.3f} x the speed without"
        profiles = [r for r in done if r["loop"] == "profile"]
        for r in profiles:
            yield f"{r['name']}: {r['step_ms'] / profiles[0]['step_ms']:.2f} x the step of {profiles[0]['name']}"


def best_rate(results, model, loop):
    """Tokens/s of a loop's fastest cell; cells of a single padded shape of B do not count, only their mixture."""
    rates = [
        r["tokens_per_second"]
        for r in results
        if (r["model"], r["loop"]) == (model, loop) and not r["problem"] and "shape" not in r
    ]
    return max(rates, default=0)


def draw_cells(path, results):
    """Plot tokens/s and peak GiB over pairs per step, one column per model."""
    results = [result for result in results if result["loop"] in COMPARED]
    if not (models := list(dict.fromkeys(result["model"] for result in results))):
        return
    figure = Figure(figsize=(5 * len(models), 7), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False)
    for column, model in enumerate(models):
        for loop in COMPARED:
            cells = [r for r in results if (r["model"], r["loop"]) == (model, loop) and not r["problem"]]
            cells = sorted((r for r in cells if "shape" not in r), key=lambda r: r["pairs"] * r["rounds"])
            pairs = [r["pairs"] * r["rounds"] for r in cells]
            for row, figure_name in enumerate(("tokens_per_second", "peak_gib")):
                heights = [r[figure_name] for r in cells]
                axes[row][column].plot(pairs, heights, "o-" if loop == "ours" else "o", label=LOOPS[loop])
        axes[0][column].set(title=model, ylabel="real tokens/s", ylim=0)
        axes[1][column].set(xlabel="pairs per step", ylabel="peak GiB", ylim=0)
        axes[0][column].legend()
    figure.savefig(path, dpi=120)


def screen(run_dir, out, columns=120, lines=30):
    """Write the screen as it stood when the run wrote its last status; CHAT_LANG chooses the language."""
    view = Follower(run_dir, "stop").look()
    if view.statuses:
        view = replace(view, now=max(status.time for status in view.statuses))
    drawn = draw_screen(
        view,
        Texts(language_of(os.environ)),
        Console(file=io.StringIO(), force_terminal=True, width=columns, height=lines),
    )
    console = Console(file=io.StringIO(), record=True, width=columns)
    console.print(Text.from_ansi(stretched(drawn.replace("\r\n", "\n"))), no_wrap=True, crop=False)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(console.export_svg(title=str(run_dir)), encoding="utf-8")


def page(address, out, *questions, size="1440x900", language="en", dark=False, press=""):
    """Ask the questions on the page of a running server and write what is seen; `press` is clicked last."""
    width, height = map(int, size.split("x"))
    browser = new_browser()
    try:
        shown = Page(browser, address)
        screen_size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen_size)
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", dict(enabled=width < 600))
        browser.execute_cdp_cmd(
            "Emulation.setUserAgentOverride", dict(userAgent="picture", acceptLanguage=f"{language},en")
        )
        scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[scheme]))
        shown.reload()
        for count, question in enumerate(questions, start=1):
            shown.type(str(question))
            shown.click("#send")
            wait_until(lambda count=count: len(shown.texts(".round")) == count and shown.run("return !running.size"))
        if press:
            shown.click(press)
        time.sleep(SHOWN_SECONDS)
        browser.save_screenshot(str(out))
    finally:
        browser.quit()


def stretched(text):
    """`text` with a space of no width behind each wide character: rich's svg gives each character one column."""
    return "".join(character + "\u200b" * (cell_len(character) - 1) for character in text)


if __name__ == "__main__":
    fire.Fire(dict(screen=screen, page=page))
