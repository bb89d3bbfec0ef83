"""Which columns of a row are its prompt and its response, and their values as text."""

from collections.abc import Iterable
from functools import lru_cache

PROMPT_COLUMNS = tuple("prompt instruction question ask query 提问 问题 问 指令 title input text 输入".split())
RESPONSE_COLUMNS = tuple(
    "response output answer std_answer target completion reply chosen 回答 答案 答 回复 输出".split()
)
INPUT_OF = {"instruction": "input", "指令": "输入"}  # Alpaca's input belongs to its instruction
NO_VALUE = frozenset({"<noinput>", "<nooutput>"})  # how Alpaca and its translations write "nothing"
MAX_TOLD, MAX_NAME_CHARS = 12, 40


def describe_missing(missing: dict[str, str], names: Iterable[str]) -> str:
    """What to tell of sides without a column; `missing` has the column typed for each, or ""."""
    return (
        f"no {' or '.join(repr(name) if name else side for side, name in missing.items())} column; found "
        f"{in_words(names)}: name the right one with "
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


def in_words(names: Iterable[str]) -> str:
    """The first of the names, cut where they are long, and how many there are more."""
    names = [repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…") for name in names]
    others = f" and {len(names) - MAX_TOLD:,} more" if len(names) > MAX_TOLD else ""
    return (", ".join(names[:MAX_TOLD]) or "none") + others


def joined(row: dict, columns: tuple[str, ...]) -> str:
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
