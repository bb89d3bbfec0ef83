"""The reader of data files: the common layouts, clear errors for other files, and bounded memory."""

import faulthandler
import json
import random
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.data.file_request import describe_ignored
from tests.data.files import pairs_of, read_pairs, refusal, without_shares, write, write_json, write_json_lines


def turns(speaker, content, **texts):
    return [{speaker: name, content: text} for name, text in texts.items()]


@pytest.mark.parametrize(
    "dialogue",
    [
        {"conversation": [{"system": "医生", "input": "q1", "output": "a1"}, {"input": "q2", "output": "a2"}]},
        {
            "messages": turns(
                "role", "content", system="s", user="q", assistant="a", critic="t", USER="b", Assistant="u"
            )
        },
        {"id": 7, "conversations": turns("from", "value", human="q", gpt="a", Human="b", bot="u")},
        turns("role", "content", user="q", assistant="a"),
        ["q", "a", "b", "u"],
        [["q", "a"], ["b", "u"]],
        {"data": [{"prompt": "q", "response": "a"}, {"prompt": "b", "response": "u"}]},
    ],
)
def test_each_question_of_a_dialogue_with_its_answer_is_a_pair(tmp_path, dialogue):
    once = pairs_of(write_json(tmp_path / "one.json", [dialogue]))
    assert once in ([("q1", "a1"), ("q2", "a2")], [("q", "a"), ("b", "u")], [("q", "a")])
    assert pairs_of(write_json(tmp_path / "two.json", [dialogue, dialogue])) == once * 2
    lines = "\n".join([json.dumps(dialogue)] * 2)
    assert pairs_of(write(tmp_path / "lines.jsonl", lines)) == once * 2


def test_what_one_side_says_in_a_row_is_one_turn_and_a_last_question_has_no_answer(tmp_path):
    said = [("user", "q1"), ("user", "q2"), ("assistant", "a"), ("assistant", "b"), ("critic", "x"), ("user", "q3")]
    path = write_json(tmp_path / "d.json", [{"messages": [{"role": role, "content": text} for role, text in said]}])
    assert pairs_of(path) == [("q1\nq2", "a\nb"), ("q3", "")]


def test_messages_in_parquet_are_dialogues_too(tmp_path):
    dialogue = turns("role", "content", user="高血压怎么办？", assistant="少吃盐，多运动。")
    pq.write_table(pa.table({"messages": [dialogue, dialogue]}), tmp_path / "d.parquet")
    assert pairs_of(tmp_path / "d.parquet") == [("高血压怎么办？", "少吃盐，多运动。")] * 2


def test_rows_with_different_columns_are_mapped_independently(tmp_path):
    rows = [{"prompt": "p", "response": "r"}, {"question": "q", "answer": "a"}, {"id": 3}]
    pairs, message = read_and_describe(tmp_path / "r.jsonl", rows)
    assert (pairs, message) == (
        [("p", "r"), ("q", "a")],
        "not used: in the file rows without a prompt and a response (1 row)",
    )


def test_json_lines_are_read_under_both_suffixes_and_nul_characters_are_kept(tmp_path):
    text = '\ufeff{"prompt": "a\\u0000", "response": "b"}\n\n{"prompt": "c", "response": "d"}'
    for name in ("x.json", "x.jsonl"):
        assert pairs_of(write(tmp_path / name, text)) == [("a\0", "b"), ("c", "d")]
    assert pairs_of(write(tmp_path / "x.csv", "prompt,response\na\0,b\n")) == [("a\0", "b")]


GOOD_ITEM = '{"prompt": "p", "response": "r"}'


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("x.json", "", "0 bytes"),
        ("x.json", "[]", "no rows"),
        ("x.jsonl", "\n \n", "no rows"),
        ("x.csv", "prompt,response\n", "no rows"),
        ("x.txt", "hello", "it holds texts without a response: plain text does not say"),
        ("x.doc", "hello", ".json, .jsonl, .csv, .tsv, .parquet, .txt"),
        ("x.json", f"[{GOOD_ITEM},\n{GOOD_ITEM},\n]", "line 3 (character 69): malformed JSON: a comma before the clos"),
        ("x.json", f"[{GOOD_ITEM},\n{GOOD_ITEM[:-2]}", "line 2 (character 63): malformed JSON: Unterminated string"),
        ("x.json", f"[{GOOD_ITEM}", "line 1 (character 33): malformed JSON: no , or ]"),
        ("x.json", f"[{GOOD_ITEM}\n{GOOD_ITEM}]", "line 2 (character 34): malformed JSON: no , or ]"),
        ("x.jsonl", f"{GOOD_ITEM}\n{{'prompt'}}\n" + GOOD_ITEM * 99, "line 2 (character 34): malformed JSON"),
        ("x.jsonl", "7", "a row is 7"),
        ("x.json", "[" * 100_000, "nested too deep"),
        ("x.json", "[" * 50 + "]" * 50, "nested more than 8 deep"),
        ("x.json", '[{"prompt": ' + "9" * 5000 + "}]", "malformed JSON: Exceeds the limit"),
        ("x.json", '{"a": 1, "b": 2}', "no prompt or response column; found 'a', 'b'"),
        ("x.json", '[{"text": "p"}]', "it holds texts without a response: plain text does not say"),
        ("x.jsonl", f'{{"prompt": "cut\n{GOOD_ITEM}', "malformed JSON: the line ends within a text; repair"),
        ("x.jsonl", '{"prompt": "\0"}', "malformed JSON: Invalid control character; repair"),
        ("x.csv", "标题;正文\na,b;c\n", "separated by ';': save it with commas as .csv, or with tabs as .tsv"),
        ("x.csv", "prompt\tresponse\na\tb\n", "separated by '\\t': give it the suffix .tsv"),
        ("x.tsv", "prompt,response\na,b\n", "separated by ',': give it the suffix .csv"),
        ("x.csv", "prompt,response\na,b,c\n", "line 2: 3 cells under 2 columns"),
        ("x.csv", 'prompt,response\n"' + "a\n" * 70_000, "is never closed, or write longer texts as .jsonl or"),
        ("x.parquet", b"PAR1 this is not parquet PAR1", "damaged or not parquet"),
    ],
)
def test_an_unreadable_file_is_refused_with_the_place_and_the_remedy(tmp_path, name, data, expected):
    assert expected in refusal(write(tmp_path / name, data))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    for folder in (tmp_path, tmp_path / "folder.json"):
        assert "it is a folder; name a file in it" in refusal(folder)


def test_an_endless_item_or_line_is_refused_before_it_fills_memory(tmp_path):
    endless = write(tmp_path / "x.json", '[{"prompt": "' + "a" * 20_000_000)
    said = refusal(endless)
    assert "an item has more than 16,777,216 characters" in said and "a text that is longer in several" in said
    said = refusal(endless.rename(tmp_path / "x.csv"))
    assert "a line is longer than 16,777,216 characters" in said and "into several rows" in said


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_file_of_30_megabytes_is_read_in_less_than_8_megabytes_of_memory(tmp_path, suffix):
    row = json.dumps({"prompt": "p" * 500, "response": "汉" * 500}, ensure_ascii=False)
    csv_row = f"{'p' * 500},{'汉' * 500}"
    shapes = {".json": ("[", row, ",\n"), ".jsonl": ("", row, "\n"), ".csv": ("prompt,response\n", csv_row, "\n")}
    opening, text, between = shapes[suffix]
    path = tmp_path / f"big{suffix}"
    with path.open("w", encoding="utf-8") as file:
        file.write(opening + text)
        file.writelines([between + text] * 14_999)
        file.write("]" if suffix == ".json" else "\n")
    assert path.stat().st_size > 30_000_000
    tracemalloc.start()
    try:
        assert sum(len(prompt) + len(response) for prompt, response in read_pairs(path)) == 15_000_000
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def small_files(folder):
    rows = [{"prompt": f"问题{i}", "response": f"回答 {i}\n" * i} for i in range(6)]
    write_json(folder / "a.json", rows)
    write_json(folder / "b.json", [{"messages": turns("role", "content", user="问", gpt="a")}] * 3)
    write(folder / "c.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    write(folder / "d.csv", ("ask,answer\n" + '问题,"回答\n""二"""\n' * 5).encode("gb18030"))
    pq.write_table(pa.Table.from_pylist(rows), folder / "e.parquet", compression="zstd")
    pq.write_table(pa.Table.from_pylist(rows), folder / "f.parquet", compression="none")
    return sorted(folder.iterdir())


def mutate(data, rng):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.choice(["flip", "set", "delete", "truncate", "repeat"]):
            case "flip":
                data[at] ^= 1 << rng.randrange(8)
            case "set":
                data[at] = rng.choice(b'\0\xff\x80"[]{},:\\\n\r9')
            case "delete":
                del data[at : at + rng.randint(1, 8)]
            case "truncate":
                del data[max(at, 1) :]
            case "repeat":
                data[at:at] = data[at : at + 20]
        data = data or bytearray(b"x")
    return bytes(data)


def test_a_damaged_file_gives_pairs_or_a_value_error(tmp_path):
    faulthandler.dump_traceback_later(120, exit=True)  # a hang must fail, not wait
    rng = random.Random(5)
    num_refused = num_read = 0
    for original in small_files(tmp_path):
        for number in range(70):
            damaged = write(tmp_path / f"damaged{number}{original.suffix}", mutate(original.read_bytes(), rng))
            try:
                found = pairs_of(damaged)
            except ValueError as error:
                assert str(damaged) in str(error)
                num_refused += 1
            else:
                assert all(isinstance(side, str) and side.encode() is not None for pair in found for side in pair)
                num_read += 1
    faulthandler.cancel_dump_traceback_later()
    assert num_refused > 100 and num_read > 30


ROW = {"prompt": "p", "response": "r"}
TURNS = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "critic", "user", "assistant")]


def read_and_describe(path, rows, **columns):
    """(pairs of a file of these rows, description of the content that is not used)."""
    ignored = Counter()
    return list(read_pairs(write_json_lines(path, rows), **columns, ignored=ignored)), without_shares(
        describe_ignored(ignored)
    )


@pytest.mark.parametrize(
    "more",
    [
        {"role": "tool", "content": "c"},
        {"role": "user", "content": "c"},
        {"from": "human", "value": "c"},
        {"data": ["q", "a"]},
        {"messages": TURNS},
        {"rejected": "x", "history": "q a"},
    ],
)
def test_a_row_with_a_prompt_and_a_response_is_a_pair_whatever_other_columns_it_has(tmp_path, more):
    pairs, message = read_and_describe(tmp_path / "x.jsonl", [ROW | more] * 6)
    assert pairs == [("p", "r")] * 6
    assert message == "not used: column " + ", ".join(f"{name!r} (6 rows)" for name in more)
    named = [{"q": "p", "a": "r"} | more]
    assert read_and_describe(tmp_path / "x.jsonl", named, prompt_column="q", response_column="a")[0] == [("p", "r")]


def test_a_dialogue_is_read_when_the_row_has_no_text_in_its_pair_columns(tmp_path):
    row = {"prompt": "p", "chosen": [{"role": "user", "content": "x"}], "messages": TURNS, "tools": []}
    pairs, message = read_and_describe(tmp_path / "x.jsonl", [row])
    assert pairs == [("u", "a"), ("u", "a")]
    assert "column 'prompt' (1 row), 'chosen' (1 row)" in message and "column 'tools'" not in message


def test_turns_of_other_roles_and_earlier_turns_are_counted_as_not_used(tmp_path):
    rows = [{"messages": TURNS, "id": 7}, {"conversation": [ROW, ROW | {"n": 1}]}]
    pairs, message = read_and_describe(tmp_path / "x.jsonl", rows)
    assert pairs == [("u", "a"), ("u", "a"), ("p", "r"), ("p", "r")]
    assert message == (
        "not used: turns of role 'critic' (1 turn); column 'id' (1 row), 'n' (1 row); "
        "in conversations system texts (1 time); earlier turns (2 pairs of longer dialogues)"
    )
    with pytest.raises(ValueError, match=r"no rows found \(not used: turns of role 'judge' \(2 turns\)\)"):
        read_and_describe(tmp_path / "y.jsonl", [{"role": "judge", "content": "x"}] * 2)


def test_empty_columns_and_malformed_dialogues_are_not_counted_as_not_used(tmp_path):
    assert read_and_describe(tmp_path / "x.jsonl", [ROW | {"history": [], "system": "", "id": None}] * 2)[1] == ""
    path, ignored = tmp_path / "y.jsonl", Counter()
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({"messages": [*TURNS, None]}))
    assert list(read_pairs(path, on_malformed=lambda problem: None, ignored=ignored)) == [("p", "r")]
    assert not ignored
