"""scripts/prepare_data.py as a process: what it writes, counts and refuses; outputs are written atomically."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from model.data.cleaning import REASONS
from model.data.readers import read_conversations
from tests.data.files import write_json_lines

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"
ROWS = [
    {"prompt": "问一", "response": "答一"},
    {"prompt": "\u3000问一\u200b", "response": "答一\r\n"},
    {"prompt": "", "response": "答"},
    {"prompt": "问", "response": None},
    {"prompt": "问", "response": "坏\ufffd"},
    {"prompt": "问", "response": "\ue844"},
    {"prompt": "问", "response": "长" * 51},
    {"prompt": "问二", "response": "答👩\u200d⚕️"},
]


def counts_in(table, name):
    header, *lines = (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())
    numbers = next(line[1:] for line in lines if line[0] == name)
    return {column: int(number) for column, number in zip(header, numbers, strict=True)}


def test_rows_are_cleaned_dropped_by_reason_and_counted_over_all_inputs(tmp_path, prepare):
    write_json_lines(tmp_path / "messy.jsonl", ROWS)
    (tmp_path / "medical.csv").write_bytes('title,ask,answer\n标题,"问\n三",答三\n问一,,答一\n'.encode("gb18030"))
    code, table, errors = prepare("messy.jsonl", "medical.csv", "--output", "out/pairs.parquet", "--max_chars=50")
    assert (code, errors) == (0, "")
    dropped = {
        "empty prompt": 1,
        "empty response": 1,
        "damaged text": 1,
        "private use": 1,
        "too long": 1,
    }
    assert counts_in(table, "messy.jsonl") == {"read": 8, "kept": 2, "malformed": 0, **dropped, "duplicate": 1}
    none = dict.fromkeys(["malformed", *dropped], 0)
    assert counts_in(table, "medical.csv") == {"read": 2, "kept": 1, **none, "duplicate": 1}
    assert counts_in(table, "total") == {"read": 10, "kept": 3, "malformed": 0, **dropped, "duplicate": 2}
    written = pq.read_table(tmp_path / "out" / "pairs.parquet").to_pylist()
    assert [tuple(row.values()) for row in written] == [("问一", "答一"), ("问二", "答👩\u200d⚕️"), ("问\n三", "答三")]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pairs.parquet"]


def test_malformed_rows_are_left_out_and_counted_and_the_first_ones_reported(tmp_path, prepare):
    good = [f'{{"prompt": "问{i}", "response": "答"}}' for i in range(2)]
    lines = [good[0], *["null", "{'a'", '{"prompt": "问', "7", "8"], good[1]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "b.csv").write_text("prompt,response\n问,答,多\n问二,答\n", encoding="utf-8")
    code, out, errors = prepare("a.jsonl", "b.csv", "--output", "out.parquet")
    assert code == 0, errors
    rest = dict.fromkeys([*REASONS[:5], "duplicate"], 0)
    table = out.partition("\nout.parquet")[0]
    assert counts_in(table, "a.jsonl") == {"read": 7, "kept": 2, "malformed": 5, **rest}
    assert counts_in(table, "b.csv") == {"read": 2, "kept": 1, "malformed": 1, **rest}
    for expected in (
        "a.jsonl line 2: ",
        "a.jsonl line 3 (",
        "a.jsonl line 4 (",
        "2 more rows of a.jsonl",
        "b.csv line 2: 3",
    ):
        assert expected in errors
    assert len(errors.splitlines()) == 5
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 3


@pytest.mark.parametrize(
    ("name", "text"), [("x.jsonl", "null\n{'a'\n"), ("x.json", "# no json\nat all"), ("x.csv", "a,b\n1,2,3\n4,5,6\n")]
)
def test_a_file_without_a_readable_row_is_refused(tmp_path, prepare, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, table, errors = prepare(name, "--output", "out.parquet")
    assert (code, table, errors.count("\n")) == (2, "", 1)
    assert f"none of 2 rows can be read: {name} line " in errors
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_output_is_zstd_with_row_groups_of_20000_pairs_and_can_be_an_input(tmp_path, prepare):
    write_json_lines(tmp_path / "many.jsonl", ({"prompt": f"问{i}", "response": "答"} for i in range(20_001)))
    assert prepare("many.jsonl", "--output", "a.parquet")[0] == 0
    assert prepare("a.parquet", "--output", "b.parquet")[0] == 0
    file = pq.ParquetFile(tmp_path / "b.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [20_000, 1]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.read() == pq.read_table(tmp_path / "a.parquet")


def test_a_file_with_one_side_always_empty_is_refused_by_name(tmp_path, prepare):
    write_json_lines(
        tmp_path / "belle.jsonl", [None, {"question": "q", "std_answer": "", "class": "c"}, {"question": ""}]
    )
    write_json_lines(tmp_path / "good.jsonl", ROWS)
    code, table, errors = prepare("good.jsonl", "belle.jsonl", "--output", "out.parquet", "--strict")
    assert (code, table) == (2, "")
    assert "belle.jsonl: the response is empty in all 1 rows (read from 'std_answer'; " in errors
    assert "'question', 'std_answer', 'class'" in errors and "--response_column=NAME" in errors
    write_json_lines(tmp_path / "noprompt.jsonl", [{"instruction": " ", "input": "", "output": "a"}])
    code, _, errors = prepare("noprompt.jsonl", "--output", "out.parquet")
    assert code == 2 and "the prompt is empty in all 1 rows (read from 'instruction', 'input'; " in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["belle.jsonl", "good.jsonl", "noprompt.jsonl"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "0 bytes"),
        ('[{"prompt": "p", "response": "r"},\n]', "line 2 (character 35): malformed JSON: a comma before"),
        ('[{"prompt": "p", "response": "\\ufffd"}]', "no row is left"),
        ('[{"a": "p"}]', "no prompt or response column; found 'a'"),
    ],
)
def test_an_unusable_input_is_refused_in_one_message_and_nothing_is_written(tmp_path, prepare, text, expected):
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    code, table, errors = prepare("bad.json", "--output", "out.parquet")
    assert (code, table) == (2, "") and expected in errors and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]


def test_an_existing_output_stays_unchanged_until_a_complete_one_replaces_it(tmp_path, prepare):
    output = tmp_path / "out.parquet"
    output.write_bytes(b"old")
    write_json_lines(tmp_path / "good.jsonl", ROWS)
    (tmp_path / "bad.json").write_text("[1", encoding="utf-8")
    code, _, errors = prepare("good.jsonl", "--output", output)
    assert code == 2 and "--overwrite" in errors
    assert prepare("good.jsonl", "bad.json", "--output", output, "--overwrite", "--strict")[0] == 2
    assert output.read_bytes() == b"old"
    assert prepare("good.jsonl", "--output", output, "--overwrite")[0] == 0
    assert pq.read_metadata(output).num_rows == 3


def test_a_share_of_the_pairs_goes_to_validation_and_stays_there_when_data_is_added(tmp_path, prepare):
    rows = [dict(prompt=f"问{i}", response=f"答{i}") for i in range(600)]
    validation_prompts = []
    for name, count in (("few", 300), ("all", 600)):
        write_json_lines(tmp_path / f"{name}.jsonl", rows[:count])
        words = [f"{name}.jsonl", "--output", f"{name}.parquet", "--validation_output", f"{name}_valid.parquet"]
        code, out, err = prepare(*words, "--validation_share", "0.1")
        assert code == 0, err
        tables = (pq.read_table(tmp_path / f"{name}{end}.parquet") for end in ("", "_valid"))
        train, valid = (set(table["prompt"].to_pylist()) for table in tables)
        assert not train & valid and len(train | valid) == count and 0.05 < len(valid) / count < 0.15
        assert f"{name}_valid.parquet: {len(valid)} pairs written" in out
        validation_prompts.append(valid)
    assert validation_prompts[0] == {prompt for prompt in validation_prompts[1] if int(prompt[1:]) < 300}
    words = ["few.jsonl", "--output", "a.parquet", "--validation_output", "b.parquet"]
    code, _, err = prepare(*words, "--validation_share", "1e-9")
    assert (
        code == 2
        and "of 300 rows none" in err
        and "--validation_share=0.033" in err
        and not list(tmp_path.glob("[ab].parquet"))
    )


def test_named_columns_are_used_and_wrong_options_are_refused(tmp_path, prepare):
    write_json_lines(tmp_path / "x.jsonl", [{"a": "p", "b": "r"}])
    assert prepare("x.jsonl", "--output", "o.parquet", "--prompt_column=b", "--response_column", "a")[0] == 0
    assert pq.read_table(tmp_path / "o.parquet").to_pylist() == [{"prompt": "r", "response": "p"}]
    for words in (
        ["--output", "o.json"],
        ["--output=p.parquet", "--max_chars=0"],
        ["--output=p.parquet", "--maxchars=9"],
    ):
        code, _, errors = prepare("x.jsonl", *words)
        assert code == 2 and words[-1].partition("=")[0] in errors and "Traceback" not in errors


def test_the_report_says_what_was_written(tmp_path, prepare):
    write_json_lines(tmp_path / "x.jsonl", ROWS)
    code, out, errors = prepare("x.jsonl", "--output", "o.parquet", "--report")
    assert code == 0 and "exact duplicates: 0 of 3" in out
    assert "o.parquet: 3 pairs in 3 conversations, 0 with earlier turns" in out
    assert (tmp_path / "o_lengths.png").is_file()


def test_a_conversation_is_written_as_one_row_and_read_back_as_it_was(tmp_path, prepare):
    call = dict(name="area", arguments=dict(a=5))
    turns = [
        dict(role="user", content="面积？"),
        dict(role="assistant", content="", reasoning_content="要算", tool_calls=[call]),
        dict(role="tool", content="25"),
        dict(role="assistant", content="是 25"),
        dict(role="system", content="说英语"),
        dict(role="user", content="再见"),
        dict(role="assistant", content="坏", weight=0),
        dict(role="user", content="再见"),
        dict(role="assistant", content="Bye"),
    ]
    path = write_json_lines(
        tmp_path / "x.jsonl", [dict(messages=turns, tools=[call]), dict(prompt="问", response="答")]
    )
    code, out, errors = prepare("x.jsonl", "--output", "o.parquet")
    assert (code, errors) == (0, "") and "o.parquet: 2 conversations written" in out
    assert list(map(plain, read_conversations(tmp_path / "o.parquet"))) == list(map(plain, read_conversations(path)))
    assert pq.read_schema(tmp_path / "o.parquet").names == ["messages", "tools"]
    assert prepare("x.jsonl", "--output", "s.parquet", "--single_turn")[0] == 0
    called = '<tool_call>\n{"name": "area", "arguments": {"a": 5}}\n</tool_call>'
    singles = [
        ("面积？\n/think", f"<think>\n要算\n</think>\n\n{called}"),
        ("<tool_response>\n25\n</tool_response>", "是 25"), ("再见", "Bye"), ("问", "答"),
    ]  # fmt: skip
    assert [tuple(row.values()) for row in pq.read_table(tmp_path / "s.parquet").to_pylist()] == singles


def plain(conversation):
    return [tuple(turn) for turn in conversation.turns], conversation.tools


def test_a_turn_that_is_of_no_use_costs_what_it_was_said_in_and_not_the_rest(tmp_path, prepare):
    said = ["问", "答", "坏\ufffd", "丢", "又问", "又答"]
    turns = [dict(role=("user", "assistant")[place % 2], content=text) for place, text in enumerate(said)]
    write_json_lines(tmp_path / "x.jsonl", [dict(messages=turns), dict(messages=turns[2:4]), dict(messages=turns)])
    code, out, errors = prepare("x.jsonl", "--output", "o.parquet")
    assert code == 0 and "1 conversations lost turns that hold damaged text" in errors
    counts = counts_in(out.partition("\no.parquet")[0], "x.jsonl")
    assert (counts["read"], counts["kept"], counts["damaged text"], counts["duplicate"]) == (3, 1, 1, 1)
    assert [tuple(row.values()) for row in pq.read_table(tmp_path / "o.parquet").to_pylist()] == [
        ("问", "答"),
        ("又问", "又答"),
    ]


def test_the_parts_of_a_dialogue_that_goes_on_stay_in_one_file(tmp_path, prepare):
    turns = [[dict(role="user", content=f"问{i}"), dict(role="assistant", content="答")] * 2 for i in range(300)]
    write_json_lines(tmp_path / "a.jsonl", [dict(messages=each) for each in turns])
    write_json_lines(tmp_path / "b.jsonl", [dict(messages=each * 2) for each in turns])
    for name in "ab":
        words = [f"{name}.jsonl", f"--output={name}.parquet", f"--validation_output={name}_valid.parquet"]
        assert prepare(*words, "--validation_share=0.1")[0] == 0
    valid = [pq.read_table(tmp_path / f"{name}_valid.parquet")["messages"].to_pylist() for name in "ab"]
    assert valid[0] and [each[0] for each in valid[0]] == [each[0] for each in valid[1]]


def test_plain_text_is_prepared_as_texts_alone(tmp_path, prepare):
    (tmp_path / "book.txt").write_text("第一行\n\n第二行\u200b\n第一行\n", encoding="utf-8")
    write_json_lines(tmp_path / "mind.jsonl", [dict(text="<|im_start|>一<|im_end|> <|im_start|>二<|im_end|>")])
    code, out, errors = prepare("book.txt", "mind.jsonl", "--output", "o.parquet", "--report")
    assert (code, errors) == (0, "") and "o.parquet: 3 texts written" in out and "text characters: p50 3" in out
    assert pq.read_table(tmp_path / "o.parquet")["text"].to_pylist() == ["第一行", "第二行", "一\n二"]
    write_json_lines(tmp_path / "x.jsonl", ROWS)
    for words in (["book.txt", "x.jsonl"], ["x.jsonl", "book.txt"]):
        code, _, errors = prepare(*words, "--output", "p.parquet")
        assert code == 2 and "some rows are plain text and some are conversations" in errors


def test_a_share_without_a_file_for_it_is_refused(tmp_path, prepare):
    write_json_lines(tmp_path / "x.jsonl", ROWS)
    code, _, errors = prepare("x.jsonl", "--output=p.parquet", "--validation_share=0.05")
    assert code == 2 and "--validation_share=0.05" in errors and "add --validation_output VALID.parquet" in errors
