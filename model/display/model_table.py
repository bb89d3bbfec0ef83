"""Models beside each other: a table of their figures, and their answers to the same questions."""

from rich.cells import cell_len

from model.display.answers import FORMATS, told
from model.display.catalogue import Texts
from model.display.console import padded
from model.runtime.terminal import printable


def comparison_lines(scores: dict[str, dict], text: Texts) -> list[str]:
    """A table with a column for each model of `scores` (figures by name) and a row for each figure that one has."""
    names = [name for name in FORMATS if any(name in figures for figures in scores.values())]
    rows = [["", *map(printable, scores)]]
    rows += [[_name_of(name, text), *(told(figures, name) or "-" for figures in scores.values())] for name in names]
    return table_lines(rows)


def table_lines(rows: list[list[str]]) -> list[str]:
    """`rows` as lines of columns, all but the first of them right-aligned."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _name_of(figure, text):
    """The whole name of a figure, where no row says what it is of."""
    return text.get(f"test.{figure}", "") or text(f"measure.{figure}")


def _cells(row, widths):
    return [padded(cell, width, right=bool(place)) for place, (cell, width) in enumerate(zip(row, widths, strict=True))]


def answer_lines(answers: dict[str, list], count: int, text: Texts) -> list[str]:
    """The answers of each model, lists of Answer by its name, to the first `count` questions that all were asked.

    A question is known by its right answer: models of other families read it with other marks.
    """
    by_reference = [{each.reference: each for each in of_model} for of_model in answers.values()]
    shared = [each for each in next(iter(answers.values())) if all(each.reference in of for of in by_reference)]
    width = max(cell_len(name) for name in (*answers, text("test.reference")))
    lines = []
    for number, asked in enumerate(shared[:count], start=1):
        given = [of_model[asked.reference].answer for of_model in by_reference]
        said = {text("test.reference"): asked.reference} | dict(zip(answers, given, strict=True))
        lines.append(f"{number}. {_in_one_line(asked.question)}")
        lines += [f"  {padded(printable(name), width)}  {_in_one_line(words)}" for name, words in said.items()]
    return lines


def _in_one_line(words):
    return printable(" ".join(words.split()))
