"""The forms in which people have conversations: what each file says, or why it is refused."""

import json
from collections import Counter

import pytest

from model.data.conversation import Document
from model.data.file_request import FileRequest, describe_ignored
from model.data.readers import followed, read_conversations, read_items

Q, A = dict(role="user", content="q"), dict(role="assistant", content="a")
Q2, A2 = dict(role="user", content="b"), dict(role="assistant", content="u")
PAIR, TALK = [("user", "q"), ("assistant", "a")], [("user", "q"), ("assistant", "a"), ("user", "b"), ("assistant", "u")]
CONTEXT = [("user", "q"), ("assistant", "a", "not learnt"), ("user", "b"), ("assistant", "u")]
CALL = dict(id="1", type="function", function=dict(name="area", arguments='{"a": 5}'))
CALLED = [
    ("user", "q"),
    ("assistant", "", '{"name": "area", "arguments": {"a": 5}}'),
    ("tool", "25"),
    ("assistant", "a"),
]
RESULT = dict(role="tool", tool_call_id="1", content="25")


def rows(*values):
    return "\n".join(json.dumps(value, ensure_ascii=False) for value in values)


def said(conversation):
    """What each turn says beyond the ordinary."""
    if isinstance(conversation, Document):
        return conversation.text
    turns = []
    for role, text, thought, calls, learnt in conversation.turns:
        more = (("thought: " + thought,) if thought else ()) + calls
        turns.append((role, text, *more, *([] if learnt or role != "assistant" else ["not learnt"])))
    return [*turns, conversation.tools] if conversation.tools else turns


# kind: (name of the file, its text, what its conversations say)
READ = {
    "messages": ("x.jsonl", rows(dict(messages=[Q, A])), [PAIR]),
    "system texts in their places": (
        "x.jsonl",
        rows(dict(messages=[Q, A, dict(role="system", content="s"), Q2, A2])),
        [[*TALK[:2], ("system", "s"), *TALK[2:]]],
    ),
    "parts": ("x.jsonl", rows(dict(messages=[dict(role="user", content=[dict(type="text", text="q")]), A])), [PAIR]),
    "parts with value": (
        "x.jsonl", rows(dict(messages=[dict(role="user", content=[dict(type="text", value="q")]), A])), [PAIR]
    ),
    "sharegpt": (
        "x.jsonl", rows({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}), [PAIR]
    ),
    "from and content": (
        "x.jsonl", rows({"conversations": [{"from": "user", "content": "q"}, {"from": "assistant", "content": "a"}]}),
        [PAIR],
    ),
    "firefly": (
        "x.jsonl", rows(dict(conversation=[dict(human="q", assistant="a"), dict(human="b", assistant="u")])), [TALK]
    ),
    "xtuner": (
        "x.jsonl", rows(dict(conversation=[dict(system="s", input="q", output="a"), dict(input="b", output="u")])),
        [[("system", "s"), *TALK]],
    ),
    "alpaca with history": (
        "x.jsonl", rows(dict(instruction="b", input="", output="u", history=[["q", "a"]], system="s")),
        [[("system", "s"), *CONTEXT]],
    ),
    "history as JSON": ("x.jsonl", rows(dict(instruction="b", output="u", history='[["q", "a"]]')), [CONTEXT]),
    "history as Python prints it": ("x.csv", "history,prompt,response\n\"[['q', 'a']]\",b,u\n", [CONTEXT]),
    "rows that go on": (
        "x.jsonl",
        rows(dict(prompt="q", response="a"), dict(prompt="b", response="u", history=[["q", "a"]])),
        [TALK],
    ),
    "what prepare_data wrote before": (
        "x.jsonl",
        rows(
            dict(prompt="q", response="a", system="s", history=[["", "hi"]]),
            dict(prompt="b", response="u", system="s", history=[["", "hi"], ["q", "a"]]),
            dict(prompt="q", response="a", system=None, history=None),
        ),
        [[("system", "s"), ("assistant", "hi", "not learnt"), *TALK], PAIR],
    ),
    "rows with an equal last exchange": (
        "x.jsonl",
        rows(
            dict(prompt="q", response="a", history=[["x", "y"]]), dict(prompt="b", response="u", history=[["q", "a"]])
        ),
        [[("user", "x"), ("assistant", "y", "not learnt"), *PAIR], CONTEXT],
    ),
    "trl's prompt and completion": ("x.jsonl", rows(dict(prompt=[Q, A, Q2], completion=[A2])), [CONTEXT]),
    "a preference": ("x.jsonl", rows(dict(prompt=[Q], chosen=[A], rejected=[A2])), [PAIR]),
    "a preference between conversations": ("x.jsonl", rows(dict(chosen=[Q, A], rejected=[Q, A2])), [PAIR]),
    "a preference beside messages": (
        "x.jsonl",
        rows({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}}),
        [PAIR],
    ),
    "kto": ("x.jsonl", rows(dict(prompt="q", completion="a", label=False)), [[PAIR[0], (*PAIR[1], "not learnt")]]),
    "weight": ("x.jsonl", rows(dict(messages=[Q, A | dict(weight=0), Q2, A2 | dict(weight=1)])), [CONTEXT]),
    "a weight of a table": (
        "x.jsonl",
        rows(
            dict(messages=[Q, A | dict(weight=0.0), Q2, A2 | dict(weight=1.0)]),
            dict(messages=[Q | dict(weight=0.5), A | dict(weight=float("nan"), loss="1.0", train="")]),
        ),
        [CONTEXT, PAIR],
    ),
    "loss": ("x.jsonl", rows(dict(messages=[Q, A | dict(loss=False), Q2, A2])), [CONTEXT]),
    "train_on_turn": ("x.jsonl", rows(dict(messages=[Q, A | dict(train_on_turn=False), Q2, A2])), [CONTEXT]),
    "calls": (
        "x.jsonl",
        rows(dict(messages=[Q, dict(role="assistant", content=None, tool_calls=[CALL]), RESULT, A])),
        [CALLED],
    ),
    "calls as text": (
        "x.jsonl",
        rows(dict(messages=[Q, dict(role="assistant", content="", tool_calls=json.dumps([CALL])), RESULT, A])),
        [CALLED],
    ),
    "sharegpt's calls": (
        "x.jsonl",
        rows({"conversations": [
            {"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "25"}, {"from": "gpt", "value": "a"},
        ], "tools": '[{"name": "area"}]'}),
        [[*CALLED, '[{"name": "area"}]']],
    ),
    "minimind's thoughts and tools": (
        "x.jsonl",
        rows(dict(conversations=[
            dict(role="system", content="s", tools='[{"name": "area"}]'), Q, A | dict(reasoning_content="t")
        ])),
        [[("system", "s"), ("user", "q"), ("assistant", "a", "thought: t"), '[{"name": "area"}]']],
    ),
    "messages as text in a cell": ("x.csv", 'id,messages\n1,"' + json.dumps([Q, A]).replace('"', '""') + '"\n', [PAIR]),
    "a passage": ("x.jsonl", rows(dict(instruction="q", context="c", response="a")), [[("user", "q\nc"), PAIR[1]]]),
    "squad": (
        "x.jsonl", rows(dict(question="q", context="c", answers=dict(text=["a"], answer_start=[1]))),
        [[("user", "q\nc"), PAIR[1]]],
    ),
    "squad as published": (
        "x.json",
        json.dumps(dict(version="1.1", data=[dict(title="t", paragraphs=[
            dict(context="c", qas=[dict(question="q", answers=[dict(text="a", answer_start=1)])])
        ])])),
        [[("user", "q\nc"), PAIR[1]]],
    ),
    "a row of metadata first": ("x.jsonl", rows(dict(version=1), dict(prompt="q", response="a")), [PAIR]),
    "columns of lists": ("x.json", json.dumps(dict(prompt=["q", "q"], response=["a", "a"])), [PAIR] * 2),
    "pandas' columns": ("x.json", json.dumps(dict(prompt={"0": "q"}, response={"0": "a"})), [PAIR]),
    "pandas' split": ("x.json", json.dumps(dict(columns=["prompt", "response"], index=[0], data=[["q", "a"]])), [PAIR]),
    "pandas' index": ("x.json", json.dumps({"0": dict(prompt="q", response="a")}), [PAIR]),
    "the datasets server's": ("x.json", json.dumps(dict(rows=[dict(row=dict(prompt="q", response="a"))])), [PAIR]),
    "an object as a response": (
        "x.jsonl", rows(dict(prompt="q", response={"n": None})), [[PAIR[0], ("assistant", '{"n": null}')]]
    ),
    "a list as a response": (
        "x.jsonl", rows(dict(prompt="q", response=["a", 0, True])), [[PAIR[0], ("assistant", '["a", 0, true]')]]
    ),
    "user and assistant": ("x.jsonl", rows(dict(system="s", user="q", assistant="a")), [[("system", "s"), *PAIR]]),
    "Excel's separator": ("x.csv", "sep=;\nprompt;response\nq;a\n", [PAIR]),
    "Excel's Unicode text": ("x.csv", "prompt\tresponse\nq\ta\n".encode("utf-16"), [PAIR]),
    "UTF-16 without a mark": ("x.jsonl", rows(dict(prompt="q", response="a")).encode("utf-16-le"), [PAIR]),
    "texts": ("x.jsonl", rows(dict(text="t", source="s")), ["t"]),
    "lines": ("x.txt", "t\n\nt\n", ["t", "t"]),
}  # fmt: skip
FRACTION = "weight=0.5: an answer is learnt (1) or not (0): write one of them, or leave it out"
REFUSED = {
    "a fraction as a weight": ("x.jsonl", rows(dict(messages=[Q, A | dict(weight=0.5)])), f"line 1: {FRACTION}"),
    "a fraction in a list of turns": ("x.json", json.dumps([Q, A | dict(weight=0.5)]), FRACTION),
    "a fraction in a response": ("x.jsonl", rows(dict(prompt="q", response=A | dict(weight=0.5))), FRACTION),
    "a weight in words": ("x.jsonl", rows(dict(messages=[Q, A | dict(loss="half")])), "loss='half': an answer"),
    "texts in an object": ("x.jsonl", rows(dict(translation=dict(en="q", fr="a"))), "--prompt_column=translation.en"),
    "no header": ("x.csv", "你好,您好\n再见,再见\n", "the first line of a table must name its columns"),
    "Spanish": ("x.csv", "prompt,response\nseñores,niños\n".encode("cp1252"), "type --encoding=cp1252"),
    "Korean": ("x.csv", "prompt,response\n안녕하세요,반갑습니다\n".encode("euc_kr"), "euc_kr"),
    "traditional Chinese": ("x.csv", "prompt,response\n請問這是什麼,這是回答\n".encode("big5"), "type --encoding=big5"),
    "Python's quotes": ("x.jsonl", "{'prompt': 'q'}", "a single quote (') where JSON has double quotes"),
    "texts for training": ("x.txt", "t\n", "plain text does not say what is a prompt"),
    "gzip by another name": ("x.jsonl", b"\x1f\x8b\x08\x00", "it is compressed by gzip"),
    "a zip by another name": ("x.csv", b"PK\x03\x04aaaa", "it is a zip archive, as .xlsx is"),
    "parquet by another name": ("x.json", b"PAR1aaaa", "it is parquet: give it the suffix .parquet"),
    "JSON by another name": ("x.csv", rows(dict(prompt="q", response="a")), "it holds JSON: give it the suffix .jsonl"),
    "two values for a column": ("x.jsonl", '{"prompt": "q", "prompt": "b", "response": "a"}', "'prompt' twice in one"),
    "a choice of answers": (
        "x.jsonl", rows(dict(question="q", choices=["a", "b"], answer=1)), "the number of one of its 'choices'"
    ),
}  # fmt: skip


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("name", "content", "expected"), READ.values(), ids=READ)
def test_a_file_of_this_kind_says_its_conversations(tmp_path, name, content, expected):
    path = write(tmp_path, name, content)
    assert [said(item) for item in followed(read_items(path, FileRequest()))] == expected


@pytest.mark.parametrize(("name", "content", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_file_of_this_kind_is_refused_with_what_to_do(tmp_path, name, content, expected):
    with pytest.raises(ValueError) as caught:
        list(read_conversations(write(tmp_path, name, content)))
    assert str(tmp_path / name) in str(caught.value) and expected in str(caught.value)


def test_a_named_encoding_is_used_and_an_assumed_one_is_said(tmp_path):
    path = write(tmp_path, "x.csv", "prompt,response\nseñores,niños\n".encode("cp1252"))
    (found,) = read_items(path, FileRequest(encoding="cp1252"))
    assert found.turns[0].text == "señores"
    write(tmp_path, "x.csv", "prompt,response\n你好吗,我很好\n".encode("gb18030"))
    ignored = Counter()
    list(read_conversations(path, ignored=ignored))
    assert describe_ignored(ignored) == "read as GB18030 (Chinese)"


def test_texts_in_an_object_can_be_named(tmp_path):
    path = write(tmp_path, "x.jsonl", rows(dict(translation=dict(en="q", fr="a"))))
    (found,) = read_conversations(path, "translation.en", "translation.fr")
    assert said(found) == PAIR
