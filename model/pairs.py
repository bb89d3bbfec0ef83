"""Files of prompts and responses to pairs of text, one row at a time: the only reader of users' data files.

Reads .json, .jsonl, .csv, .tsv and .parquet, text as UTF-8 or GB18030. A file is never held whole: memory is bounded
by one buffer, one item of MAX_ITEM_CHARS and one parquet batch. Whatever is wrong with a file is a ValueError that
names the file, what was seen and what to do. Reading drops no row, but malformed ones for a caller who asks for that;
clean_pair says which pairs are of no use, and why.
"""

import codecs
import csv
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from model.json_items import MAX_ITEM_CHARS, JsonText, OnMalformed, refuse

PROMPT_COLUMNS = tuple("prompt instruction question ask query 提问 问题 问 指令 title input text 输入".split())
RESPONSE_COLUMNS = tuple(
    "response output answer std_answer target completion reply chosen 回答 答案 答 回复 输出".split()
)
INPUT_OF = {"instruction": "input", "指令": "输入"}  # Alpaca's input belongs to its instruction
DIALOGUE_COLUMNS = frozenset({"conversation", "conversations", "messages", "dialogue", "dialog", "turns", "data"})
USER_ROLES = frozenset({"user", "human", "prompter", "用户"})
ASSISTANT_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "助手"})
NO_VALUE = frozenset({"<noinput>", "<nooutput>"})  # how Alpaca and its translations write "nothing"
REASONS = ("empty prompt", "empty response", "damaged text", "private use", "too long")

ENCODING_SAMPLE_BYTES = 1 << 20
MAX_NESTING = 8
PARQUET_BATCH_ROWS = 1000

_EMOJI = "\u203c-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
_STRAY_SELECTOR = re.compile(f"(?<![0-9#*\u00a9\u00ae{_EMOJI}])[\ufe0e\ufe0f]")
_STRAY_JOINER = re.compile(f"(?<![\ufe0f{_EMOJI}])\u200d|\u200d(?![{_EMOJI}])")
_ZERO_WIDTH = (0xAD, 0x61C, 0x180E, 0x200B, 0x200C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070))
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *_ZERO_WIDTH, 0xFEFF, *range(0xFFF9, 0xFFFD))
_SPACES = (0x09, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)
_BREAKS = (0x0A, 0x0B, 0x0C, 0x85, 0x2028, 0x2029)
_PLAIN = dict.fromkeys(_CONTROLS) | dict.fromkeys(_SPACES, " ") | dict.fromkeys(_BREAKS, "\n")
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")


class NoRows(ValueError):
    """A file without a single row."""


def read_pairs(
    path: str | Path, prompt_column: str = "", response_column: str = "", on_malformed: OnMalformed = refuse
) -> Iterator[tuple[str, str]]:
    """Every row of the file as (prompt, response), in file order and uncleaned; a missing or null side is "".

    A column named by the caller is used alone. Otherwise each shape of row is mapped by itself: the prompt is the first
    of PROMPT_COLUMNS with text in it, the response is the first of RESPONSE_COLUMNS that exists.
    Raises ValueError for an unreadable file, no rows (NoRows), or no usable columns in row 1.
    """
    rows = read_rows(path, on_malformed)
    first = next(rows, None)
    if first is None:
        raise NoRows(
            f"{path}: no rows found; write one prompt and one response a row (a turn of a dialogue counts when "
            f"its role is one of {', '.join(sorted(USER_ROLES | ASSISTANT_ROLES))})"
        )
    sides = find_columns(tuple(first), prompt_column, response_column)
    typed = dict(prompt=prompt_column, response=response_column)
    missing = {side: name for (side, name), columns in zip(typed.items(), sides, strict=True) if not columns}
    if missing:
        raise ValueError(f"{path}: {_describe_missing(missing, first)}")
    for row in chain([first], rows):
        prompts, responses = find_columns(tuple(row), prompt_column, response_column)
        yield next(filter(None, (_joined(row, columns) for columns in prompts)), ""), _joined(row, responses)


def _describe_missing(missing: dict[str, str], names: Iterable[str]) -> str:
    """What to tell of sides without a column; `missing` has the column typed for each, or ""."""
    return (
        f"no {' or '.join(repr(name) if name else side for side, name in missing.items())} column; found "
        f"{', '.join(map(repr, names)) or 'none'}: name the right one with "
        f"{' '.join(f'--{side}_column=NAME' for side in missing)} (without it: one of "
        f"{', '.join(PROMPT_COLUMNS)} for the prompt, {', '.join(RESPONSE_COLUMNS)} for the response)"
    )


@lru_cache(maxsize=256)
def find_columns(
    names: tuple[str, ...], prompt_column: str = "", response_column: str = ""
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """(the choices for a prompt, best first, each one or more columns to join; the response's column, or none)."""
    known = {str(name).strip().lower(): name for name in names}
    prompts = [(known[name],) for name in PROMPT_COLUMNS if name in known and known[name] != response_column]
    for name, addition in INPUT_OF.items():
        if name in known and addition in known:
            prompts = [(*pick, known[addition]) if pick == (known[name],) else pick for pick in prompts]
    responses = [known[name] for name in RESPONSE_COLUMNS if name in known and known[name] != prompt_column]
    if prompt_column:
        prompts = [(prompt_column,)] if prompt_column in names else []
    if response_column:
        responses = [response_column] if response_column in names else []
    return tuple(prompts), tuple(responses[:1])


def _joined(row: dict, columns: tuple[str, ...]) -> str:
    texts = (as_text(row[name]) for name in columns)
    return "\n".join(text for text in texts if text and not text.isspace())


def as_text(value: object) -> str:
    """The value as text that UTF-8 can hold: None and unknown nested values give "", a list its texts, one a line."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # json allows half of a surrogate pair
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return "" if value in NO_VALUE else value
    if isinstance(value, list):
        parts = (part.get("text") if isinstance(part, dict) else part for part in value)
        return "\n".join(as_text(part) for part in parts if isinstance(part, str) and part)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if isinstance(value, int | float) and value == value else ""


def clean_pair(prompt: str, response: str, max_chars: int) -> tuple[str, str] | str:
    """The pair with both sides cleaned, or the one of REASONS why it is of no use; max_chars bounds each side."""
    prompt, response = clean_text(prompt), clean_text(response)
    both = prompt + response
    is_long = max(len(prompt), len(response)) > max_chars
    problems = (not prompt, not response, "\ufffd" in both, _PRIVATE.search(both), is_long)
    return next((reason for reason, found in zip(REASONS, problems, strict=True) if found), (prompt, response))


def clean_text(text: str) -> str:
    """The text trimmed, with plain spaces and newlines, and without characters that show nothing and join nothing."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_PLAIN)
    return _STRAY_JOINER.sub("", _STRAY_SELECTOR.sub("", text)).strip()


def read_rows(path: str | Path, on_malformed: OnMalformed = refuse) -> Iterator[dict]:
    """Every row of the file as {column: value}; each question of a dialogue with its answer is a row of its own.

    A dialogue is a list of {role, content} or {from, value} turns, of texts that take turns, or of rows. What is not a
    user's or an assistant's turn is left out; a question without an answer gives an empty response, and the reverse.
    Raises ValueError, at the first row it cannot read; a malformed one (a line of JSON lines, a null, a csv row with
    too many cells, a dialogue with such a turn) is left out where on_malformed returns.
    """
    path = Path(path)
    if not path.is_file():
        folder = f"it is a folder; name a file in it (prepare_data takes several: {path}/*.json)"
        raise ValueError(f"{path}: {folder if path.is_dir() else 'no such file; check the name'}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: cannot read a {path.suffix or 'nameless'} file; give one of {', '.join(_READERS)}")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty (0 bytes); write or download it again")
    yield from reader(path, on_malformed)


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    with open(path, encoding=_find_encoding(path), newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: the start is {error.encoding}, but not all before byte {file.buffer.tell():,} is "
                f"({error.reason}); save the whole file as UTF-8"
            ) from None


def _find_encoding(path: Path) -> str:
    with open(path, "rb") as file:
        sample = file.read(ENCODING_SAMPLE_BYTES)
        is_whole = not file.read(1)
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            codecs.getincrementaldecoder(encoding)().decode(sample, is_whole)
            return encoding
        except UnicodeDecodeError as error:
            problem = f"byte {error.start:,}: {error.reason}"
    raise ValueError(
        f"{path}: neither UTF-8 nor GB18030 ({problem}); save it as UTF-8, or write it again if it was cut"
    )


def _csv_rows(path: Path, on_malformed: OnMalformed) -> Iterator[dict]:
    with _open_text(path) as file:
        reader = csv.reader(_lines(file), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            rows = filter(None, reader)
            header = [name.strip() for name in next(rows, [])]
            for cells in rows:
                if any(cells[len(header) :]):
                    on_malformed(
                        f"{path} line {reader.line_num}: {len(cells)} cells under {len(header)} columns; "
                        'put "quotes" around a cell that holds the separator'
                    )
                    continue
                yield dict.fromkeys(header, "") | dict(zip(header, cells, strict=False))
        except csv.Error as error:
            raise ValueError(
                f"{path} line {reader.line_num}: {error}; a cell holds at most {csv.field_size_limit():,} characters: "
                'look for a quote (") that is never closed'
            ) from None


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(MAX_ITEM_CHARS):
        if len(line) == MAX_ITEM_CHARS:
            raise ValueError(f"{file.name}: a line is longer than {MAX_ITEM_CHARS:,} characters; is this a text table?")
        yield line


def _parquet_rows(path: Path, on_malformed: OnMalformed) -> Iterator[dict]:
    try:
        # Without pre_buffer a row group is read page by page, so its size does not set the memory needed.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, use_threads=False):
                yield from _flatten(batch.to_pylist(), lambda: str(path), on_malformed)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: damaged or not parquet ({reason}); write or download it again") from None


def _json_rows(path: Path, on_malformed: OnMalformed) -> Iterator[dict]:
    with _open_text(path) as file:
        text = JsonText(file)
        for items in text.values(on_malformed):
            yield from _flatten(items, lambda: f"{path} line {text.line():,}", on_malformed)


def _flatten(items: Iterable, place: Callable[[], str], on_malformed: OnMalformed, depth: int = 0) -> Iterator[dict]:
    question = None
    for item in items:
        nested = item if isinstance(item, list) else _dialogue(item)
        if nested is not None:
            yield from _nested(nested, place, on_malformed, depth + 1)
            continue
        if isinstance(item, str):  # texts take turns: without one of them the others would change sides
            on_malformed = refuse
        role, text = _turn(item, is_answer=question is not None)
        if role in USER_ROLES:
            question = text if question is None else f"{question}\n{text}"
        elif role in ASSISTANT_ROLES:
            yield {"prompt": question or "", "response": text}
            question = None
        elif not isinstance(item, dict):
            on_malformed(f"{place()}: a row is {str(item)[:40]}; it must be an object with a prompt and a response")
        elif not role:
            yield item
    if question is not None:
        yield {"prompt": question, "response": ""}


def _nested(items: list, place: Callable[[], str], on_malformed: OnMalformed, depth: int) -> Iterable[dict]:
    """The rows of a list in a row: all of them or, where one is malformed, none."""
    try:
        if depth > MAX_NESTING:
            raise ValueError(f"{place()}: lists nested more than {MAX_NESTING} deep; give a list of rows or dialogues")
        return list(_flatten(items, place, refuse, depth))
    except ValueError as error:
        on_malformed(str(error))
        return ()


def _dialogue(item: object) -> list | None:
    if isinstance(item, dict):
        for name, value in item.items():
            if (
                isinstance(value, list)
                and name in DIALOGUE_COLUMNS
                and isinstance((value or [0])[0], dict | list | str)
            ):
                return value
    return None


def _turn(item: object, is_answer: bool) -> tuple[str, str]:
    if isinstance(item, str):
        return ("assistant" if is_answer else "user"), as_text(item)
    if isinstance(item, dict):
        for role, text in (("role", "content"), ("from", "value")):
            if isinstance(item.get(role), str) and text in item:
                return item[role].strip().lower(), as_text(item[text])
    return "", ""


_READERS = {
    ".json": _json_rows,
    ".jsonl": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}
