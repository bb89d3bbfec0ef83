"""Cleans the texts of a conversation, or gives the reason to leave it out."""

import re

from model.data.conversation import Conversation, Document, Turn

REASONS = ("empty prompt", "empty response", "damaged text", "private use", "too long", "not learnt")
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
    """The pair with both texts cleaned, or one of REASONS to drop it; a text may have `max_chars` characters."""
    prompt, response = clean_text(prompt), clean_text(response)
    both = prompt + response
    is_long = max(len(prompt), len(response)) > max_chars
    has_problem = (not prompt, not response, "\ufffd" in both, _PRIVATE.search(both), is_long)
    return next((reason for reason, found in zip(REASONS, has_problem, strict=False) if found), (prompt, response))


def clean_conversation(
    conversation: Conversation, max_chars: int, max_context_chars: int
) -> tuple[list[Conversation], str]:
    """(the usable parts of a conversation, cleaned; the reason for which turns of it were left out, or "").

    A text may have `max_chars` characters. Behind a turn that is unusable a part begins anew, with the next question,
    and so it does where more than `max_context_chars` characters were said. One without a learnt response is left out.
    """
    turns = conversation.turns
    if len(turns) == 2 and turns[0].role == "user" and turns[1] == ("assistant", turns[1].text, "", (), True):
        cleaned = clean_pair(turns[0].text, turns[1].text, max_chars)
        if isinstance(cleaned, str):
            return [], cleaned
        pair = Turn("user", cleaned[0]), Turn("assistant", cleaned[1])
        return [Conversation(pair, conversation.tools)], ""
    parts, reason = _usable_parts(turns, max_chars, max_context_chars)
    parts = [part for part in map(_up_to_last_response, parts) if part]
    if not parts and not reason:
        has_question = any(turn.role == "user" and turn.text.strip() for turn in turns)
        has_response = any(turn.role == "assistant" and turn.text.strip() for turn in turns)
        reason = "not learnt" if has_question and has_response else "empty response" if has_question else "empty prompt"
    return [Conversation(part, conversation.tools) for part in parts], reason


def clean_document(document: Document) -> tuple[list[Document], str]:
    """([the document, cleaned], "") or ([], the reason to leave it out)."""
    text = clean_text(document.text)
    reason = "empty prompt" if not text else _problem(Turn("user", text), len(text))
    return ([], reason) if reason else ([Document(text)], "")


def _usable_parts(turns, max_chars, max_context_chars):
    """(lists of turns, the first reason for which a turn was left out, or "")."""
    systems, parts, first_reason, num_chars, waits = [], [[]], "", 0, False
    for turn in turns:
        turn = turn._replace(text=clean_text(turn.text), thought=clean_text(turn.thought))
        if reason := _problem(turn, max_chars):
            first_reason = first_reason or reason
            if turn.role != "system":
                parts, num_chars, waits = [*parts, [*systems]], 0, True
            continue
        if turn.role == "system" and not any(each.role == "user" for each in parts[-1]):
            systems.append(turn)
        if turn.role == "user":
            waits = False
            if num_chars > max_context_chars:
                parts, num_chars = [*parts, [*systems]], 0
        if not waits and (turn.text or turn.thought or turn.calls):
            parts[-1].append(turn)
            num_chars += len(turn.text)
    return parts, first_reason


def _problem(turn, max_chars):
    texts = turn.text + turn.thought
    if "\ufffd" in texts:
        return "damaged text"
    if _PRIVATE.search(texts):
        return "private use"
    return "too long" if max(len(turn.text), len(turn.thought)) > max_chars else ""


def _up_to_last_response(turns):
    """The turns up to the last response that is learnt and has a question; [] if there is none."""
    first = next((place for place, turn in enumerate(turns) if turn.role == "user"), len(turns))
    ends = [place + 1 for place, turn in enumerate(turns) if place > first and turn.role == "assistant" and turn.learnt]
    return turns[: ends[-1]] if ends else []


def clean_text(text: str) -> str:
    """The text with plain spaces and newlines, trimmed, without control and invisible characters; emoji stay whole."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_PLAIN)
    return _STRAY_JOINER.sub("", _STRAY_SELECTOR.sub("", text)).strip()
