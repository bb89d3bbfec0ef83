"""What a chat template can say, found by rendering short conversations with it."""

import re
from ast import literal_eval
from dataclasses import dataclass

from model.data.template_process import GENERATION

WORDS = "\ue000q\ue001", "\ue000a\ue001", "\ue000s\ue001"  # no text has them: see rendered_text.py
_CALL = dict(type="function", function=dict(name=WORDS[2], arguments={"x": "y"}))
_TOOL = dict(
    type="function", function=dict(name=WORDS[2], description="d", parameters=dict(type="object", properties={}))
)
_QUESTION, _ANSWER = dict(role="user", content=WORDS[0]), dict(role="assistant", content=WORDS[1])
# What a template compares a content with, or looks for in it: texts without these take the way that placeholders take.
_LITERAL = r"""('(?:[^'\\\n]|\\.)+'|"(?:[^"\\\n]|\\.)+")"""
_LOOKS_FOR = re.compile(
    rf"{_LITERAL}\s+(?:not\s+)?in\b|[.|]\s*(?:startswith|endswith|r?split|replace|r?find|r?index|count|r?partition)"
    rf"\(\s*{_LITERAL}|==\s*{_LITERAL}"
)
TEXTS = (
    ("Hello World. It's 42 < 43 & \"so on\"", "多行\n\n  文本\tx"), ("a", "X" * 3000), ("{'json': [1, 2]}", "- a\n- b"),
    ("True", "http://a.b/c?d=e#f"), ("/no_think None", "```python\n  pass\n```"), ("é ﬁ Ａ", "0"),
)  # fmt: skip


@dataclass(frozen=True)
class Abilities:
    """What a template shows of a conversation, and how its answers begin."""

    thoughts: bool
    calls: bool
    results: bool
    tools: bool
    has_switch: bool  # enable_thinking changes how an answer begins
    header: str  # what it writes before each answer; "" if answers cannot be found by it
    openings: tuple[str, ...]  # what may follow the header before an answer, longest first
    prompts: tuple[str, str]  # how a prompt ends with thinking off and on; "" where a template has none
    opens_thought: tuple[bool, bool]  # whether an answer begins inside a thought, with thinking off and on


def probes() -> list[dict]:
    """The requests that `abilities` takes the answers of."""
    asked = [_QUESTION]
    called = [_QUESTION, dict(role="assistant", content="", tool_calls=[_CALL])]
    requests = [
        dict(messages=asked), dict(messages=asked, prompt=True), dict(messages=asked, prompt=True, thinking=False),
        dict(messages=asked, prompt=True, thinking=True),
        dict(messages=[_QUESTION, _ANSWER | dict(reasoning_content=WORDS[2])]), dict(messages=called),
        dict(messages=[*called, dict(role="tool", content=WORDS[1])]), dict(messages=asked, tools=[_TOOL]),
    ]  # fmt: skip
    return [dict(tools=None, prompt=False, thinking=None) | request for request in requests]


def abilities(shown: list[dict], is_control) -> Abilities:
    """The Abilities of the template that gives these answers to `probes`.

    `is_control(text)` tells whether a text holds a token that only a template writes; without one, answers are not
    found by what stands before them.
    """
    asked, *prompts, thought, call, result, tools = (one.get("text", "") for one in shown)
    begins = [text[len(asked) :] if text.startswith(asked) else "" for text in prompts]
    header = begins[0].split("<think>")[0]
    header = header if is_control(header) and all(text.startswith(header) for text in begins) else ""
    found = {text.removeprefix(header) for text in begins} - {""} if header else set()
    return Abilities(
        thoughts=WORDS[2] in thought,
        calls=WORDS[2] in call,
        results=WORDS[1] in result,
        tools=WORDS[2] in tools,
        has_switch=begins[1] != begins[2],
        header=header,
        openings=tuple(sorted(found, key=len, reverse=True)),
        prompts=tuple(begins[1:]),
        opens_thought=tuple(text.rstrip().endswith("<think>") for text in begins[1:]),
    )


def looked_for(template: str) -> re.Pattern:
    """Matches a text in which this template finds a literal that it looks for, white space aside."""
    literals = {literal_eval(one) for found in _LOOKS_FOR.findall(template) for one in found if one}
    roles = {"system", "user", "assistant", "tool", "function", "developer"}
    kept = sorted(text for text in literals - roles if text.strip())
    return re.compile("|".join(map(re.escape, kept)) or r"(?!)")


def marks_answers(template: str) -> bool:
    """Whether the template itself says what is learnt."""
    return GENERATION.search(template) is not None
