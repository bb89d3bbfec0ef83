"""A picture of the screen of a run: python -m bench.screen RUN_DIR OUT.svg [--columns=120] [--lines=30]."""

import io
import os
from dataclasses import replace
from pathlib import Path

import fire
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from model.display.catalogue import Texts, language_of
from model.display.screen import draw
from model.display.watch import Follower


def picture(run_dir: str, out: str, columns: int = 120, lines: int = 30) -> None:
    """Write the screen as it stood when the run wrote its last status; CHAT_LANG chooses the language."""
    view = Follower(run_dir, "stop").look()
    if view.statuses:
        view = replace(view, now=max(status.time for status in view.statuses))
    drawn = draw(
        view,
        Texts(language_of(os.environ)),
        Console(file=io.StringIO(), force_terminal=True, width=columns, height=lines),
    )
    console = Console(file=io.StringIO(), record=True, width=columns)
    console.print(Text.from_ansi(stretched(drawn.replace("\r\n", "\n"))), no_wrap=True, crop=False)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(console.export_svg(title=str(run_dir)), encoding="utf-8")


def stretched(text: str) -> str:
    """`text` with a space of no width behind each wide character: rich's svg gives each character one column."""
    return "".join(character + "\u200b" * (cell_len(character) - 1) for character in text)


if __name__ == "__main__":
    fire.Fire(picture)
