"""Whether a quote in a tsv file is a quote: Python's csv module writes them, and so do people, who mean characters."""

import csv

import pytest

from model.data.readers import read_pairs

AWKWARD = ["plain", "two\nlines", "a\ttab", 'a "word"', '"', '"open', 'close"', "a\tb\nc", "", "x\r\ny"]


def read(path, text):
    path.write_text("prompt\tresponse\n" + text, encoding="utf-8", newline="")
    return list(read_pairs(path))


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_what_the_csv_module_wrote_comes_back(tmp_path, quoting):
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
def test_a_lone_quote_is_a_character_and_joins_no_rows(tmp_path, rows):
    assert read(tmp_path / "x.tsv", "\n".join(rows)) == [tuple(row.split("\t")) for row in rows]


def test_a_quoted_file_that_was_cut_keeps_its_quotes(tmp_path):
    whole = '"two\nlines"\ta\n' * 5
    assert read(tmp_path / "x.tsv", whole + '"two\nlin')[:5] == [("two\nlines", "a")] * 5
