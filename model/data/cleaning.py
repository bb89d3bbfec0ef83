"""Cleans the text of a pair, or gives the reason to drop the pair."""

import re

REASONS = ("empty prompt", "empty response", "damaged text", "private use", "too long")
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


def clean_text(text: str) -> str:
    """The text with plain spaces and newlines, trimmed, without control and invisible characters; emoji stay whole."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_PLAIN)
    return _STRAY_JOINER.sub("", _STRAY_SELECTOR.sub("", text)).strip()
