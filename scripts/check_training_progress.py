"""Show the progress of runs. Only reads what they wrote, so training is not disturbed.

    python scripts/check_training_progress.py [RUN_DIR…] [--watch [SECONDS]] [--plot FILE.png]

One run gives a report, several a table. On a terminal, --watch of one run is the screen that the run itself shows;
elsewhere, or with SECONDS, it is the report again and again. --plot draws the losses of the runs into one picture, by
pairs and by hours. Exit code 2 if there is no such run or its journal is damaged.
"""

import math
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

from rich.cells import cell_len  # noqa: E402

from model.commands.option_names import ScriptParser  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.display.console import padded  # noqa: E402
from model.display.plots import plot_runs  # noqa: E402
from model.display.run_report import rows_of  # noqa: E402
from model.display.watch import watch  # noqa: E402
from model.runtime.paths import check_path  # noqa: E402
from model.runtime.terminal import printable  # noqa: E402

WATCH_SECONDS = 10
COLUMNS = ["run", "state", "step", "training loss", "validation loss", "speed", "time left"]
TEXT = texts_here()


def main() -> int:
    parser = ScriptParser(description="Show the progress of runs, from their journals.")
    parser.add_argument("run_dirs", nargs="*", help="default: the run under model_save/ with the newest journal line")
    watching = f"a screen until Ctrl+C; with SECONDS, or without a terminal, reports (default: every {WATCH_SECONDS})"
    parser.add_argument("--watch", nargs="?", const="", metavar="SECONDS", help=watching)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the losses by pairs and by hours")
    options = parser.parse_args()
    try:
        names, seconds = watched(options.run_dirs, options.watch)
        run_dirs = [checked(name) for name in names] or [newest_run()]
        if options.plot:
            plot(run_dirs, options.plot)
        if options.watch is not None and seconds is None and sys.stdout.isatty() and len(run_dirs) == 1:
            watch(run_dirs[0], sys.stdout.fileno())
            options.watch = None
        show(run_dirs)
        while options.watch is not None:
            time.sleep(seconds or WATCH_SECONDS)
            print(flush=True)
            show(run_dirs)
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(flush=True)
    return 0


def watched(names: list[str], watch: str | None) -> tuple[list[str], float | None]:
    """(Run directories, seconds between two reports or None) of the command line; --watch may stand before RUN_DIR."""
    try:
        seconds = float(watch) if watch else None
    except ValueError:
        if names:
            raise ValueError(f"--watch={watch}: this option takes a number of seconds, e.g. --watch 10") from None
        return [watch], None
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"--watch={watch}: seconds between two reports must be above 0, e.g. --watch 10")
    return names, seconds


def plot(run_dirs: list[Path], out: Path) -> None:
    try:
        plot_runs(run_dirs, out)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a journal has a line that no run writes ({error!r}): delete that line") from error
    print(out, flush=True)


def show(run_dirs: list[Path]) -> None:
    """Print a report of one run, or a line for each of several."""
    if len(run_dirs) == 1:
        rows = {"run": str(run_dirs[0])} | rows_of(run_dirs[0])
        names = {name: title(name) for name in rows}
        width = max(map(cell_len, names.values()))
        lines = [f"{padded(names[name], width)}  {printable(text)}" for name, text in rows.items()]
    else:
        found = [{"run": str(run_dir)} | rows_of(run_dir) for run_dir in run_dirs]
        cells = [list(map(title, COLUMNS)), *([printable(rows.get(name, "")) for name in COLUMNS] for rows in found)]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(padded, line, widths)).rstrip() for line in cells]
    print("\n".join(lines), flush=True)


def title(name: str) -> str:
    """The name of a row or a column in the reader's language."""
    return TEXT.get(f"fact.{name}", name)


def checked(name: str) -> Path:
    """The run directory `name`. Raises ValueError if there is none."""
    check_path(name)
    path = Path(name)
    if not ((path / "metrics.jsonl").exists() or (path / "run.lock").exists()):
        raise ValueError(f"no run in {name}: name a run directory, for example model_save/pretrain")
    return path


def newest_run() -> Path:
    """The run under model_save/ whose journal, or lock before there is one, is the newest. ValueError without any."""
    found = {
        path
        for folder in (Path.cwd(), ROOT)
        for name in ("metrics.jsonl", "run.lock")
        for path in folder.glob(f"model_save/*/{name}")
    }
    if not found:
        raise ValueError("no model_save/*/metrics.jsonl here: name the run directory (its output_dir)")
    return max(found, key=lambda path: path.stat().st_mtime).parent


if __name__ == "__main__":
    sys.exit(main())
