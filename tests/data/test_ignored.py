"""What a row holds beside its pair is counted and named, and never costs the pair."""

import json
from collections import Counter

import pytest

from model.data.readers import describe_ignored, read_pairs

PAIR = {"prompt": "p", "response": "r"}
TURNS = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "tool", "user", "assistant")]


def read(path, rows, **columns):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    ignored = Counter()
    return list(read_pairs(path, **columns, ignored=ignored)), describe_ignored(ignored)


@pytest.mark.parametrize(
    "more",
    [
        {"role": "tool", "content": "c"},
        {"role": "user", "content": "c"},
        {"from": "human", "value": "c"},
        {"data": ["q", "a"]},
        {"messages": TURNS},
        {"history": [["q", "a"]], "system": "s", "rejected": "x"},
    ],
)
def test_a_row_with_a_prompt_and_a_response_is_a_pair_whatever_else_it_holds(tmp_path, more):
    pairs, told = read(tmp_path / "x.jsonl", [PAIR | more] * 6)
    assert pairs == [("p", "r")] * 6
    assert told == "not used: column " + ", ".join(f"{name!r} (6 rows)" for name in more)
    named = [{"q": "p", "a": "r"} | more]
    assert read(tmp_path / "x.jsonl", named, prompt_column="q", response_column="a")[0] == [("p", "r")]


def test_a_dialogue_beside_empty_columns_is_read_and_they_are_named(tmp_path):
    row = {"prompt": "p", "chosen": [{"role": "user", "content": "x"}], "messages": TURNS, "tools": []}
    pairs, told = read(tmp_path / "x.jsonl", [row])
    assert pairs == [("u", "a"), ("u", "a")]
    assert "column 'prompt' (1 row), 'chosen' (1 row)" in told and "tools" not in told


def test_turns_of_other_roles_and_lost_context_are_counted(tmp_path):
    pairs, told = read(tmp_path / "x.jsonl", [{"messages": TURNS, "id": 7}, {"conversation": [PAIR, PAIR | {"n": 1}]}])
    assert pairs == [("u", "a"), ("u", "a"), ("p", "r"), ("p", "r")]
    assert told == (
        "not used: turns of role 'system' (1 turn), 'tool' (1 turn); column 'id' (1 row), 'n' (1 row); "
        "what was said before (2 pairs of longer dialogues)"
    )
    with pytest.raises(ValueError, match=r"no rows found \(not used: turns of role 'tool' \(2 turns\)\)"):
        read(tmp_path / "y.jsonl", [TURNS[3]] * 2)


def test_what_a_plain_pair_or_a_malformed_dialogue_holds_is_not_counted(tmp_path):
    assert read(tmp_path / "x.jsonl", [PAIR | {"history": [], "system": "", "id": None}] * 2)[1] == ""
    path, ignored = tmp_path / "y.jsonl", Counter()
    path.write_text(json.dumps(PAIR) + "\n" + json.dumps({"messages": [*TURNS, None]}))
    assert list(read_pairs(path, on_malformed=lambda problem: None, ignored=ignored)) == [("p", "r")]
    assert not ignored


def test_however_many_columns_there_are_the_words_are_few(tmp_path):
    pairs, told = read(tmp_path / "x.jsonl", [PAIR | {f"column {i} {j}" * 9: 1 for j in range(200)} for i in range(9)])
    assert pairs == [("p", "r")] * 9 and len(told) < 2_000 and "others (1,780 rows)" in told
    with pytest.raises(ValueError) as refused:
        read(tmp_path / "y.jsonl", [{f"what is {i}?": f"it is {i}" for i in range(300)}])
    assert "'what is 11?' and 288 more: name" in str(refused.value) and len(str(refused.value)) < 800
