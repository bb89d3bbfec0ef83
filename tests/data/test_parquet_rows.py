"""Rows of parquet files: bounded memory however far a small file expands, and equal rows for every encoding."""

import os
import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.data import parquet_rows
from model.runtime.json_stream import MAX_ITEM_CHARS
from tests.data.files import read_pairs, refusal

MEASURE = """
import sys
import time
from resource import RUSAGE_SELF, getrusage
from tests.data.files import read_pairs
list(read_pairs(sys.argv[1]))
before, began = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
try:
    for pair in read_pairs(sys.argv[2], on_malformed=lambda problem: None): pass
except ValueError as error:
    print(error)
print(time.perf_counter() - began, (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def repeated(text, count):
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [text])


def turns(text, count):
    turn = pa.StructArray.from_arrays([repeated("user", count), repeated(text, count)], ["role", "content"])
    return pa.ListArray.from_arrays([0, count], turn)


def shared_beginnings(count):
    return ["abc" * 100_000 + "x" * i for i in range(count)]


def claimed_rows(path, count):
    """Write a file of `count` rows whose footer claims 2^40."""
    pq.write_table(pa.table({"prompt": ["p"] * count, "response": ["r"] * count}), path, store_schema=False)
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[begin:-8].replace(b"\x16" + varint(2 * count), b"\x16" + varint(2**41))
    assert len(footer) > len(data) - 8 - begin
    path.write_bytes(data[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def varint(number):
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


BOMBS = {
    "one text for 3,000 rows": lambda: {"prompt": repeated("a" * 5_000_000, 3000), "response": repeated("r", 3000)},
    "one text for 10,000 turns": lambda: {"messages": turns("a" * 5_000_000, 10_000)},
    "a text too long for 100,000 rows": lambda: {"prompt": repeated("a" * 17_000_000, 100_000),
                                                 "response": repeated("r", 100_000)},
    "texts that begin alike": lambda: {"prompt": shared_beginnings(3000), "response": ["r"] * 3000},
    "well compressed texts": lambda: {"prompt": ["a" * 20_000_000] * 20, "response": ["r"] * 20},
    "nulls": lambda: {"prompt": pa.nulls(5_000_000, pa.string()), "response": pa.nulls(5_000_000, pa.string())},
    "a list of nulls": lambda: {"prompt": ["p"], "response": ["r"],
                                "x": pa.ListArray.from_arrays([0, 5_000_000], pa.nulls(5_000_000, pa.string()))},
    "nulls of a fixed size": lambda: {"prompt": ["p"] * 1000, "x": pa.nulls(1000, pa.binary(1_000_000))},
    "a claim of 2^40 rows": None,
}  # fmt: skip


def test_a_long_text_that_all_rows_share_is_read_whatever_their_number_if_row_groups_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_rows, "FREE_BYTES", 1 << 20)
    rows = [(f"{'a list of tools ' * 1200}{number}", "r") for number in range(200)]
    path, table = tmp_path / "shared.parquet", pa.table(dict(prompt=[p for p, _ in rows], response=["r"] * 200))
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=40)
    assert 19_000 * 200 > (1 << 20) + 50 * path.stat().st_size and list(read_pairs(path)) == rows
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert "in one group of rows (row_group_size=1000 makes" in refusal(path)


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_expands_without_limit_is_refused_in_little_memory(tmp_path, name):
    path, small = tmp_path / "bomb.parquet", tmp_path / "small.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "response": ["r"]}), small)
    if BOMBS[name]:
        begin_alike = {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}
        pq.write_table(pa.table(BOMBS[name]()), path, compression="zstd", **begin_alike if "begin" in name else {})
    else:
        claimed_rows(path, 77)
    assert path.stat().st_size < 30_000
    limit = 4 << 30, 4 << 30  # a file that is read without limits must not take the machine's memory
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, path], capture_output=True, encoding="utf-8", timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reason, (seconds, grown_mib) = done.stdout.splitlines()[0], map(float, done.stdout.split()[-2:])
    assert reason.startswith(str(path)) and grown_mib < 300
    assert seconds < 2 * max(1, os.getloadavg()[0])


def test_a_text_above_the_limit_costs_only_its_own_row(tmp_path):
    texts, problems = ["p", "x" * MAX_ITEM_CHARS, "q", "x" * MAX_ITEM_CHARS, "汉" * (MAX_ITEM_CHARS - 1)], []
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": texts, "response": ["r"] * 5}), path)
    assert [pair[0] for pair in read_pairs(path, on_malformed=problems.append)] == texts[::2]
    assert [problem.removeprefix(str(path))[:6] for problem in problems] == [" row 2", " row 4"]
    with pytest.raises(ValueError, match="16,777,217 characters; at most 16,777,216 are read: cut its text"):
        list(read_pairs(path))


def test_ordinary_files_of_any_encoding_and_string_type_give_the_rows_that_were_written(tmp_path):
    prompts = [f"{'问' * 300} {i % 7} {i if i > 2500 else ''}" for i in range(5000)]
    rows = [(prompt, None if i % 5 == 0 else f"r{i % 3}") for i, prompt in enumerate(prompts)]
    expected, path = [(prompt, response or "") for prompt, response in rows], tmp_path / "x.parquet"
    prompt, response = (pa.array(side) for side in zip(*rows, strict=True))
    for encoding in ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"):
        table = pa.table({"prompt": prompt, "response": response})
        pq.write_table(table, path, use_dictionary=False, column_encoding=encoding, compression="zstd")
        assert list(read_pairs(path)) == expected
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        sides = prompt.cast(pa.large_string()), response.cast(kind)
        pq.write_table(pa.table(dict(zip(("prompt", "response"), sides, strict=True))), path, row_group_size=1100)
        assert list(read_pairs(path)) == expected


def test_a_question_and_its_answer_in_different_batches_or_row_groups_become_one_pair(tmp_path):
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(1500) for role in ("user", "assistant")][1:]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(turns), path, row_group_size=2001)
    assert list(read_pairs(path)) == [(f"user {i}", f"assistant {i}") for i in range(1, 1500)]
