"""Which columns of a row are the prompt and the response, and how their values become text."""

import json
from collections import Counter

import pytest

from model.data.file_request import describe_ignored
from model.data.values import as_text
from tests.data.files import pairs_of, read_pairs, refusal, write, write_json, write_json_lines


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"instruction": "翻译", "input": "", "output": "a"}, ("翻译", "a")),
        ({"input": None, "output": "a", "instruction": "翻译"}, ("翻译", "a")),
        ({"instruction": "翻译", "input": "<noinput>", "output": "a"}, ("翻译", "a")),
        ({"instruction": "翻译", "input": "hello", "output": "a"}, ("翻译\nhello", "a")),
        ({"instruction": "", "input": "hello", "output": "a"}, ("hello", "a")),
        ({"title": "t", "ask": "问", "department": "d", "answer": "a"}, ("问", "a")),
        ({"title": "t", "ask": " ", "department": "d", "answer": "a"}, ("t", "a")),
        ({"question": "q", "std_answer": "", "class": "c"}, ("q", "")),
        ({"问题": "q", "回答": "a"}, ("q", "a")),
        ({"title": "t", "提问": "q", "答案": "a"}, ("q", "a")),
        ({"问": "q", "答": "a"}, ("q", "a")),
        ({"指令": "翻译", "输入": "hello", "输出": "a"}, ("翻译\nhello", "a")),
        ({"Prompt": 12, "Response ": True}, ("12", "true")),
        ({"prompt": ["x", {"text": "y"}, None], "response": {"deep": 1}}, ("x\ny", '{"deep": 1}')),
        ({"prompt": float("nan"), "response": 1.5}, ("", "1.5")),
        ({"prompt": "\ud800x", "response": "\ud83d\ude00"}, ("\ufffdx", "\U0001f600")),
    ],
)
def test_the_prompt_is_the_first_known_column_with_text_and_the_response_the_first_that_exists(tmp_path, row, pair):
    assert pairs_of(write(tmp_path / "r.jsonl", json.dumps(row))) == [pair]


def test_named_columns_are_used_and_a_missing_one_is_refused_with_the_columns_found(tmp_path):
    path = write_json(tmp_path / "r.json", [{"prompt": "p", "response": "r", "output": "o", "input": "i"}])
    assert pairs_of(path, prompt_column="input", response_column="output") == [("i", "o")]
    assert pairs_of(path, response_column="prompt") == [("i", "p")]
    message = refusal(path, prompt_column="promt")
    assert "no 'promt' column; found 'prompt', 'response', 'output', 'input'" in message
    assert "--prompt_column=NAME" in message and "--response_column" not in message
    assert "no '问题' or '回答' column; found 'prompt'" in refusal(path, prompt_column="问题", response_column="回答")


def test_every_value_becomes_text_that_utf8_can_encode():
    values = [
        None,
        3,
        False,
        0.5,
        float("nan"),
        b"\xe6\xb1\x89\xff",
        "\udc00",
        {"a": "汉"},
        [[1]],
        ["a", {"text": "b"}],
    ]
    texts = ["", "3", "false", "0.5", "", "汉\ufffd", "\ufffd", '{"a": "汉"}', "[[1]]", "a\nb"]
    assert [as_text(value) for value in values] == texts


def test_messages_stay_short_however_many_columns_a_file_has(tmp_path):
    pair, ignored = {"prompt": "p", "response": "r"}, Counter()
    rows = [pair | {f"column {i} {j}" * 9: 1 for j in range(200)} for i in range(9)]
    assert list(read_pairs(write_json_lines(tmp_path / "x.jsonl", rows), ignored=ignored)) == [("p", "r")] * 9
    message = describe_ignored(ignored)
    assert len(message) < 2_000 and "others (1,780 rows, " in message
    message = refusal(write_json_lines(tmp_path / "y.jsonl", [{f"what is {i}?": f"it is {i}" for i in range(300)}]))
    assert "'what is 11?' and 288 more: name" in message and len(message) < 800


def test_a_column_that_is_not_used_is_named_with_its_share_of_the_characters(tmp_path):
    rows, ignored = [dict(prompt="p" * 10, response="r" * 10, note="n" * 60, tags=["t" * 10, "t" * 10])] * 3, Counter()
    assert len(list(read_pairs(write_json_lines(tmp_path / "x.jsonl", rows), ignored=ignored))) == 3
    assert describe_ignored(ignored) == (
        "not used: column 'note' (3 rows, 60% of their characters), 'tags' (3 rows, 20% of their characters)"
    )
