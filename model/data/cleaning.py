"""Cleans the text of a pair and of what was said before it, or gives the reason to drop the pair."""

import re
from functools import lru_cache

from model.data.conversation import Context, Turn

REASONS = ("empty prompt", "empty response", "damaged text", "private use", "too long")
NUM_FIRST_TEXTS = 4
_EMOJI = "\u203c-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
_STRAY_SELECTOR = re.compile(f"(?<![0-9#*\u00a9\u00ae{_EMOJI}])[\ufe0e\ufe0f]")
_STRAY_JOINER = re.compile(f"(?<![\ufe0f{_EMOJI}])\u200d|\u200d(?![{_EMOJI}])")
_ZERO_WIDTH = (0xAD, 0x61C, 0x180E, 0x200B, 0x200C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070))
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *_ZERO_WIDTH, 0xFEFF, *range(0xFFF9, 0xFFFD))
_SPACES = (0x09, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)
_BREAKS = (0x0A, 0x0B, 0x0C, 0x85, 0x2028, 0x2029)
_PLAIN = dict.fromkeys(_CONTROLS) | dict.fromkeys(_SPACES, " ") | dict.fromkeys(_BREAKS, "\n")
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")


def clean_pair(prompt: str, response: str, max_chars: int) -> tuple[str, str] | str:
    """The pair with both sides cleaned, or one of REASONS to drop it; a side may have `max_chars` characters."""
    prompt, response = clean_text(prompt), clean_text(response)
    both = prompt + response
    is_long = max(len(prompt), len(response)) > max_chars
    has_problem = (not prompt, not response, "\ufffd" in both, _PRIVATE.search(both), is_long)
    return next((reason for reason, found in zip(REASONS, has_problem, strict=True) if found), (prompt, response))


def clean_context(context: Context, max_chars: int, max_context_chars: int) -> tuple[Context | None, bool]:
    """(the context with every text cleaned, whether texts were left out because of what they hold).

    It begins behind the newest turn for which a pair would be dropped, and has at most `max_context_chars` characters
    beside the system text. None if nothing is left.
    """
    system = _clean_turn(context.system, max_chars)
    turns, is_shortened = [], system is None
    for turn in reversed(context.turns[max(0, context.end - max_context_chars) : context.end]):
        text = _clean_turn(turn.text, max_chars)
        is_shortened = is_shortened or text is None
        if text is None or (max_context_chars := max_context_chars - len(text)) < 0:
            break
        if text:
            turns.append(Turn(turn.role, text))
    return (Context(turns[::-1], len(turns), system or "") if turns or system else None), is_shortened


def first_texts(context: Context, prompt: str, response: str, max_chars: int) -> tuple[str, ...]:
    """The first NUM_FIRST_TEXTS texts of a cleaned pair's dialogue, cleaned: the same for its pairs but the first.

    More than one exchange, because many dialogues begin with the same greeting.
    """
    first = context.turns[: min(context.end, NUM_FIRST_TEXTS)]
    return (*(clean_text(turn.text[: 4 * max_chars]) for turn in first), prompt, response)[:NUM_FIRST_TEXTS]


def _clean_turn(text: str, max_chars: int) -> str | None:
    """The text cleaned, None if it is unusable; cleaning may shorten a text, but hardly by more than three quarters."""
    return _clean_short(text, max_chars) if len(text) <= 4 * max_chars else None


@lru_cache(maxsize=1024)  # a turn is in the contexts of all questions after it
def _clean_short(text, max_chars):
    text = clean_text(text)
    return None if "\ufffd" in text or _PRIVATE.search(text) or len(text) > max_chars else text


def clean_text(text: str) -> str:
    """The text with plain spaces and newlines, trimmed, without control and invisible characters; emoji stay whole."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_PLAIN)
    return _STRAY_JOINER.sub("", _STRAY_SELECTOR.sub("", text)).strip()
