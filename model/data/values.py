"""How the values of a cell become text."""

import ast
import json
from datetime import date, time, timedelta
from decimal import Decimal

NO_VALUE = frozenset({"<noinput>", "<nooutput>"})  # how Alpaca and its translations write "nothing"
PART_KEYS = ("text", "value")  # of a part of a message: {"type": "text", "text": …}
MAX_PYTHON_CHARS = 1 << 16


def as_text(value: object) -> str:
    """The value as text that UTF-8 can encode; None, NaN and NO_VALUE give "".

    A list of texts and of {"type": "text", "text": …} gives these, one per line. Any other list, an object, a number,
    true and false are written as JSON, a date and a decimal number as Python shows them.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # json allows a lone surrogate
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return "" if value in NO_VALUE else value
    if value is None or value != value or value == {}:
        return ""
    if isinstance(value, list) and all(part is None or isinstance(_part_text(part), str) for part in value):
        return "\n".join(as_text(text) for part in value if (text := _part_text(part)))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    return as_text(as_json(value))


def as_json(value: object) -> str:
    """The JSON text of a value, with bytes, dates and decimal numbers as texts."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value):
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _part_text(part):
    """The text of a part of a message; None for what is none."""
    if isinstance(part, dict) and part.get("type", "text") == "text" and part.keys() <= {"type", "text", "value"}:
        return next((part[key] for key in PART_KEYS if isinstance(part.get(key), str)), None)
    return part if isinstance(part, str) else None


def written(value: object) -> object:
    """The list or object that a text writes, in JSON or as Python prints it; any other value is given back."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value) if len(value) <= MAX_PYTHON_CHARS else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value
