"""An answer is taken apart into thought, text and calls, however the pieces of its text are cut."""

import json
import random

import pytest

from model.data.answer_parts import AnswerParts, Said, join_parts

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'
WRITTEN = '{"name": "weather", "arguments": {"city": "北京"}}'
NOW = '{"name": "now", "arguments": {}}'
ANSWERS = {  # text of the answer: its parts
    "": Said(),
    " 你好 \n": Said(text=" 你好 \n"),
    "<think>\n想一想\n\n再想\n</think>\n\n你好": Said("想一想\n\n再想", "你好"),
    "\n<think> sure </think> yes": Said("sure", "yes"),
    "<think>\n\n</think>\n\n你好\n": Said("", "你好\n"),
    "<think>\nit goes on </thi": Said("it goes on </thi"),
    "<think>": Said(),
    "a < b, <thin ice, <tool_cal": Said(text="a < b, <thin ice, <tool_cal"),
    "I write <think>\nx\n</think> so": Said(text="I write <think>\nx\n</think> so"),
    "<think>\none\n</think>\n\n<think> is a mark": Said("one", "<think> is a mark"),
    "</think> alone": Said(text="</think> alone"),
    CALL: Said(calls=(WRITTEN,)),
    f"Let me look.\n{CALL}": Said(text="Let me look.", calls=(WRITTEN,)),
    f"<think>\nI call <tool_call>.\n</think>\n\n{CALL}\n{CALL} \n": Said("I call <tool_call>.", "", (WRITTEN,) * 2),
    f"{CALL}\nThat was it.": Said(text="That was it.", calls=(WRITTEN,)),
    CALL[: -len("</tool_call>")]: Said(calls=(WRITTEN,)),
    '<tool_call>{"name": "now"}</tool_call>': Said(calls=(NOW,)),
    f"say <tool_call> or {CALL}": Said(text="say <tool_call> or", calls=(WRITTEN,)),
}
NO_CALLS = (
    '{"name": "f", "arguments": {"x": 1}', '{"name": 3, "arguments": {}}', '{"name": " ", "arguments": {}}', "[]", "",
    '{"name": "f", "arguments": "x"}', '{"name": "f", "arguments": [1]}', '{"arguments": {}}', "f(x)", "[" * 9999,
    '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": 1e999}}',
    '{"name": "f", "arguments": {"x": "\\ud83d"}}', '{"name": "f", "arguments": {"x": ' + "9" * 9999 + "}}",
)  # fmt: skip


def read(pieces, **how):
    """The Said that reading the pieces one by one gives together."""
    reader, last = AnswerParts(**how), len(pieces) - 1
    return join_parts(reader.add(piece, place == last) for place, piece in enumerate(pieces))


def cut(text, draw):
    """The text in pieces, some of them empty, at least one."""
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(len(text) + 3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_has_the_same_parts_however_it_is_cut(text):
    draw = random.Random(text)
    for pieces in ([text], list(text) or [""], [*text, ""], *(cut(text, draw) for _ in range(40))):
        assert read(pieces, reads_calls=True) == ANSWERS[text], pieces


@pytest.mark.parametrize("inside", NO_CALLS)
def test_what_is_no_call_stays_text_in_every_character(inside):
    text = f"so \n\n<tool_call>\n{inside}\n</tool_call>\n"
    assert read([text], reads_calls=True) == read(text, reads_calls=True) == Said(text=text)
    assert read([text + CALL], reads_calls=True) == Said(text=text.rstrip(), calls=(WRITTEN,)), "the next one is read"


def test_an_answer_may_begin_inside_the_thought():
    for text in ("\nhm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nyes"):
        assert read(text, in_thought=True) == Said("hm", "yes")
    assert read("hm\n", in_thought=True) == Said("hm")


def test_llama_3_s_bare_calls_are_read_where_there_are_tools():
    bare = WRITTEN.replace("arguments", "parameters")
    for text, calls in (
        (bare, [WRITTEN]), (f"<think>x</think>\n{bare};\n{bare}", [WRITTEN] * 2), (f"\n {bare}\n", [WRITTEN]),
        ('{"type": "function", "name": "now", "parameters": {}}', [NOW]),
    ):  # fmt: skip
        assert read(text, reads_calls=True, has_tools=True).calls == tuple(calls)
    for text in (f"{bare} is a call", bare[:-1], '{"name": "Li"', '{"a": 1}', "{", f"so: {bare}", f"{bare}; [1]"):
        assert read(text, reads_calls=True, has_tools=True) == Said(text=text)
    assert read(bare, reads_calls=True) == Said(text=bare)
    assert read(CALL, reads_calls=True, has_tools=True) == Said(calls=(WRITTEN,))


def test_calls_stay_text_where_none_are_read():
    assert read(f"<think>\nx\n</think>\n\n{CALL}") == Said("x", CALL)


def test_what_is_no_part_of_a_mark_is_given_at_once():
    reader = AnswerParts(reads_calls=True)
    assert [reader.add(piece) for piece in ("<think>\n", "a ", "b", "</", "x")] == [
        Said(), Said("a"), Said(" b"), Said(), Said("</x"),
    ]  # fmt: skip
    assert [reader.add(piece) for piece in ("</think>", "\n\n", "你", "好<", "b")] == [
        Said(), Said(), Said(text="你"), Said(text="好"), Said(text="<b"),
    ]  # fmt: skip


def test_no_mixture_of_marks_depends_on_the_cuts_or_loses_text():
    draw = random.Random(0)
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", WRITTEN, "{", "}", " ", "\n", "字", "<", "a"]
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randrange(8)))
        how = dict(in_thought=draw.random() < 0.2, reads_calls=draw.random() < 0.8, has_tools=draw.random() < 0.5)
        whole = read([text], **how)
        assert read(cut(text, draw), **how) == whole, (text, how)
        assert (whole.thought + whole.text).count("字") == text.count("字")
        assert all(json.loads(call)["name"] == "weather" for call in whole.calls)
