r"""The parts of an answer: what was thought before it, its text, and the calls of tools in it, as its text comes.

An answer is `<think>\nTHOUGHT\n</think>\n\nTEXT`, where TEXT may hold calls as
`<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`. A thought is only at the beginning: what an answer says of
`<think>` later is text. Llama-3 writes a call as an object alone, {"name": …, "parameters": {…}}. What begins as a call
and is none stays text.
"""

import json
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from model.data.thoughts import CLOSES, OPENS

THOUGHT = OPENS, CLOSES
CALL = "<tool_call>", "</tool_call>"
BARE_CALLS = '{"name"', '{"type"'  # with which Llama-3's calls begin, white space aside
BARE_CHARS = 64  # within which such a beginning stands


class Said(NamedTuple):
    """What of an answer is read; `calls` are JSON texts of {"name", "arguments"}."""

    thought: str = ""
    text: str = ""
    calls: tuple[str, ...] = ()


class AnswerParts:
    """Reads the text of one answer, which may come in pieces, however they are cut.

    `in_thought`: the prompt ends with <think>. `reads_calls`: marked calls are read as such, else they stay text; with
    `has_tools` so is an answer that is Llama-3's bare calls.
    """

    def __init__(self, in_thought: bool = False, reads_calls: bool = False, has_tools: bool = False):
        self._in_thought, self._reads_calls, self._has_tools = in_thought, reads_calls, has_tools
        self._held, self._searched = "", 0  # text that may be part of a mark or call; its length when last searched
        self._stage = self._begin
        self._thought, self._text, self._calls = "", "", []  # what is new

    def add(self, piece: str, is_last: bool = False) -> Said:
        """What is new with the next piece of the answer's text; with `is_last` nothing is held back any more."""
        self._held += piece
        while self._stage(is_last):
            pass
        new = Said(self._thought, self._text, tuple(self._calls))
        self._thought, self._text, self._calls = "", "", []
        return new

    # Each stage takes what it can from `_held`, and is True if it gave way to another one.

    def _begin(self, is_last):
        begun = self._held.lstrip()
        if begun.startswith(THOUGHT[0]):
            self._held, self._in_thought = begun[len(THOUGHT[0]) :], True
        elif THOUGHT[0].startswith(begun) and not is_last:
            return False
        self._stage = self._skip_to_thought if self._in_thought else self._lead
        return True

    def _skip_to_thought(self, is_last):
        return self._skip_space(self._think)

    def _think(self, is_last):
        place = self._held.find(THOUGHT[1])
        if place >= 0:
            self._thought += self._held[:place].rstrip()
            self._held, self._stage = self._held[place + len(THOUGHT[1]) :], self._skip_to_lead
            return True
        size = len(self._held) - (0 if is_last else overlap(self._held, THOUGHT[1]))
        self._thought += self._taken(self._held[:size].rstrip())
        return False

    def _skip_to_lead(self, is_last):
        return self._skip_space(self._lead)

    def _lead(self, is_last):
        """Llama-3's calls are the whole answer, so they are known at its end."""
        squeezed = "".join(self._held[:BARE_CHARS].split())
        if self._has_tools and any(one.startswith(squeezed) or squeezed.startswith(one) for one in BARE_CALLS):
            if not is_last:
                return False
            if calls := _bare_calls(self._held):
                self._calls += calls
                self._held = ""
        self._stage = self._speak
        return True

    def _speak(self, is_last):
        if not self._reads_calls:
            self._text += self._taken(self._held)
            return False
        place = self._held.find(CALL[0])
        if place >= 0:  # white space before a call is none of the text
            self._text += self._taken(self._held[:place].rstrip())
            self._stage, self._searched = self._call, 0
        elif is_last:
            self._text += self._taken(self._held)
        else:
            self._text += self._taken(self._held[: len(self._held) - overlap(self._held, CALL[0])].rstrip())
        return place >= 0

    def _call(self, is_last):
        place = self._held.find(CALL[1], max(self._searched - len(CALL[1]), 0))
        self._searched = len(self._held)
        if place < 0 and not is_last:
            return False
        begun = self._held.index(CALL[0]) + len(CALL[0])
        end = place if place >= 0 else len(self._held)
        call = _call_text(self._held[begun:end])
        if call is None:
            self._text += self._taken(self._held[:begun])
            self._stage = self._speak
        else:
            self._calls.append(call)
            self._held, self._stage = self._held[end + len(CALL[1]) :], self._skip_to_speech
        return True

    def _skip_to_speech(self, is_last):
        return self._skip_space(self._speak)

    def _skip_space(self, next_stage):
        self._held = self._held.lstrip()
        if self._held:
            self._stage = next_stage
        return bool(self._held)

    def _taken(self, beginning):
        self._held = self._held[len(beginning) :]
        return beginning


def join_parts(parts: Iterable[Said]) -> Said:
    """What an answer says whose pieces gave these."""
    thoughts, texts, calls = zip(Said(), *parts, strict=True)
    return Said("".join(thoughts), "".join(texts), tuple(chain.from_iterable(calls)))


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text`, shorter than `mark`, with which `mark` begins."""
    return next(size for size in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:size]))


def _call_text(text):
    """The JSON text of the call that `text` is; None if it is none."""
    try:
        return written_call(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _bare_calls(text):
    """The calls of a text that is nothing but objects, with semicolons or white space between them; [] for another."""
    calls, decoder = [], json.JSONDecoder()
    try:
        while text := text.lstrip(" \t\r\n;"):
            value, end = decoder.raw_decode(text)
            calls.append(written_call(value))
            text = text[end:]
    except (ValueError, RecursionError):
        return []
    return calls


def written_call(call: object) -> str:
    """The JSON text of a call; ValueError for what is no call, or cannot be said in JSON and UTF-8."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"].strip():
        raise ValueError(f"{call!r:.80} has no name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments={arguments!r:.80}: must be an object")
    text = json.dumps(dict(name=call["name"], arguments=arguments), ensure_ascii=False, allow_nan=False)
    text.encode()  # half a character, such as \ud83d, is refused
    return text
