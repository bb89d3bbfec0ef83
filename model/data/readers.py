"""Reads users' data files into pairs of text, with or without what was said before; no other module reads them.

Formats: .json, .jsonl, .csv, .tsv, .parquet and .arrow, also with .gz or .zst, with text in UTF-8 or GB18030. Memory is
bounded by one buffer, one item of MAX_ITEM_CHARS and one record batch, whatever the size of the file. Every problem
with a file is a ValueError that names the file, what was found and what to do. All rows are kept, except malformed ones
if the caller handles them with `on_malformed`; cleaning.clean_pair drops pairs by content.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from model.data.arrow_rows import arrow_rows
from model.data.columns import PLAIN_TEXT, as_text, describe_missing, find_columns, join_columns
from model.data.compressed import data_suffix
from model.data.conversation import Context
from model.data.dialogue import (
    ASSISTANT_ROLES,
    CONTEXT_COLUMNS,
    DIALOGUE_COLUMNS,
    SYSTEM_COLUMN,
    SYSTEM_ROLES,
    TALK_COLUMNS,
    USER_ROLES,
    Dialogue,
    context_beside,
    find_turns,
    join_turns,
    read_turn,
)
from model.data.parquet_rows import parquet_rows
from model.data.text_files import open_text, table_rows
from model.runtime.json_stream import JsonText, OnMalformed, refuse

MAX_NESTING = 8
TURNS, COLUMN, CONTEXT = "turns", "column", "context"  # kinds of content that are read but not used
IGNORED_WORDS = {
    "unused": "not used", TURNS: "turns of role", COLUMN: "column", CONTEXT: "earlier turns", "others": "others",
    "unit.turns": "turns", "unit.column": "rows", "unit.context": "pairs of longer dialogues",
}  # fmt: skip
MAX_NAMED, MAX_NAME_CHARS = 20, 40


class NoRows(ValueError):
    """The file has no rows."""


@dataclass(frozen=True)
class _Request:
    """The caller's options for one file; `ignored` counts by (kind, name) the content that is not used."""

    prompt_column: str
    response_column: str
    on_malformed: OnMalformed
    ignored: Counter
    with_context: bool = False  # whether earlier turns and system texts are used

    def ignore(self, kind: str, name: str, count: int = 1) -> None:
        """Add to the count of (kind, name), or of (kind, "") when MAX_NAMED names are counted already."""
        key = kind, name[:MAX_NAME_CHARS]
        if count > 0:
            self.ignored[key if key in self.ignored or len(self.ignored) < MAX_NAMED else (kind, "")] += count

    def ignore_context(self, count: int) -> None:
        """Count the pairs of longer dialogues, unless they keep what was said before."""
        if not self.with_context:
            self.ignore(CONTEXT, "", count)

    def ignore_columns(self, row: dict, used: tuple[str, ...]) -> None:
        """Count the columns of the row that have a value and are not in `used`."""
        if len(row) > len(used):
            for name, value in row.items():
                if name not in used and value is not None and value not in ("", [], {}):
                    self.ignore(COLUMN, name)


def read_pairs(
    path: str | Path,
    prompt_column: str = "",
    response_column: str = "",
    on_malformed: OnMalformed = refuse,
    ignored: Counter | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (prompt, response) for each row of the file, in file order and uncleaned; a missing or null side is "".

    If the caller names a column, only that column is used. Otherwise the columns are found for each row by its own
    column names: the prompt is the first of PROMPT_COLUMNS with text in it, the response is the first of
    RESPONSE_COLUMNS that exists. Other content is counted in `ignored` (see describe_ignored).
    Raises ValueError for an unreadable file, NoRows for a file without rows, and ValueError if row 1 has no usable
    columns.
    """
    request = _Request(prompt_column, response_column, on_malformed, Counter() if ignored is None else ignored)
    return ((prompt, response) for prompt, response, _ in _pairs(path, request))


def read_pairs_in_context(
    path: str | Path,
    prompt_column: str = "",
    response_column: str = "",
    on_malformed: OnMalformed = refuse,
    ignored: Counter | None = None,
) -> Iterator[tuple[str, str, Context | None]]:
    """Yield the pairs of `read_pairs`, each with the Context that was said before it, or None.

    A dialogue's context is its system text and its earlier turns; that of a row with a pair is in its columns `system`
    (a text) and `history` ([[question, answer], …]). A list of turns as a whole file is one dialogue.
    """
    request = _Request(prompt_column, response_column, on_malformed, Counter() if ignored is None else ignored, True)
    return _pairs(path, request)


def _pairs(path: str | Path, request: _Request) -> Iterator[tuple[str, str, Context | None]]:
    prompt_column, response_column = request.prompt_column, request.response_column
    rows = _rows(Path(path), request)
    first = next(rows, None)
    if first is None:
        not_used = describe_ignored(request.ignored)
        raise NoRows(
            f"{path}: no rows found{not_used and f' ({not_used})'}; write one prompt and one response per row (a turn "
            f"of a dialogue counts if its role is one of {', '.join(sorted(USER_ROLES | ASSISTANT_ROLES))})"
        )
    sides = find_columns(tuple(first[0]), prompt_column, response_column)
    given = dict(prompt=prompt_column, response=response_column)
    missing = {side: name for (side, name), columns in zip(given.items(), sides, strict=True) if not columns}
    if missing:
        raise ValueError(f"{path}: {describe_missing(missing, first[0])}")
    for row, context in chain([first], rows):
        prompt, response, used = _sides(row, request)
        if request.with_context and not CONTEXT_COLUMNS.isdisjoint(row):
            beside, more = context_beside(row)
            context, used = context or beside, used + more
        request.ignore_columns(row, used)
        yield prompt, response, context


def _sides(row: dict, request: _Request) -> tuple[str, str, tuple[str, ...]]:
    """(prompt, response, the columns that they were read from) of a row."""
    prompts, response = find_columns(tuple(row), request.prompt_column, request.response_column)
    prompt, used = next(((text, pick) for pick in prompts if (text := join_columns(row, pick))), ("", ()))
    return prompt, join_columns(row, response), (*used, *response)


def describe_ignored(ignored: Counter, words: dict[str, str] | None = None) -> str:
    """The counts that read_pairs added to `ignored`, as one phrase for a message; "" if there are none.

    `words` are those of IGNORED_WORDS in another language.
    """
    words = words or IGNORED_WORDS
    names_by_kind = {kind: [] for kind in (TURNS, COLUMN, CONTEXT)}
    for (kind, name), count in ignored.most_common():
        unit = words[f"unit.{kind}"] if count > 1 else words[f"unit.{kind}"].replace("s", "", 1)
        named = "" if kind == CONTEXT else f"{repr(name) if name else words['others']} "
        names_by_kind[kind].append(f"{named}({count:,} {unit})")
    lines = [f"{words[kind]} {', '.join(names)}" for kind, names in names_by_kind.items() if names]
    return f"{words['unused']}: {'; '.join(lines)}" if lines else ""


def read_rows(
    path: str | Path, prompt_column: str = "", response_column: str = "", on_malformed: OnMalformed = refuse
) -> Iterator[dict]:
    """Yield each row of the file as {column: value}; a dialogue gives one row per question with its answer.

    A row with a prompt and a response is a pair, whatever other columns it has. A dialogue is a list of
    {role, content} or {from, value} turns, of alternating texts, or of rows. Turns of other roles than user and
    assistant are left out; a question without an answer gives an empty response, and an answer without a question an
    empty prompt.
    Raises ValueError at the first unreadable row. A malformed row (a broken JSON line, a null, a csv row with too many
    cells, a dialogue with a malformed turn) is passed to `on_malformed` and left out if that returns.
    """
    request = _Request(prompt_column, response_column, on_malformed, Counter())
    return (row for row, _ in _rows(Path(path), request))


def _rows(path: Path, request: _Request) -> Iterator[tuple[dict, Context | None]]:
    if not path.is_file():
        raise ValueError(f"{path}: " + ("it is a folder; name a file in it" if path.is_dir() else "no such file"))
    reader = _READERS.get(data_suffix(path))
    if reader is None:
        hint = f"; {PLAIN_TEXT} (scripts/train_tokenizer.py reads it)" if data_suffix(path) == ".txt" else ""
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; give one of {', '.join(_READERS)}{hint}")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty (0 bytes); write or download it again")
    yield from reader(path, request)


def _column_rows(path: Path, request: _Request) -> Iterator[tuple[dict, Context | None]]:
    index, read = 0, arrow_rows if data_suffix(path) == ".arrow" else parquet_rows

    def rows() -> Iterator[dict]:
        nonlocal index
        for index, row in read(path, request.on_malformed):  # noqa: B007
            yield row

    yield from _flatten(rows(), lambda: f"{path} row {index + 1:,}", request)


def _json_rows(path: Path, request: _Request) -> Iterator[tuple[dict, Context | None]]:
    with open_text(path) as file:
        text = JsonText(file)
        for items in text.values(request.on_malformed):
            yield from _flatten(items, lambda: f"{path} line {text.line():,}", request)


def _table_rows(path: Path, request: _Request) -> Iterator[tuple[dict, Context | None]]:
    return ((row, None) for row in table_rows(path, request.on_malformed))


def _flatten(
    items: Iterable, place: Callable[[], str], request: _Request, depth: int = 0, said: Dialogue | None = None
) -> Iterator[tuple[dict, Context | None]]:
    """Yield the rows of `items`, each with its context; `said` is given if they follow from one another, like turns."""
    rows_follow, question, num_answers = said is not None and request.with_context, None, 0
    for item in items:
        is_pair = isinstance(item, dict) and _is_pair(item, request)
        name, nested = ("", None) if is_pair else find_turns(item)
        if nested is not None:
            yield from _nested(item, name, place, request, depth + 1)
            continue
        if isinstance(item, str):  # texts alternate: if one is left out, the later ones change sides
            request = replace(request, on_malformed=refuse)
        role, text, columns = ("", "", ()) if is_pair else read_turn(item, is_answer=question is not None)
        if role and columns:
            request.ignore_columns(item, columns)
        if role in USER_ROLES:
            question = join_turns(question, text, place)
        elif role in ASSISTANT_ROLES:
            row, num_answers = {"prompt": question or "", "response": text}, num_answers + 1
            said = said or Dialogue()
            yield row, said.next_context(row["prompt"], text) if request.with_context else None
            question = None
            request.ignore_context(num_answers > 1)
        elif not isinstance(item, dict):
            request.on_malformed(
                f"{place()}: a row is {str(item)[:40]}; it must be an object with a prompt and a response"
            )
        elif role in SYSTEM_ROLES and request.with_context:
            said = said or Dialogue()
            said.add_system(text)
        elif role:
            request.ignore(TURNS, role)
        else:
            yield item, _row_context(said, item, request) if rows_follow else None
    if question is not None:
        request.ignore_context(num_answers > 0)
        yield {"prompt": question, "response": ""}, None


def _row_context(said: Dialogue, row: dict, request: _Request) -> Context | None:
    """The context of a pair that is a row of a dialogue; its system text holds for the rows behind it too."""
    said.add_system(as_text(row.get(SYSTEM_COLUMN)))
    return said.next_context(*_sides(row, request)[:2])


def _nested(
    item: object, name: str, place: Callable[[], str], request: _Request, depth: int
) -> Iterable[tuple[dict, Context | None]]:
    """The rows of a nested list, or of the list in column `name` of a row; none if any of them is malformed."""
    items, nested = (item[name] if name else item), replace(request, on_malformed=refuse, ignored=Counter())
    try:
        if depth > MAX_NESTING:
            raise ValueError(f"{place()}: lists nested more than {MAX_NESTING} deep; give a list of rows or dialogues")
        system = as_text(item.get(SYSTEM_COLUMN)) if name in TALK_COLUMNS and request.with_context else ""
        said = Dialogue(system) if name in TALK_COLUMNS else None
        rows = list(_flatten(items, place, nested, depth, said))
    except ValueError as error:
        request.on_malformed(str(error))
        return ()
    if name:
        nested.ignore_columns(item, (name, SYSTEM_COLUMN) if system else (name,))
    if name in TALK_COLUMNS and (CONTEXT, "") not in nested.ignored:
        nested.ignore_context(len(rows) - 1)
    for (kind, label), count in nested.ignored.items():
        request.ignore(kind, label, count)
    return rows


def _is_pair(row: dict, request: _Request) -> bool:
    """True if the row itself is a pair; False if its prompt or response is empty and it also has a dialogue."""
    prompts, response = find_columns(tuple(row), request.prompt_column, request.response_column)
    if not (prompts and response):
        return False
    if DIALOGUE_COLUMNS.isdisjoint(row) or find_turns(row)[1] is None:
        return True
    return bool(any(join_columns(row, pick) for pick in prompts) and join_columns(row, response))


_READERS = {
    ".json": _json_rows,
    ".jsonl": _json_rows,
    ".csv": _table_rows,
    ".tsv": _table_rows,
    ".parquet": _column_rows,
    ".arrow": _column_rows,
}
