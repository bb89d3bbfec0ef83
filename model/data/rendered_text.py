"""Conversations that a chat template renders with their real texts, as transformers' apply_chat_template does.

A control token that a text spells is kept out of the template: a place stands for it, and the ids of its characters in
that place. What the template writes is parsed, so thoughts, calls and tools get the tokens that it gives them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import ujson

from model.data.control_tokens import control_texts
from model.data.conversation import Turn
from model.data.template_abilities import Abilities
from model.data.tokenizer import ChatTokenizer

_PLACE = re.compile("\ue000([0-9]+)\ue001")
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True)
class Draft:
    """A request to a template, and the texts that its places stand for."""

    request: dict
    spelled: list[str]


def messages_of(turns: Sequence[Turn]) -> list[dict]:
    """The turns as transformers' messages."""
    messages = []
    for turn in turns:
        message = dict(role=turn.role, content=turn.text)
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [dict(type="function", function=function_of(text)) for text in turn.calls]
        messages.append(message)
    return messages


def function_of(text: str) -> dict:
    """The name and arguments of a call's JSON text; a text that is none is a call of that name."""
    try:
        call = ujson.loads(text)
    except ValueError:
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        call = dict(name=text)
    return dict(name=call["name"], arguments=call.get("arguments", {}))


class Guard:
    """Keeps what steers a network out of the texts that a template is given."""

    def __init__(self, tokenizer: ChatTokenizer):
        texts = sorted(control_texts(tokenizer.backend), key=len, reverse=True)
        self.pattern = re.compile("|".join(["[\ue000\ue001]", *map(re.escape, texts)]))
        self.ids = {tokenizer.backend.token_to_id(text) for text in texts}
        self.tokenizer = tokenizer
        normalizer = type(tokenizer.backend.normalizer).__name__
        self.folds = normalizer not in ("NoneType", "NFC")  # it may make a control token of ＜/s＞

    def draft(
        self, turns: Sequence[Turn], tools: str = "", prompt: bool = False, thinking: bool | None = None
    ) -> Draft:
        """The Draft of a conversation; with `prompt` the beginning of an answer follows it."""
        spelled, listed = [], ujson.loads(tools) if tools else None
        values = dict(messages=messages_of(turns), tools=[listed] if isinstance(listed, dict) else listed)
        return Draft(self._kept_out(values, spelled) | dict(prompt=prompt, thinking=thinking), spelled)

    def _kept_out(self, value, spelled):
        """`value` with a place for each control token that its texts spell; these are added to `spelled`."""
        if isinstance(value, list):
            return [self._kept_out(one, spelled) for one in value]
        if isinstance(value, dict):
            return {self._kept_out(key, spelled): self._kept_out(one, spelled) for key, one in value.items()}
        if not isinstance(value, str):
            return value
        count = len(spelled)
        text = self.pattern.sub(lambda match: _place(match.group(), spelled), value)
        if self.folds and not value.isascii() and not self.ids.isdisjoint(self.tokenizer.parse(text)):
            del spelled[count:]
            text = _place(value, spelled)
        return text


def _place(text, spelled):
    spelled.append(text)
    return f"\ue000{len(spelled) - 1}\ue001"


def encode_rendered(
    texts: list[str], spelled: list[list[str]], tokenizer: ChatTokenizer
) -> list[tuple[list[int], np.ndarray]]:
    """(ids, the character at which each of them begins) of each rendered text."""
    pieces = [_PLACE.split(text) for text in texts]
    parsed = iter(tokenizer.backend.encode_batch(list(chain(*(one[::2] for one in pieces))), add_special_tokens=False))
    found = []
    for text_pieces, kept in zip(pieces, spelled, strict=True):
        ids, starts, begin = [], [], 0
        for number, piece in enumerate(text_pieces):
            if number % 2:
                more = tokenizer.encode(kept[int(piece)])
                firsts, begin = np.full(len(more), begin), begin + len(piece) + 2
            else:
                encoding = next(parsed)
                more, firsts = encoding.ids, begin + np.array([start for start, _ in encoding.offsets], np.int64)
                begin += len(piece)
            ids += more
            starts.append(firsts)
        found.append((ids, np.concatenate(starts)))
    return found


def answer_spans(text: str, can: Abilities, end: str, learn_empty_thoughts: bool) -> list[tuple[int, int]] | None:
    """The characters [start, end) of each answer in a rendered text, with the token that ends it.

    What the template itself writes before an answer, such as an empty thought, is no part of it. None if one lacks its
    end.
    """
    spans, place = [], 0
    while (found := text.find(can.header, place)) >= 0:
        start = found + len(can.header)
        place = text.find(end, start)
        if place < 0:
            return None
        opening = next((one for one in can.openings if text.startswith(one, start)), "")
        if not (learn_empty_thoughts and EMPTY_THOUGHT.fullmatch(opening)):
            start += len(opening)
        place += len(end)
        spans.append((start, place))
    return spans


def is_inside(starts: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """bool: which tokens, beginning at these characters, hold a character of one of the spans."""
    inside = np.zeros(len(starts), bool)
    for start, end in spans:
        first = int(np.searchsorted(starts, start))
        if first == len(starts) or starts[first] != start:
            first -= 1
        inside[max(first, 0) : np.searchsorted(starts, end - 1, side="right")] = end > start
    return inside
