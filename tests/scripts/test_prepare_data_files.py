"""scripts/prepare_data.py as a process: folders, unreadable files, names and outputs."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tests.data.files import write_json_lines
from tests.scripts.test_prepare_data import ROWS, counts_in


def test_a_folder_or_an_output_that_cannot_be_made_is_refused_in_a_sentence(tmp_path, prepare):
    write_json_lines(tmp_path / "x.jsonl", ROWS)
    (tmp_path / "f.parquet").mkdir()
    for words, expected in (
        (["f.parquet", "--output=new/deep/p.parquet"], "f.parquet: the folder holds no .parquet, .jsonl, .json, .csv"),
        (["none.csv", "--output=new/deep/p.parquet", "--validation_output=new/v.parquet"], "none.csv: no such file"),
        (
            ["x.jsonl", "--output=x.jsonl/p.parquet"],
            "x.jsonl: the directory cannot be made (File exists: x.jsonl); give",
        ),
        (["x.jsonl", "--output=x.jsonl/y/p.parquet"], "x.jsonl/y: the directory cannot be made (Not a directory: x.js"),
        (["x.jsonl", "--output=f.parquet", "--overwrite"], "--output=f.parquet: it is a folder; name a file, for ex"),
    ):
        code, table, errors = prepare(*words)
        assert (code, table, errors.count("\n")) == (2, "", 1) and expected in errors and "Errno" not in errors
        assert not (tmp_path / "new").exists(), "a refusal leaves nothing"


def test_a_folder_stands_for_the_data_files_in_it_which_are_named(tmp_path, prepare):
    (tmp_path / "raw" / "inner.json").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "notes.md"):
        write_json_lines(tmp_path / "raw" / name, [dict(prompt=name, response="r")])
    code, out, errors = prepare("raw/", "--output=raw/o.parquet")
    assert (code, errors) == (0, "prepare_data: in raw/: a.jsonl, b.jsonl\n")
    assert [row["prompt"] for row in pq.read_table(tmp_path / "raw" / "o.parquet").to_pylist()] == [
        "a.jsonl",
        "b.jsonl",
    ]
    DatasetDict(train=Dataset.from_dict(dict(prompt=["p"], response=["r"]))).save_to_disk(tmp_path / "saved")
    code, out, errors = prepare("saved[train]", "--output=o.parquet")
    assert (code, errors) == (0, "prepare_data: in saved[train]: data-00000-of-00001.arrow\n")
    code, out, errors = prepare("saved[dev]", "--output=new.parquet")
    assert code == 2 and "saved[dev]: it has no split 'dev': type one of saved[train]" in errors


def test_an_unreadable_file_is_left_out_as_a_whole_and_the_others_are_prepared(tmp_path, prepare):
    write_json_lines(tmp_path / "good.jsonl", ROWS)
    (tmp_path / "empty.json").touch()
    (tmp_path / "cut.json").write_text('[{"prompt": "p", "response": "r"},\n{"prompt": "问一", "response": "答一"}, {')
    (tmp_path / "belle.jsonl").write_text('{"question": "q", "std_answer": ""}')
    bad = ["empty.json", "cut.json", "belle.jsonl"]
    code, out, errors = prepare(bad[1], "good.jsonl", *bad[::2], "--output=out.parquet", "--max_chars=50")
    assert code == 0 and errors.count("left out: the whole file: ") == 3 and all(name in errors for name in bad)
    table = out.partition("\nout.parquet")[0]
    assert counts_in(table, "cut.json")["read"] == 0 and counts_in(table, "good.jsonl") == counts_in(out, "total") | {
        "read": 8, "empty response": 1
    }  # fmt: skip
    assert [row["prompt"] for row in pq.read_table(tmp_path / "out.parquet").to_pylist()] == ["问一", "问二"]
    for words in (["good.jsonl", *bad, "--strict"], bad):
        code, out, errors = prepare(*words, "--output=none.parquet")
        assert (code, out) == (2, "") and all(f"{name}" in errors for name in bad)
    assert not list(tmp_path.glob("*none*"))


def test_a_file_given_under_several_names_is_read_once_and_an_input_is_never_overwritten(tmp_path, prepare):
    write_json_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "a.jsonl")
    code, out, errors = prepare("a.jsonl", "./a.jsonl", "link.jsonl", "hard.jsonl", "--output=o.parquet")
    assert code == 0 and errors.count("the same file as a.jsonl, read once") == 3
    assert counts_in(out.partition("\no.parquet")[0], "total")["read"] == 8
    before = (tmp_path / "o.parquet").read_bytes()
    (tmp_path / "dir").symlink_to(".")
    for words, expected in (
        (["o.parquet", "--output=dir/o.parquet"], "o.parquet: it is also the output dir/o.parquet"),
        (
            ["a.jsonl", "o.parquet", "--output=b.parquet", "--validation_output=./o.parquet"],
            "it is also the output o.parq",
        ),
        (["a.jsonl", "--output=v.parquet", "--validation_output=dir/v.parquet"], "are both v.parquet"),
    ):
        code, _, errors = prepare(*words, "--overwrite")
        assert code == 2 and expected in errors
    assert (tmp_path / "o.parquet").read_bytes() == before and not (tmp_path / "v.parquet").exists()


def test_unused_columns_and_prompts_in_both_outputs_are_reported(tmp_path, prepare):
    rows = [dict(prompt=f"问{i % 10}", response=f"答{i}", rejected="x", history="q a") for i in range(200)]
    write_json_lines(tmp_path / "a.jsonl", rows)
    code, out, _ = prepare("a.jsonl", "--output=t.parquet", "--validation_output=v.parquet", "--validation_share=0.2")
    assert code == 0 and "a.jsonl: not used: column 'rejected' (200 rows, 1" in out and "'history' (200 rows, 3" in out
    train, valid = (pq.read_table(tmp_path / name)["prompt"].to_pylist() for name in ("t.parquet", "v.parquet"))
    shared = sum(prompt in train for prompt in valid)
    assert out.splitlines()[-2:] == [
        f"t.parquet: {len(train)} pairs written, {len(set(train))} different prompts",
        f"v.parquet: {len(valid)} pairs written, {shared} with a prompt that is also in t.parquet",
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_a_file_name_that_is_not_utf8_is_read_written_and_printed(tmp_path, prepare, suffix):
    name = os.fsdecode(b"\xd6\xd0." + suffix.encode())
    if suffix == "jsonl":
        write_json_lines(tmp_path / name, [{"prompt": "p", "response": "r"}, None])
    elif suffix == "parquet":
        with open(tmp_path / name, "wb") as file:
            pq.write_table(pa.table({"prompt": ["p"], "response": ["r"]}), file)
    else:
        (tmp_path / name).write_text("prompt,response\np,r\n".replace(",", "\t" if suffix == "tsv" else ","))
    bad, output = os.fsdecode(b"\xff.json"), os.fsdecode(b"\xd6\xd0_out.parquet")
    (tmp_path / bad).write_text("[")
    code, out, errors = prepare(name, bad, "--output", output)
    assert code == 0 and "1 pairs written" in out and "Traceback" not in errors and "\\udcff.json line 1" in errors
    with open(tmp_path / output, "rb") as file:
        assert pq.read_table(file).to_pylist() == [{"prompt": "p", "response": "r"}]
