"""What the readers keep of a dialogue: the system text and the turns before each question."""

import json
import time
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.data.file_request import describe_ignored
from model.data.readers import read_conversations
from model.data.t5_text import pairs_of
from tests.data.files import read_pairs, without_shares, write_json, write_json_lines


def said_before(path, ignored=None):
    """(system text, earlier texts, prompt, response) of each pair; both None without a context."""
    found, ignored = [], Counter() if ignored is None else ignored
    for prompt, response, context in pairs_of(read_conversations(path, ignored=ignored), ignored):
        turns = [turn.text for turn in context.turns[: context.end]] if context else None
        found.append((context and context.system, turns, prompt, response))
    return found


SYSTEM = dict(role="system", content="s")
Q1, A1, Q2, A2 = (dict(role=("user", "assistant")[place % 2], content=text) for place, text in enumerate("qabu"))
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "b"},
            {"from": "gpt", "value": "u"}]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, Q1, A1, Q2, A2]},
        {"messages": [dict(role="critic", content="t"), Q1, A1, Q2, A2], "system": "s"},
        {"conversations": SHAREGPT, "system": "s"},
        {"conversations": [{"from": "system", "value": "s"}, *SHAREGPT]},
        {"conversation": [{"system": "s", "input": "q", "output": "a"}, {"input": "b", "output": "u"}]},
    ],
)
def test_each_question_of_a_dialogue_keeps_the_system_text_and_the_turns_before_it(tmp_path, row):
    expected = [("s", [], "q", "a"), ("s", ["q", "a"], "b", "u")]
    assert said_before(write_json_lines(tmp_path / "x.jsonl", [row, row])) == expected * 2
    assert list(read_pairs(tmp_path / "x.jsonl")) == [("q", "a"), ("b", "u")] * 2
    if "conversation" not in row:
        pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "x.parquet")
        assert said_before(tmp_path / "x.parquet") == expected * 2


def test_a_pair_keeps_the_system_and_history_columns_beside_it(tmp_path):
    alpaca = dict(instruction="b", input="c", output="u")
    rows = [
        alpaca | dict(system="s", history=[["q", "a"], ["q2", "a2"]]),
        alpaca | dict(system="", history=[]),
        alpaca | dict(system=None, history=[[None, "a"], ["unanswered", None]]),
    ]
    ignored = Counter()
    found = said_before(write_json(tmp_path / "x.json", rows), ignored)
    assert found == [
        ("s", ["q", "a", "q2", "a2"], "b\nc", "u"), (None, None, "b\nc", "u"), ("", ["a"], "b\nc", "u"),
    ]  # fmt: skip
    assert not ignored


@pytest.mark.parametrize(
    "history", ["q a", ["q", "a"], [["q"]], [["q", "a", "b"]], [["q", 7]], [[["q"], "a"]], {"q": "a"}]
)
def test_a_history_of_another_form_is_not_used_and_counted(tmp_path, history):
    ignored = Counter()
    row = dict(prompt="p", response="r", history=history)
    assert said_before(write_json_lines(tmp_path / "x.jsonl", [row]), ignored) == [(None, None, "p", "r")]
    assert without_shares(describe_ignored(ignored)) == "not used: column 'history' (1 row)"


def test_dialogues_and_rows_without_a_dialogue_around_them_do_not_follow_from_one_another(tmp_path):
    rows = [{"data": [dict(prompt="q", response="a"), dict(prompt="b", response="u")]}, ["q", "a"], [["b", "u"]],
            dict(prompt="p", response="r")]  # fmt: skip
    assert {before for _, before, *_ in said_before(write_json(tmp_path / "x.json", rows))} == {None}


def test_turns_of_unknown_roles_are_left_out_and_counted_and_unanswered_questions_stay_pairs(tmp_path):
    turns = [Q1, A1, dict(role="critic", content="t"), dict(role="assistant", content="c"), Q2, Q2, A2, Q1]
    ignored = Counter()
    found = said_before(write_json_lines(tmp_path / "x.jsonl", [{"messages": turns}]), ignored)
    assert [pair[2:] for pair in found] == [("q", "a\nc"), ("b\nb", "u"), ("q", "")]
    assert found[1][1] == ["q", "a\nc"]
    assert describe_ignored(ignored) == "not used: turns of role 'critic' (1 turn)"


def test_a_dialogue_of_100000_turns_is_read_in_linear_time(tmp_path):
    turns = [dict(role=("user", "assistant")[place % 2], content=f"{place:06} {'x' * 20}") for place in range(100_000)]
    (tmp_path / "x.json").write_text(json.dumps(turns))
    started = time.perf_counter()
    pairs = list(pairs_of(read_conversations(tmp_path / "x.json"), Counter()))
    assert len(pairs) == 50_000 and time.perf_counter() - started < 20
    for prompt, _, context in pairs[1:]:
        assert int(context.turns[context.end - 1].text[:6]) == int(prompt[:6]) - 1
