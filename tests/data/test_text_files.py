"""Text files: their encoding, and whether a quote in a tsv file encloses a cell or is an ordinary character."""

import csv
import json

import pytest

from model.data import encodings
from tests.data.files import pairs_of, read_pairs, refusal, write

AWKWARD = ["plain", "two\nlines", "a\ttab", 'a "word"', '"', '"open', 'close"', "a\tb\nc", "", "x\r\ny"]


def read(path, text):
    path.write_text("prompt\tresponse\n" + text, encoding="utf-8", newline="")
    return list(read_pairs(path))


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_tsv_that_the_csv_module_wrote_is_read_back_unchanged(tmp_path, quoting):
    pairs = [(first, second) for first in AWKWARD for second in AWKWARD]
    with open(tmp_path / "x.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows([("prompt", "response"), *pairs])
    assert list(read_pairs(tmp_path / "x.tsv")) == pairs


@pytest.mark.parametrize(
    "rows",
    [
        ['"open\ta', "b\tc"],
        ['"open\ta', 'b"\tc'],
        ["a\t\"open", "b\tc", 'd\tclose"'],
        ['"To be," he said\tx', 'a 5" disk\ty'],
        ['"open\ta', 'b\tclose"', '"again\tc'],
        ["a\t\"open"] + [f"{i}\tb" for i in range(30_000)],
    ],
)  # fmt: skip
def test_a_lone_quote_is_an_ordinary_character_and_joins_no_rows(tmp_path, rows):
    assert read(tmp_path / "x.tsv", "\n".join(rows)) == [tuple(row.split("\t")) for row in rows]


def test_a_truncated_quoted_file_is_still_read_as_quoted(tmp_path):
    whole = '"two\nlines"\ta\n' * 5
    assert read(tmp_path / "x.tsv", whole + '"two\nlin')[:5] == [("two\nlines", "a")] * 5


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_csv_and_tsv_are_read_in_utf8_and_gb18030(tmp_path, encoding):
    question, answer = "高血压怎么办？", "少吃盐，多运动。"
    first = f'department,title,ask,answer\r\n内科,t,"第一行\r\n第二，""行""",{answer}\r\n'
    text = first + f'\r\n外科,{question},,"a,b"\r\n儿科,t\r\n'
    path = write(tmp_path / "m.csv", text.encode(encoding))
    assert pairs_of(path) == [('第一行\r\n第二，"行"', answer), (question, "a,b"), ("t", "")]
    tsv = write(tmp_path / "m.tsv", f"prompt\tresponse\n{question}\t{answer}, b".encode(encoding))
    assert pairs_of(tsv) == [(question, answer + ", b")]


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "utf-16", "utf-16-le"])
def test_the_encoding_is_found_behind_a_long_beginning_in_ascii(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr(encodings, "SAMPLE_BYTES", 64)
    rows = [dict(prompt="hello", response="world")] * 20 + [dict(prompt="你好吗", response="很好")]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert pairs_of(write(tmp_path / "x.jsonl", text.encode(encoding)))[-1] == ("你好吗", "很好")


@pytest.mark.parametrize("shift", range(4))
def test_a_character_that_the_encoding_sample_splits_does_not_change_the_encoding(tmp_path, shift):
    text = json.dumps({"prompt": "x" * shift + "好" * 400_000, "response": "a"}, ensure_ascii=False)
    assert pairs_of(write(tmp_path / "u.json", text)) == [("x" * shift + "好" * 400_000, "a")]
    assert pairs_of(write(tmp_path / "g.json", text.encode("gb18030")))[0][0].endswith("好")


def test_bytes_in_no_known_encoding_are_refused_with_their_position(tmp_path):
    assert "neither UTF-8 nor GB18030 (byte " in refusal(write(tmp_path / "x.csv", b"prompt,response\n\xff\xff,\x80\n"))
    late = b'{"prompt": "p", "response": "r"}\n' * 40_000 + b'{"prompt": "\xff"}'
    assert "(byte 1,320,012: " in refusal(write(tmp_path / "late.jsonl", late))
    chinese = late.replace(b'"p"', '"好"'.encode())
    assert "before byte 1,400,0" in refusal(write(tmp_path / "late.jsonl", chinese))
