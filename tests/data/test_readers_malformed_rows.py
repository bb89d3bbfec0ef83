"""Malformed rows: only they are left out if the caller handles them, otherwise the file is refused."""

import pytest

from model.data.readers import NoRows
from model.runtime import json_stream
from tests.data.files import read_pairs

ITEM = '{"prompt": "p", "response": "r"}'
DIALOGUE = '{"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": ["r"]}]}'


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def pairs_and_problems(path):
    problems = []
    return list(read_pairs(path, on_malformed=problems.append)), problems


@pytest.mark.parametrize("line", [ITEM, DIALOGUE])
def test_a_json_line_cut_anywhere_costs_only_its_own_row(tmp_path, line):
    for end in range(2, len(line)):
        cut = line[:end]
        path = write(tmp_path / "x.jsonl", f"{ITEM}\n{cut}\n{DIALOGUE}\n{cut}\n{cut}\n\n{ITEM}\n{cut}")
        pairs, problems = pairs_and_problems(path)
        assert (pairs, len(problems)) == ([("p", "r")] * 3, 4), cut
        with pytest.raises(ValueError, match="malformed JSON"):
            list(read_pairs(path))


@pytest.mark.parametrize(
    ("name", "row", "place"),
    [
        ("x.jsonl", "null", "line 2: a row is None"),
        ("x.jsonl", "{'prompt': 'p'}", "line 2 (character 34): malformed JSON"),
        ("x.jsonl", "garbage", "line 2 (character 33): malformed JSON"),
        ("x.jsonl", '{"prompt": "p"', "line 2 (character 48): malformed JSON"),
        ("x.jsonl", '{"messages": ["q", null, "q", "a"]}', "line 2: a row is None"),
        ("x.jsonl", '{"prompt": ' + "[" * 5000, "line 2 (character 33): malformed JSON: brackets nested too deep"),
        ("x.json", "null", "line 2: a row is None"),
        ("x.csv", "a,b,c", "line 3: 3 cells under 2 columns"),
        ("x.tsv", "a\tb\tc", "line 3: 3 cells under 2 columns"),
    ],
)
def test_a_malformed_row_is_reported_with_its_place_and_left_out(tmp_path, name, row, place):
    texts = {
        "x.json": f"[{ITEM},\n{row},\n{ITEM}]",
        "x.jsonl": f"{ITEM}\n{row}\n{ITEM}",
        "x.csv": f"prompt,response\np,r\n{row}\np,r",
        "x.tsv": f"prompt\tresponse\np\tr\n{row}\np\tr",
    }
    path = write(tmp_path / name, texts[name])
    pairs, (problem,) = pairs_and_problems(path)
    assert pairs == [("p", "r")] * 2
    assert problem.startswith(f"{path} {place}")
    with pytest.raises(ValueError) as refused:
        list(read_pairs(path))
    assert str(refused.value) == problem


def test_a_line_that_is_too_long_costs_only_its_own_row(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "CHUNK_CHARS", 64)
    monkeypatch.setattr(json_stream, "MAX_ITEM_CHARS", 1000)
    long = ITEM.replace('"p"', f'"{"p" * 3000}"')
    path = write(tmp_path / "x.jsonl", f"{long}\n{ITEM}\n{long}\n{ITEM}\n{long}")
    pairs, problems = pairs_and_problems(path)
    assert pairs == [("p", "r")] * 2
    assert [f"line {number} " in problem for number, problem in zip((1, 3, 5), problems, strict=True)] == [True] * 3
    for text in (f"[{long}]", long.replace("{", "{\n")):
        with pytest.raises(ValueError, match="an item has more than 1,000 characters"):
            pairs_and_problems(write(tmp_path / "x.json", text))


def test_text_after_a_complete_value_on_the_same_line_is_left_out_too(tmp_path):
    pairs, problems = pairs_and_problems(write(tmp_path / "x.jsonl", f"{ITEM},\n{ITEM}}}\n{ITEM}"))
    assert (pairs, len(problems)) == ([("p", "r")] * 3, 2)


@pytest.mark.parametrize(
    "text",
    [
        f"{ITEM},{ITEM},{ITEM}",
        '{"prompt": "p", response: "r"} ' + ITEM,
        '{\n"prompt": "p",\n"response" "r"\n}\n' + ITEM,
        f"[{ITEM},\n{ITEM[:-2]}",
        '["q", 7, "q", "a"]',
    ],
)
def test_damage_that_could_cost_more_than_one_row_is_refused_even_if_the_caller_handles_malformed_rows(tmp_path, text):
    with pytest.raises(ValueError, match="x.json line "):
        pairs_and_problems(write(tmp_path / "x.json", text))


def test_a_file_of_malformed_rows_has_no_rows(tmp_path):
    with pytest.raises(NoRows):
        pairs_and_problems(write(tmp_path / "x.jsonl", "null\n7\n{'a'}"))
