"""Building a token store once, reading it, and refusing a damaged one."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from model.data import store_writer, token_store
from model.data.file_list import data_files
from model.data.token_store import Source, open_store
from model.train.objectives.pairs import Pairs
from tests.parts import examples_of, make_pairs, open_pairs, write_parquet

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("id_type", [pa.uint16(), pa.int32()])
@pytest.mark.parametrize("pairs_per_batch", [1, 7, 30, 100])
def test_tokens_are_the_tokenizer_s_ids_and_one_eos_for_any_batch_size_and_id_type_on_disk(
    monkeypatch, source, tokenizer, tmp_path, pairs_per_batch, id_type
):
    schema = pa.schema([(name, pa.list_(id_type)) for name in ("prompt_ids", "response_ids")])
    monkeypatch.setattr(store_writer, "ROWS_PER_BATCH", pairs_per_batch)
    monkeypatch.setattr(store_writer, "store_schema", lambda *_: schema)
    store = open_pairs(source, tokenizer, 512, tmp_path / "tokens")
    ids = np.random.default_rng(0).permutation(np.append(np.arange(30), 29))
    texts = zip(*(make_pairs(30, seed=7)[i] for i in ids), strict=True)
    for column, tokens in zip(texts, store.tokens(ids), strict=True):
        expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in column]
        assert tokens.dtype == np.int64 and tokens.tolist() == sum(expected, [])
    assert store.rows.schema.field("prompt_ids").type.value_type == id_type
    assert [len(tokens) for tokens in store.tokens(ids[:0])] == [0, 0]


def test_a_saved_dataset_whose_file_or_split_is_another_makes_a_new_store(tmp_path, tokenizer):
    def store_of(split):
        paths = tuple(file.path for file in data_files(f"{tmp_path}/saved[{split}]"))
        return open_store(Source(paths, Pairs(), tokenizer, 64), tmp_path / "tokens")

    pairs = [dict(prompt=prompt, response=response) for prompt, response in make_pairs(9, seed=7)]
    DatasetDict(a=Dataset.from_list(pairs), b=Dataset.from_list(pairs[:5])).save_to_disk(tmp_path / "saved")
    before, other = store_of("a"), store_of("b")
    assert (len(before), len(other)) == (9, 5) and store_of("a").directory == before.directory != other.directory
    Dataset.from_list(pairs[:7]).save_to_disk(tmp_path / "new")
    os.replace(*(f"{tmp_path}/{name}/data-00000-of-00001.arrow" for name in ("new", "saved/a")))
    assert len(store_of("a")) == 7


def test_ids_take_two_bytes_each_on_disk(open_it):
    store = open_it()
    assert store.rows.schema.field("prompt_ids").type.value_type == pa.uint16()
    assert store.lengths.dtype == np.uint16
    assert store.meta["tokens"] == store.lengths.sum(axis=0).tolist()


def test_a_file_without_a_usable_pair_is_refused(tmp_path, tokenizer):
    path = write_parquet(tmp_path / "empty.parquet", [("", "好")] * 5)
    for _ in range(2):
        with pytest.raises(ValueError, match="empty.parquet: none of its 5 rows.*--prompt_column"):
            open_pairs(path, tokenizer, 32, tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"none of its 5 rows.*\(columns asked for: prompt, response\)"):
        open_store(Source((path,), Pairs(), tokenizer, 32, ("prompt", "response")), tmp_path / "tokens")
    with pytest.raises(ValueError, match="missing.parquet: no such file"):
        open_pairs(tmp_path / "missing.parquet", tokenizer, 32, tmp_path / "tokens")
    assert stores_in(tmp_path / "tokens") == []


def stores_in(root):
    """Everything in a folder of token stores except the lock files."""
    return sorted(path for path in root.iterdir() if path.suffix != ".lock")


def test_a_store_is_built_once(open_it):
    first = open_it()
    assert open_it.built
    open_it.built.clear()
    again = open_it()
    assert not open_it.built
    assert again.directory == first.directory
    assert np.array_equal(again.lengths, first.lengths)
    assert open_it(max_seq_len=32).directory != first.directory


def test_a_file_with_a_newer_mtime_and_equal_content_is_not_tokenised_again(open_it, source):
    first = open_it()
    inode = (first.directory / "ids.arrow").stat().st_ino
    open_it.built.clear()
    for seconds in (10, 20):
        os.utime(source, (time.time() + seconds,) * 2)
        again = open_it()
        assert not open_it.built
        assert (again.directory / "ids.arrow").stat().st_ino == inode
        assert stores_in(again.directory.parent) == [again.directory]


def test_changed_content_is_tokenised_again_even_at_the_same_size(tmp_path, tokenizer):
    path = tmp_path / "pairs.jsonl"
    lines = [f'{{"prompt": "{n}{n}", "response": "{n}"}}\n' for n in range(5)]
    contents = []
    for order in (lines, lines[::-1]):
        path.write_text("".join(order))
        os.utime(path, ns=(0, len(contents)))
        store = open_pairs(path, tokenizer, 64, tmp_path / "tokens")
        contents.append(examples_of(store, range(5)))
    assert contents[1] == contents[0][::-1]


def test_a_process_that_builds_or_waits_for_another_to_build_can_be_stopped(open_it, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        open_it(stop=lambda: True)
    assert stores_in(tmp_path / "tokens") == []
    (lock,) = (tmp_path / "tokens").glob("*.lock")
    polls = iter([False, True])
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(KeyboardInterrupt):
            open_it(stop=lambda: next(polls))
    assert next(polls, None) is None
    assert len(open_it()) == 30


BUILD = """
import sys, time
from model.data.tokenizer import load_tokenizer
from tests.parts import open_pairs
def progress(rows):
    print("built", flush=True)
    time.sleep(float(sys.argv[4]))
print(len(open_pairs(sys.argv[1], load_tokenizer(sys.argv[2]), 64, sys.argv[3], progress=progress)), flush=True)
"""


def start_builder(source, tokenizer, root, seconds):
    """A process that opens the store and takes `seconds` longer over each batch of pairs."""
    arguments = [source, tokenizer.directory, root, seconds]
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_build_one_store_and_a_killed_builder_leaves_none(source, tokenizer, tmp_path):
    root = tmp_path / "tokens"
    killed = start_builder(source, tokenizer, root, 60)
    others = [start_builder(source, tokenizer, root, 0.5) for _ in range(2)]
    first = killed
    try:
        assert first.stdout.readline() in ("built\n", "30\n")
        first.send_signal(signal.SIGKILL)
        first.wait()
        said = [other.communicate(timeout=60)[0].split() for other in others]
    finally:
        for process in (killed, *others):
            process.kill()
            process.stdout.close()
    assert sorted(said) in ([["30"], ["built", "30"]], [["30"], ["30"]])
    (store,) = stores_in(root)
    assert {path.name for path in store.iterdir()} == {"ids.arrow", "lengths.npy", "hashes.npy", "meta.json"}


MEASURE = """
import gc, sys
import numpy as np
from model.data.tokenizer import load_tokenizer
from tests.parts import open_pairs
def anonymous():
    gc.collect()
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0])
tokenizer = load_tokenizer(sys.argv[2])
small, large = sys.argv[1].split(",")
open_pairs(small, tokenizer, 64, sys.argv[3]).tokens(np.arange(30))
before = anonymous()
store = open_pairs(large, tokenizer, 64, sys.argv[3])
draw = np.random.default_rng(0)
for _ in range(100):
    store.tokens(draw.integers(0, len(store), 64))
half = anonymous()
for _ in range(400):
    store.tokens(draw.integers(0, len(store), 64))
print(len(store), half - before, anonymous() - half, sum(f.stat().st_size for f in store.directory.iterdir()))
"""


def test_promise_6_memory_does_not_grow_with_the_corpus_nor_with_time(source, tokenizer, tmp_path):
    draw = random.Random(0)
    texts = ["".join(draw.choices("0123456789", k=draw.randint(4, 8))) for _ in range(500)]
    large, root = tmp_path / "large.parquet", tmp_path / "tokens"
    columns = [draw.choices(texts, k=200_000) for _ in range(2)]
    pq.write_table(pa.table(dict(prompt=columns[0], response=columns[1])), large)
    del columns
    open_pairs(source, tokenizer, 64, root)
    open_pairs(large, tokenizer, 64, root)
    arguments = [f"{source},{large}", tokenizer.directory, root]
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rows, opening_kib, reading_kib, store_bytes = map(int, out.split())
    assert rows == 200_000
    assert store_bytes > 6e6
    assert opening_kib < 4096
    assert reading_kib < 1024


def test_a_store_of_another_version_is_made_anew_and_a_line_says_so(tmp_path, tokenizer, caplog, monkeypatch):
    source = Source((write_parquet(tmp_path / "x.parquet", make_pairs(3)),), Pairs(), tokenizer, 50)
    monkeypatch.setattr(token_store, "FORMAT", 6)
    older = open_store(source, tmp_path / "tokens")
    monkeypatch.undo()
    with caplog.at_level("INFO", "chat_trainer"):
        assert open_store(source, tmp_path / "tokens").directory != older.directory
    assert f"{older.directory} are of another version and are made anew" in caplog.text
