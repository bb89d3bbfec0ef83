"""The screen of a run: a view as characters for a terminal of any size. Pure: it reads no file and no clock."""

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text

from model.display.answers import sample_text
from model.display.catalogue import Texts
from model.display.figures import epochs_of
from model.display.loss_curve import loss_curve
from model.display.view import (
    View,
    count_of,
    device_cells,
    devices_of,
    event_lines,
    is_alive,
    log_line,
    rows_of,
    state,
    status_of_journal,
)
from model.runtime.terminal import printable

WIDE = 116  # columns from which the rows stand in two columns
MAX_EVENT_LINES = 4
MAX_CURVE_WIDTH, MAX_CURVE_HEIGHT = 120, 6
CURVE_SHARE = 4  # of the lines below the figures one of so many is the curve's
ROOM_BELOW = 9  # lines for the curve, what the model says and the last line
# rows that give way on a low terminal, the first of them first
LEAST_NEEDED = ("wait", "rate", "memory", "next", "nats", "scores", "save")
DEVICE_COLUMNS = ("rank", "memory", "peak", "card", "utilisation", "temperature", "power", "process")


def draw(view: View, text: Texts, console: Console) -> str:
    """The characters that show `view` on all of the terminal of `console`, from its upper left corner on."""
    blank = [Segment(" " * console.width)]
    lines = [*lines_of(view, text, console), *[blank] * console.height][: console.height]
    if view.hint:
        lines[-1] = _lines([Text(" " + text(view.hint), style="dim", no_wrap=True, overflow="crop")], console)[0]
    segments = [segment for line in lines for segment in (*line, Segment.line())][:-1]
    with console.capture() as capture:
        console.print(Segments(segments), end="")
    return capture.get().replace("\n", "\r\n")


def lines_of(view: View, text: Texts, console: Console) -> list[list[Segment]]:
    """All that is shown but the last line; of the log the newest lines, as many as there is room for."""
    width = console.width
    parts = [head(view, text, width), bar(view, text, width), *devices(view, text)]
    rows = rows_for(rows_of(view, text), console.height - len(parts) - ROOM_BELOW, width)
    parts += table_of({text(f"row.{name}"): value for name, value in rows.items()}, width)
    parts += curve(view, text, width, (console.height - len(parts)) // CURVE_SHARE)
    lines = _lines(parts, console)
    for title, newest in sections(view, text, width).items():
        room = console.height - len(lines) - 2  # beside the title and the last line of the screen
        if newest and room > 0:
            lines += _lines([rule(title, width), *map(plain, newest[-room:])], console)
    return lines


def curve(view: View, text: Texts, width: int, height: int) -> list[Text]:
    """The loss below its title, in `height` lines; one of MAX_CURVE_HEIGHT at most, at least one."""
    drawn = loss_curve(view.figures, min(width - 2, MAX_CURVE_WIDTH), min(max(height, 1), MAX_CURVE_HEIGHT))
    if not drawn:
        return []
    steps = view.figures.losses.steps
    title = rule(text("curve", first=steps[0], last=steps[-1]), width)
    return [title, *(Text(" " + line, style="cyan", no_wrap=True, overflow="crop") for line in drawn)]


def sections(view: View, text: Texts, width: int) -> dict[str, list[str]]:
    """What stands below the figures, lines by title: what the model says now, the events, the log."""
    evals, titled = view.figures.evals, {}
    if evals and (samples := evals[-1].get("samples")):
        titled[text("samples", step=evals[-1]["step"])] = [sample_text(sample, width) for sample in samples]
    titled[text("events")] = event_lines(view, text)[-MAX_EVENT_LINES:]
    return titled | {text("log"): [log_line(line) for line in view.log]}


def _lines(parts, console):
    options = console.options.update(height=None)
    return [line for part in parts for line in console.render_lines(part, options)]


def plain(line: str) -> Text:
    return Text(" " + printable(line), no_wrap=True, overflow="ellipsis")


def rule(title: str, width: int) -> Text:
    return Text(f"─ {title} ".ljust(width, "─"), style="dim", no_wrap=True, overflow="crop")


def head(view: View, text: Texts, width: int) -> Text:
    """The run, and to the right what it is doing."""
    said, start = state(view, text), view.figures.start
    parts = [view.run_dir]
    if start.get("parameters"):
        parts.append(count_of(start["parameters"], text))
    if start.get("device"):
        parts.append(devices_of(view.figures.world_size, str(start["device"]), text))
    run = Text(fitted(" " + printable(" · ".join(parts)), width - said.cell_len - 2) + " ", style="bold")
    return Text.assemble(run, said, no_wrap=True, overflow="ellipsis")


def bar(view: View, text: Texts, width: int) -> Text:
    """How far the run is: steps and epochs."""
    figures, total = view.figures, view.figures.start.get("total_steps")
    key = "progress.of" if total else "progress"
    count = f" {text(key, step=view.step, total=total, share=view.share)} "
    done, epochs = epochs_of(figures.start, figures.train) if figures.train else ("", "")
    epoch = f" {printable(text('epochs', done=done, total=epochs) if epochs else '')} "
    room = max(0, width - cell_len(count) - cell_len(epoch))
    done = round(room * view.share)
    return Text.assemble(count, ("━" * done, "green"), ("─" * (room - done), "dim"), epoch, no_wrap=True)


def devices(view: View, text: Texts) -> list[Text]:
    """A title, and a line for each rank that has a status here, or for what the journal says of the first."""
    titles = [text(name) for name in DEVICE_COLUMNS]
    statuses = view.statuses or [status_of_journal(view.figures)]
    rows = [device_cells(status, view.sensors.get(status.uuid), text) for status in statuses]
    widths = [
        max(map(cell_len, column)) if any(column[1:]) else 0  # a column that nothing is known of is left out
        for column in zip(titles, *([str(cell) for cell in row] for row in rows), strict=True)
    ]
    styles = ["" if is_alive(status, view.now) else "dim" for status in statuses]
    lines = zip([titles, *rows], ["dim", *styles], strict=True)
    return [_joined(cells, widths, style) for cells, style in lines]


def _joined(cells, widths, style):
    line = Text(style=style, no_wrap=True, overflow="ellipsis")
    for cell, width in zip(cells, widths, strict=True):
        if width:
            line.append(" ").append(cell).append(" " * (width - cell_len(str(cell)) + 1))
    return line


def rows_for(rows: dict[str, str], room: int, width: int) -> dict[str, str]:
    """`rows` without so many of LEAST_NEEDED that `room` lines hold the others, or without all of those."""
    too_many = max(len(rows) - max(room, 0) * num_columns(width), 0)
    dropped = [name for name in LEAST_NEEDED if name in rows][:too_many]
    return {name: value for name, value in rows.items() if name not in dropped}


def num_columns(width: int) -> int:
    """In how many columns the rows stand."""
    return 2 if width >= WIDE else 1


def table_of(rows: dict[str, str], width: int) -> list[Text]:
    """Names and values, in two columns of rows on a wide terminal."""
    name_width, columns = max(map(cell_len, rows)), num_columns(width)
    room = width // columns - name_width - 3
    cells = [
        Text.assemble((f" {fitted(name, name_width)}  ", "dim"), fitted(printable(value), room))
        for name, value in rows.items()
    ]
    return [
        Text.assemble(*cells[start : start + columns], no_wrap=True, overflow="ellipsis")
        for start in range(0, len(cells), columns)
    ]


def fitted(words: str, width: int) -> str:
    """`words` in exactly `width` columns of the terminal, cut or filled with spaces."""
    return words if cell_len(words) == width else set_cell_size(words, max(0, width))
