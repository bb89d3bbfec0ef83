"""Files of prompts and responses to pairs of text, one row at a time: the only reader of users' data files.

Reads .json, .jsonl, .csv, .tsv and .parquet, text as UTF-8 or GB18030. A file is never held whole: memory is bounded
by one buffer, one item of MAX_ITEM_CHARS and one parquet batch. Whatever is wrong with a file is a ValueError that
names the file, what was seen and what to do. Reading drops no row, but malformed ones for a caller who asks for that;
clean_pair says which pairs are of no use, and why.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from model.data.columns import as_text, describe_missing, find_columns, joined
from model.data.parquet_rows import parquet_rows
from model.data.text_files import open_text, table_rows
from model.runtime.json_stream import MAX_ITEM_CHARS, JsonText, OnMalformed, refuse

DIALOGUE_COLUMNS = frozenset({"conversation", "conversations", "messages", "dialogue", "dialog", "turns", "data"})
TALK_COLUMNS = DIALOGUE_COLUMNS - {"data"}  # rows in them follow from one another
USER_ROLES = frozenset({"user", "human", "prompter", "用户"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "助手"})

MAX_NESTING = 8
TURNS, COLUMN, CONTEXT = "turns", "column", "context"  # what a row may hold that no pair has
MAX_NAMED, MAX_NAME_CHARS = 20, 40


class NoRows(ValueError):
    """A file without a single row."""


@dataclass(frozen=True)
class _Asked:
    """What the caller of read_pairs wants, and where it is told what it does not get."""

    prompt_column: str
    response_column: str
    on_malformed: OnMalformed
    ignored: Counter

    def ignore(self, kind: str, name: str, count: int = 1) -> None:
        key = kind, name[:MAX_NAME_CHARS]
        if count > 0:
            self.ignored[key if key in self.ignored or len(self.ignored) < MAX_NAMED else (kind, "")] += count

    def ignore_columns(self, row: dict, used: tuple[str, ...]) -> None:
        """Count the columns of the row that hold something and are not among the used ones."""
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
    """Every row of the file as (prompt, response), in file order and uncleaned; a missing or null side is "".

    A column named by the caller is used alone. Otherwise each shape of row is mapped by itself: the prompt is the first
    of PROMPT_COLUMNS with text in it, the response is the first of RESPONSE_COLUMNS that exists. What else the rows
    hold is added to `ignored`, which describe_ignored puts into words.
    Raises ValueError for an unreadable file, no rows (NoRows), or no usable columns in row 1.
    """
    asked = _Asked(prompt_column, response_column, on_malformed, Counter() if ignored is None else ignored)
    rows = _rows(Path(path), asked)
    first = next(rows, None)
    if first is None:
        left_out = describe_ignored(asked.ignored)
        raise NoRows(
            f"{path}: no rows found{left_out and f' ({left_out})'}; write one prompt and one response a row (a turn of "
            f"a dialogue counts when its role is one of {', '.join(sorted(USER_ROLES | ASSISTANT_ROLES))})"
        )
    sides = find_columns(tuple(first), prompt_column, response_column)
    typed = dict(prompt=prompt_column, response=response_column)
    missing = {side: name for (side, name), columns in zip(typed.items(), sides, strict=True) if not columns}
    if missing:
        raise ValueError(f"{path}: {describe_missing(missing, first)}")
    for row in chain([first], rows):
        prompts, response = find_columns(tuple(row), prompt_column, response_column)
        prompt, used = next(((text, pick) for pick in prompts if (text := joined(row, pick))), ("", ()))
        asked.ignore_columns(row, (*used, *response))
        yield prompt, joined(row, response)


def describe_ignored(ignored: Counter) -> str:
    """What read_pairs counted in `ignored`, in words; "" where that is nothing."""
    words = {TURNS: "turns of role", COLUMN: "column", CONTEXT: "what was said before"}
    units = {TURNS: "turns", COLUMN: "rows", CONTEXT: "pairs of longer dialogues"}
    told = {kind: [] for kind in words}
    for (kind, name), count in ignored.most_common():
        unit = units[kind] if count > 1 else units[kind].replace("s", "", 1)
        told[kind].append(
            f"({count:,} {unit})" if kind == CONTEXT else f"{repr(name) if name else 'others'} ({count:,} {unit})"
        )
    lines = [f"{words[kind]} {', '.join(names)}" for kind, names in told.items() if names]
    return f"not used: {'; '.join(lines)}" if lines else ""


def read_rows(
    path: str | Path, prompt_column: str = "", response_column: str = "", on_malformed: OnMalformed = refuse
) -> Iterator[dict]:
    """Every row of the file as {column: value}; each question of a dialogue with its answer is a row of its own.

    A row with a prompt and a response is a pair, whatever else it holds. A dialogue is a list of {role, content} or
    {from, value} turns, of texts that take turns, or of rows. What is not a user's or an assistant's turn is left out;
    a question without an answer gives an empty response, and the reverse.
    Raises ValueError, at the first row it cannot read; a malformed one (a line of JSON lines, a null, a csv row with
    too many cells, a dialogue with such a turn) is left out where on_malformed returns.
    """
    return _rows(Path(path), _Asked(prompt_column, response_column, on_malformed, Counter()))


def _rows(path: Path, asked: _Asked) -> Iterator[dict]:
    if not path.is_file():
        folder = f"it is a folder; name a file in it (prepare_data takes several: {path}/*.json)"
        raise ValueError(f"{path}: {folder if path.is_dir() else 'no such file; check the name'}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: cannot read a {path.suffix or 'nameless'} file; give one of {', '.join(_READERS)}")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty (0 bytes); write or download it again")
    yield from reader(path, asked)


def _parquet_rows(path: Path, asked: _Asked) -> Iterator[dict]:
    index = 0

    def rows() -> Iterator[dict]:
        nonlocal index
        for index, row in parquet_rows(path, asked.on_malformed):  # noqa: B007
            yield row

    yield from _flatten(rows(), lambda: f"{path} row {index + 1:,}", asked)


def _json_rows(path: Path, asked: _Asked) -> Iterator[dict]:
    with open_text(path) as file:
        text = JsonText(file)
        for items in text.values(asked.on_malformed):
            yield from _flatten(items, lambda: f"{path} line {text.line():,}", asked)


def _table_rows(path: Path, asked: _Asked) -> Iterator[dict]:
    return table_rows(path, asked.on_malformed)


def _flatten(items: Iterable, place: Callable[[], str], asked: _Asked, depth: int = 0) -> Iterator[dict]:
    question, num_answers = None, 0
    for item in items:
        is_pair = isinstance(item, dict) and _is_pair(item, asked)
        name, nested = ("", None) if is_pair else _dialogue(item)
        if nested is not None:
            yield from _nested(item, name, place, asked, depth + 1)
            continue
        if isinstance(item, str):  # texts take turns: without one of them the others would change sides
            asked = replace(asked, on_malformed=refuse)
        role, text = ("", "") if is_pair else _turn(item, asked, is_answer=question is not None)
        if role in USER_ROLES:
            question = text if question is None else question + "\n" + text
            if len(question) > MAX_ITEM_CHARS:
                raise ValueError(
                    f"{place()}: a user's turns of more than {MAX_ITEM_CHARS:,} characters, no answer between"
                )
        elif role in ASSISTANT_ROLES:
            yield {"prompt": question or "", "response": text}
            question, num_answers = None, num_answers + 1
            asked.ignore(CONTEXT, "", num_answers > 1)
        elif not isinstance(item, dict):
            asked.on_malformed(
                f"{place()}: a row is {str(item)[:40]}; it must be an object with a prompt and a response"
            )
        elif role:
            asked.ignore(TURNS, role)
        else:
            yield item
    if question is not None:
        asked.ignore(CONTEXT, "", num_answers > 0)
        yield {"prompt": question, "response": ""}


def _nested(item: object, name: str, place: Callable[[], str], asked: _Asked, depth: int) -> Iterable[dict]:
    """The rows of a list, or of the list in a row's column `name`: all of them or, where one is malformed, none."""
    items, found = (item[name] if name else item), replace(asked, on_malformed=refuse, ignored=Counter())
    try:
        if depth > MAX_NESTING:
            raise ValueError(f"{place()}: lists nested more than {MAX_NESTING} deep; give a list of rows or dialogues")
        rows = list(_flatten(items, place, found, depth))
    except ValueError as error:
        asked.on_malformed(str(error))
        return ()
    if name:
        found.ignore_columns(item, (name,))
    if name in TALK_COLUMNS and (CONTEXT, "") not in found.ignored:
        found.ignore(CONTEXT, "", len(rows) - 1)
    for (kind, told), count in found.ignored.items():
        asked.ignore(kind, told, count)
    return rows


def _is_pair(row: dict, asked: _Asked) -> bool:
    """Whether the row is a pair itself, whatever else it holds; beside empty columns a dialogue is meant."""
    prompts, response = find_columns(tuple(row), asked.prompt_column, asked.response_column)
    if not (prompts and response):
        return False
    if DIALOGUE_COLUMNS.isdisjoint(row) or _dialogue(row)[1] is None:
        return True
    return bool(any(joined(row, pick) for pick in prompts) and joined(row, response))


def _dialogue(item: object) -> tuple[str, list | None]:
    """(column, list of turns or rows) of a row; ("", the item) where it is a list itself, else ("", None)."""
    if isinstance(item, list):
        return "", item
    for name, value in item.items() if isinstance(item, dict) else ():
        if isinstance(value, list) and name in DIALOGUE_COLUMNS and isinstance((value or [0])[0], dict | list | str):
            return name, value
    return "", None


def _turn(item: object, asked: _Asked, is_answer: bool) -> tuple[str, str]:
    if isinstance(item, str):
        return ("assistant" if is_answer else "user"), as_text(item)
    if isinstance(item, dict):
        for role, text in (("role", "content"), ("from", "value")):
            if isinstance(item.get(role), str) and text in item:
                name = item[role].strip().lower()
                if name:
                    asked.ignore_columns(item, (role, text))
                return name, as_text(item[text])
    return "", ""


_READERS = {
    ".json": _json_rows,
    ".jsonl": _json_rows,
    ".csv": _table_rows,
    ".tsv": _table_rows,
    ".parquet": _parquet_rows,
}
