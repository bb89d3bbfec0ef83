"""Finds the prompt and response columns of a row."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from model.data.values import as_text

PROMPT_COLUMNS = tuple(
    "prompt instruction question ask query problem 提问 问题 问 指令 input text title 输入 user human".split()
)
RESPONSE_COLUMNS = tuple(
    "response output solution answer std_answer target completion reply chosen answers 回答 答案 答 回复 输出 "
    "assistant".split()
)
# What a prompt is about belongs to it: Alpaca's input, Dolly's and SQuAD's context.
ADDITIONS = {"instruction": ("input", "context"), "指令": ("输入",), "question": ("context",), "prompt": ("context",)}
MESSAGE_COLUMNS = tuple("messages conversations conversation dialogue dialog turns data".split())
SYSTEM_COLUMNS, HISTORY_COLUMN, TOOL_COLUMNS = ("system", "system_prompt"), "history", ("tools", "functions")
LABEL_COLUMNS = ("label", "kto_tag")  # false: the response is one to avoid
CHOSEN_COLUMN, REJECTED_COLUMN = "chosen", "rejected"  # the better and the worse one of two responses
CHOICE_COLUMNS = ("choices", "options")  # of a question, whose answer may be the number of one
SPECIAL_COLUMNS = {*CHOICE_COLUMNS, *MESSAGE_COLUMNS, *SYSTEM_COLUMNS, HISTORY_COLUMN, *TOOL_COLUMNS, *LABEL_COLUMNS}
PLAIN_TEXT = (
    "plain text does not say what is a prompt and what its response: to learn it as text, type --objective=span (a T5) "
    "or --objective=text (a decoder); to train on pairs, write them as columns of a .tsv, with prompt and response in "
    "its first line"
)
MAX_NAMES_LISTED, MAX_NAME_CHARS = 12, 40


def describe_missing(missing: dict[str, str], names: Iterable[str]) -> tuple[str, str]:
    """(what the pair lacks, what to do); `missing` maps each part without a column to the column name given, or ""."""
    absent = " or ".join(repr(name) if name else part for part, name in missing.items())
    return f"no {absent} column; found {list_names(list(names))}", (
        f": name the right one with {' '.join(f'--{part}_column=NAME' for part in missing)} (without it: one of "
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
    prompts = [(*pick, *_additions(pick[0], known)) for pick in prompts]
    responses = [known[name] for name in RESPONSE_COLUMNS if name in known and known[name] != prompt_column]
    if prompt_column:
        prompts = [(prompt_column,)] if prompt_column in names else []
    if response_column:
        responses = [response_column] if response_column in names else []
    return tuple(prompts), tuple(responses[:1])


def _additions(name, known):
    added = ADDITIONS.get(str(name).strip().lower(), ())
    return [known[addition] for addition in added if addition in known]


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a row are what, by its names."""

    prompts: tuple[tuple[str, ...], ...]  # the best first; the columns of one are joined
    response: str  # or ""
    messages: tuple[str, ...]
    is_plain: bool  # it has a prompt and a response, and nothing that belongs to a conversation


@lru_cache(maxsize=256)
def layout_of(names: tuple[str, ...], prompt_column: str = "", response_column: str = "") -> Columns:
    """The Columns of a row with these column names."""
    prompts, responses = find_columns(names, prompt_column, response_column)
    messages = tuple(name for name in MESSAGE_COLUMNS if name in names)
    is_plain = bool(prompts and responses and SPECIAL_COLUMNS.isdisjoint(names))
    return Columns(prompts, responses[0] if responses else "", messages, is_plain)


def list_names(names: Iterable[str]) -> str:
    """The first MAX_NAMES_LISTED names, each shortened to MAX_NAME_CHARS, and the number of the others."""
    names = [repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…") for name in names]
    others = f" and {len(names) - MAX_NAMES_LISTED:,} more" if len(names) > MAX_NAMES_LISTED else ""
    return (", ".join(names[:MAX_NAMES_LISTED]) or "none") + others


def join_columns(row: dict, columns: tuple[str, ...]) -> str:
    """The texts of these columns of the row, one per line, without blank ones."""
    texts = (as_text(row[name]) for name in columns)
    return "\n".join(text for text in texts if text and not text.isspace())
