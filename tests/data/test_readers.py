"""The reader of data files: every shape found in the wild, clear errors for the rest, and memory that is bounded."""

import faulthandler
import json
import random
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.data.columns import as_text
from model.data.readers import read_pairs, read_rows

QUESTION, ANSWER = "高血压怎么办？", "少吃盐，多运动。"
PAIR = (QUESTION, ANSWER)


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_json(path, value):
    return write(path, json.dumps(value, ensure_ascii=False, indent=1))


def pairs_of(path, **columns):
    return list(read_pairs(path, **columns))


def refusal(path, **columns):
    with pytest.raises(ValueError) as caught:
        pairs_of(path, **columns)
    assert str(path) in str(caught.value)
    return str(caught.value)


def turns(speaker, content, **texts):
    return [{speaker: name, content: text} for name, text in texts.items()]


@pytest.mark.parametrize(
    "dialogue",
    [
        {"conversation": [{"system": "医生", "input": "q1", "output": "a1"}, {"input": "q2", "output": "a2"}]},
        {"messages": turns("role", "content", system="s", user="q", assistant="a", tool="t", USER="b", Assistant="u")},
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


def test_unanswered_and_unasked_turns_keep_their_place(tmp_path):
    said = [("user", "q1"), ("user", "q2"), ("assistant", "a"), ("assistant", "b"), ("tool", "x"), ("user", "q3")]
    path = write_json(tmp_path / "d.json", [{"messages": [{"role": role, "content": text} for role, text in said]}])
    assert pairs_of(path) == [("q1\nq2", "a"), ("", "b"), ("q3", "")]


def test_messages_in_parquet_are_dialogues_too(tmp_path):
    dialogue = turns("role", "content", user=QUESTION, assistant=ANSWER)
    pq.write_table(pa.table({"messages": [dialogue, dialogue]}), tmp_path / "d.parquet")
    assert pairs_of(tmp_path / "d.parquet") == [PAIR] * 2


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
        ({"Prompt": 12, "Response ": True}, ("12", "True")),
        ({"prompt": ["x", {"text": "y"}, None], "response": {"deep": 1}}, ("x\ny", "")),
        ({"prompt": float("nan"), "response": 1.5}, ("", "1.5")),
        ({"prompt": "\ud800x", "response": "\ud83d\ude00"}, ("\ufffdx", "\U0001f600")),
    ],
)
def test_columns_are_found_by_priority_and_an_empty_one_overwrites_nothing(tmp_path, row, pair):
    assert pairs_of(write(tmp_path / "r.jsonl", json.dumps(row))) == [pair]


def test_rows_of_different_shapes_are_mapped_each_by_itself(tmp_path):
    rows = [{"prompt": "p", "response": "r"}, {"question": "q", "answer": "a"}, {"id": 3}]
    assert pairs_of(write_json(tmp_path / "r.json", rows)) == [("p", "r"), ("q", "a"), ("", "")]


def test_named_columns_win_and_a_missing_one_lists_the_columns_found(tmp_path):
    path = write_json(tmp_path / "r.json", [{"prompt": "p", "response": "r", "output": "o", "input": "i"}])
    assert pairs_of(path, prompt_column="input", response_column="output") == [("i", "o")]
    assert pairs_of(path, response_column="prompt") == [("i", "p")]
    message = refusal(path, prompt_column="promt")
    assert "no 'promt' column; found 'prompt', 'response', 'output', 'input'" in message
    assert "--prompt_column=NAME" in message and "--response_column" not in message
    assert "no '问题' or '回答' column; found 'prompt'" in refusal(path, prompt_column="问题", response_column="回答")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_csv_in_utf8_or_gb18030_with_quoted_newlines(tmp_path, encoding):
    first = f'department,title,ask,answer\r\n内科,t,"第一行\r\n第二，""行""",{ANSWER}\r\n'
    text = first + f'\r\n外科,{QUESTION},,"a,b"\r\n儿科,t\r\n'
    path = write(tmp_path / "m.csv", text.encode(encoding))
    assert pairs_of(path) == [('第一行\r\n第二，"行"', ANSWER), (QUESTION, "a,b"), ("t", "")]
    tsv = write(tmp_path / "m.tsv", f"prompt\tresponse\n{QUESTION}\t{ANSWER}, b".encode(encoding))
    assert pairs_of(tsv) == [(QUESTION, ANSWER + ", b")]


@pytest.mark.parametrize("shift", range(4))
def test_a_character_cut_by_the_encoding_sample_does_not_change_the_encoding(tmp_path, shift):
    text = json.dumps({"prompt": "x" * shift + "汉" * 400_000, "response": "a"}, ensure_ascii=False)
    assert pairs_of(write(tmp_path / "u.json", text)) == [("x" * shift + "汉" * 400_000, "a")]
    assert pairs_of(write(tmp_path / "g.json", text.encode("gb18030")))[0][0].endswith("汉")


def test_bytes_in_no_known_encoding_are_refused_with_their_place(tmp_path):
    assert "neither UTF-8 nor GB18030 (byte " in refusal(write(tmp_path / "x.csv", b"prompt,response\n\xff\xff,\x80\n"))
    late = b'{"prompt": "p", "response": "r"}\n' * 40_000 + b'{"prompt": "\xff"}'
    assert "before byte 1,320,0" in refusal(write(tmp_path / "late.jsonl", late))


def test_json_lines_are_read_under_either_name_and_nul_bytes_do_no_harm(tmp_path):
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
        ("x.txt", "hello", ".json, .jsonl, .csv, .tsv, .parquet"),
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
        ("x.csv", "prompt,response\na,b,c\n", "line 2: 3 cells under 2 columns"),
        ("x.csv", 'prompt,response\n"' + "a\n" * 70_000, "field larger than field limit"),
        ("x.parquet", b"PAR1 this is not parquet PAR1", "damaged or not parquet"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place_and_the_remedy(tmp_path, name, data, expected):
    assert expected in refusal(write(tmp_path / name, data))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.json")
    (tmp_path / "folder.json").mkdir()
    for folder in (tmp_path, tmp_path / "folder.json"):
        assert f"it is a folder; name a file in it (prepare_data takes several: {folder}/*.json)" in refusal(folder)


def test_an_item_or_a_line_without_end_is_refused_before_it_fills_memory(tmp_path):
    endless = write(tmp_path / "x.json", '[{"prompt": "' + "a" * 20_000_000)
    assert "an item has more than 16,777,216 characters" in refusal(endless)
    assert "a line is longer than 16,777,216 characters" in refusal(endless.rename(tmp_path / "x.csv"))


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_a_file_of_30_megabytes_is_read_in_a_few(tmp_path, suffix):
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


def test_read_rows_keeps_every_column(tmp_path):
    row = {"prompt": "p", "response": "r", "score": 3}
    assert list(read_rows(write_json(tmp_path / "r.json", [row, row]))) == [row, row]


def test_values_become_text_that_utf8_can_hold():
    values = [None, 3, False, 0.5, float("nan"), b"\xe6\xb1\x89\xff", "\udc00", {"a": 1}, [[1]], ["a", {"text": "b"}]]
    assert [as_text(value) for value in values] == ["", "3", "False", "0.5", "", "汉\ufffd", "\ufffd", "", "", "a\nb"]
