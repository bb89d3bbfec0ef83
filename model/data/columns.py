"""Finds the prompt and response columns of a row and turns their values into text."""

from collections.abc import Iterable
from functools import lru_cache

PROMPT_COLUMNS = tuple("prompt instruction question ask query 提问 问题 问 指令 title input text 输入".split())
RESPONSE_COLUMNS = tuple(
    "response output answer std_answer target completion reply chosen 回答 答案 答 回复 输出".split()
)
INPUT_OF = {"instruction": "input", "指令": "输入"}  # Alpaca's input belongs to its instruction
NO_VALUE = frozenset({"<noinput>", "<nooutput>"})  # how Alpaca and its translations write "nothing"
PLAIN_TEXT = (
    "plain text does not say what is a prompt and what its response: write them as columns of a .tsv, with prompt and "
    "response in its first line"
)
MAX_NAMES_LISTED, MAX_NAME_CHARS = 12, 40


def describe_missing(missing: dict[str, str], names: Iterable[str]) -> str:
    """The error message for sides without a column; `missing` maps each side to the column name given, or ""."""
    names = list(names)
    absent = f"no {' or '.join(repr(name) if name else side for side, name in missing.items())} column; found "
    if len(names) == 1:
        return f"{absent}{list_names(names)} and no other: {PLAIN_TEXT}"
    return (
        f"{absent}{list_names(names)}: name the right one with "
        f"{' '.join(f'--{side}_column=NAME' for side in missing)} (without it: one of "
        f"{', '.join(PROMPT_COLUMNS)} for the prompt, {', '.join(RESPONSE_COLUMNS)} for the response)"
    )


@lru_cache(maxsize=256)
def find_columns(
    names: tuple[str, ...], prompt_column: str = "", response_column: str = ""
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """(prompt candidates, response columns) among the column names.

    A prompt candidate is a tuple of columns to join; the best comes first. The response has one column or none.
    """
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


def list_names(names: Iterable[str]) -> str:
    """The first MAX_NAMES_LISTED names, each shortened to MAX_NAME_CHARS, and the number of the others."""
    names = [repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…") for name in names]
    others = f" and {len(names) - MAX_NAMES_LISTED:,} more" if len(names) > MAX_NAMES_LISTED else ""
    return (", ".join(names[:MAX_NAMES_LISTED]) or "none") + others


def join_columns(row: dict, columns: tuple[str, ...]) -> str:
    """The texts of these columns of the row, one per line, without blank ones."""
    texts = (as_text(row[name]) for name in columns)
    return "\n".join(text for text in texts if text and not text.isspace())


def as_text(value: object) -> str:
    """The value as text that UTF-8 can encode; a list gives its texts, one per line.

    None, NaN, NO_VALUE and any other nested value give "".
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # json allows a lone surrogate
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return "" if value in NO_VALUE else value
    if isinstance(value, list):
        parts = (part.get("text") if isinstance(part, dict) else part for part in value)
        return "\n".join(as_text(part) for part in parts if isinstance(part, str) and part)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if isinstance(value, int | float) and value == value else ""
