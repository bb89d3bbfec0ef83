"""What is written of each pair: columns as named, cut to the limit, with one EOS, and no pair with an empty text."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from model.data import store_writer
from model.data.conversation import Conversation, Turn
from tests.parts import examples_of, make_pairs, open_pairs, write_parquet

LONG = "今天天气真好" * 40


def test_each_side_has_one_eos_even_if_its_text_spells_it(tmp_path, tokenizer):
    path = write_parquet(tmp_path / "traps.parquet", [("你好[EOS]", "[EOS]"), (LONG, LONG + "[EOS]")])
    store = open_pairs(path, tokenizer, 32, tmp_path / "tokens")
    for example in examples_of(store, range(2)):
        for tokens in example:
            assert tokens.count(tokenizer.eos_id) == 1
            assert tokens[-1] == tokenizer.eos_id


def test_long_texts_are_truncated_by_tokens_and_the_share_is_reported(tmp_path, tokenizer):
    fits = "1" * 31  # a digit is a token
    pairs = [(fits, fits + "2"), (LONG, "3"), ("4", "5"), ("6", "7")]
    store = open_pairs(write_parquet(tmp_path / "long.parquet", pairs), tokenizer, 32, tmp_path / "tokens")
    assert store.lengths.tolist() == [[32, 32], [32, 2], [2, 2], [2, 2]]
    (_, cut), (prompt, _) = examples_of(store, [0, 1])
    assert cut == [*tokenizer.encode(fits), tokenizer.eos_id]
    assert prompt == [*tokenizer.encode(LONG)[:31], tokenizer.eos_id]
    assert store.meta["cut"] == [1, 1]


def test_pairs_with_an_empty_side_are_left_out_and_counted(tmp_path, tokenizer):
    pairs = [("你好", "好"), ("", "好"), ("你", " \n\t"), ("", ""), ("再见", "见")]
    store = open_pairs(write_parquet(tmp_path / "holes.parquet", pairs), tokenizer, 32, tmp_path / "tokens")
    by_hand = Dataset.from_file(str(store.directory / "ids.arrow"))
    assert len(store) == len(store.rows) == len(by_hand) == store.meta["rows"] == 2
    assert examples_of(store, [1])[0][0] == [*tokenizer.encode("再见"), tokenizer.eos_id]
    assert store.meta["empty"] == 3


def test_columns_that_are_not_used_are_reported(tokenizer, tmp_path):
    rows = [dict(prompt=p, response=r, rejected="no", history="a b") for p, r in make_pairs(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = open_pairs(tmp_path / "rows.jsonl", tokenizer, 32, tmp_path / "tokens")
    assert "not used: column 'rejected' (3 rows, 4% of their characters), 'history' (3 rows" in store.meta["ignored"]


def test_named_columns_are_read(tmp_path, tokenizer):
    path = tmp_path / "columns.parquet"
    pq.write_table(pa.table(dict(prompt=["不"], frage=["你好"], antwort=["好"])), path)
    store = open_pairs(path, tokenizer, 32, tmp_path / "tokens", columns=("frage", "antwort"))
    assert examples_of(store, [0])[0][0] == [*tokenizer.encode("你好"), tokenizer.eos_id]


@pytest.mark.parametrize("kind", ["pairs", "dialogues", "tools", "preferences"])
def test_long_rows_of_every_kind_are_read_few_at_a_time(kind):
    turns = Turn("user", "问"), Turn("assistant", LONG)
    rows = dict(pairs=("问", LONG, None), dialogues=(Conversation(turns),), tools=(Conversation(turns[:1], LONG),))
    row = rows[kind] if kind in rows else rows["dialogues"] * 2
    rows = iter([row] * 9)
    assert len(store_writer.taken_rows(rows, 5, 500)) < 5
    assert len(store_writer.taken_rows(rows, 2, 10**6)) == 2


def write_as(path, pairs):
    """Write the pairs in the format of the path's suffix, always in as many bytes."""
    if path.suffix == ".parquet":
        return write_parquet(path, pairs)
    lines = ["prompt,response"] if path.suffix == ".csv" else []
    lines += [f"{p},{r}" if lines else json.dumps(dict(prompt=p, response=r)) for p, r in pairs]
    path.write_text("\n".join(lines))
    return path


def rename_over(path, pairs):
    """Put another file in its place, with the same time."""
    before = path.stat()
    write_as(path.with_stem("other"), pairs).replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def append(path, pairs):
    with open(path, "ab") as file:
        file.write(b"\n")


@pytest.mark.parametrize("change", [rename_over, write_as, append, lambda path, pairs: path.unlink()])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_file_that_changes_while_it_is_read_gives_no_store(tmp_path, tokenizer, monkeypatch, suffix, change):
    monkeypatch.setattr(store_writer, "ROWS_PER_BATCH", 10)
    path, pairs = tmp_path / f"pairs{suffix}", [(f"{n:05}", "12") for n in range(600)]
    write_as(path, pairs)
    changes = iter([lambda: change(path, pairs[::-1])])
    with pytest.raises(ValueError, match=f"pairs{suffix}: the file changed while it was read: .*same command again"):
        open_pairs(path, tokenizer, 32, tmp_path / "tokens", progress=lambda rows: next(changes, lambda: None)())
    assert [each.suffix for each in (tmp_path / "tokens").iterdir()] == [".lock"]
    again = open_pairs(write_as(path, pairs), tokenizer, 32, tmp_path / "tokens")
    assert len(again) == 600 and examples_of(again, [0])[0][0] == [*tokenizer.encode("00000"), tokenizer.eos_id]
