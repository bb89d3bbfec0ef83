"""Names of files, folders and weights in one option."""

import pytest

from model.data.file_list import DataFile, data_files, names_of, unweighted_files


def test_files_folders_and_weights_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("more/b.csv", "more/a.json", "more/notes.md", "odd,name:2.json"):
        (tmp_path / name).write_text("x")
    assert data_files("a.json, more*2,b.jsonl:0.5") == (
        DataFile("a.json"), DataFile("more/a.json", 2), DataFile("more/b.csv", 2), DataFile("b.jsonl", 0.5),
    )  # fmt: skip
    assert data_files("odd,name:2.json") == (DataFile("odd,name:2.json"),), "a name that exists is taken as it is"
    many = [f"part-{number:02}.jsonl" for number in range(40)]  # together no name of a file
    assert [file.path for file in data_files(",".join(many))] == many
    assert data_files("host:data.json") == (DataFile("host:data.json"),)


def test_all_problems_with_the_names_are_told_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError) as refusal:
        data_files("a.json:0,b.json*many,,a.json,a.json,empty")
    assert len(str(refusal.value).splitlines()) == 5
    for part in (
        "a.json:0: a weight must",
        "b.json*many",
        "is empty: write FILE,FILE",
        "a.json*2",
        "holds no .parquet",
    ):
        assert part in str(refusal.value)


def test_only_training_files_have_weights():
    assert [file.path for file in unweighted_files("a.json,b.json", "test")] == ["a.json", "b.json"]
    with pytest.raises(ValueError, match="a.json: only training files have a weight, and it is 2"):
        unweighted_files("a.json*2", "test")


def test_of_many_files_the_first_are_named_and_the_others_counted():
    assert names_of(["a", "b"]) == "a, b" and names_of([*"abcdefgh"]) == "a, b, c, d, e, f and 2 more"
