"""Rows of .arrow files: those that were written, in memory that does not grow with the file, or a reason."""

import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa

from model.runtime.json_stream import MAX_ITEM_CHARS
from tests.data.files import pairs_of, read_pairs, refusal, write

MEASURE = """
import sys
from resource import RUSAGE_SELF, getrusage
from tests.data.files import read_pairs
list(read_pairs(sys.argv[1]))
before = getrusage(RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    try:
        print(sum(1 for pair in read_pairs(path)))
    except ValueError as error:
        print(error)
print((getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def write_arrow(path, table, as_file=False, rows=1000, **options):
    schema, options = table.schema, pa.ipc.IpcWriteOptions(**options)
    with pa.OSFile(str(path), "wb") as sink:
        with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(sink, schema, options=options) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def test_both_arrow_formats_and_each_type_of_text_give_the_rows_that_were_written(tmp_path):
    rows = [(f"{'问' * 30} {i % 7}", None if i % 5 == 0 else f"r{i % 3}") for i in range(2500)]
    expected, (prompt, response) = [(p, r or "") for p, r in rows], map(pa.array, zip(*rows, strict=True))
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        table = pa.table({"prompt": prompt, "response": response.cast(kind), "x": pa.nulls(2500)})
        assert pairs_of(write_arrow(tmp_path / "x.arrow", table)) == expected
        assert pairs_of(write_arrow(tmp_path / "x.arrow", table, as_file=True)) == expected


def test_objects_that_datasets_keeps_as_json_are_objects_again(tmp_path):
    turns = pa.array([['{"role": "user", "content": "q"}', '{"role": "assistant", "content": "a", "x": 1}']])
    messages = pa.ListArray.from_arrays(turns.offsets, pa.ExtensionArray.from_storage(pa.json_(), turns.values))
    assert pairs_of(write_arrow(tmp_path / "x.arrow", pa.table({"messages": messages}))) == [("q", "a")]


def test_a_text_above_the_limit_costs_only_its_own_row(tmp_path):
    texts, problems = ["p", "x" * MAX_ITEM_CHARS, "q"], []
    path = write_arrow(tmp_path / "x.arrow", pa.table({"prompt": texts, "response": ["r"] * 3}))
    assert [pair[0] for pair in read_pairs(path, on_malformed=problems.append)] == texts[::2]
    assert [problem.removeprefix(str(path))[:6] for problem in problems] == [" row 2"]


def shared_view(count):
    """One text of half a million characters that `count` views show."""
    views = np.zeros((count, 4), np.int32)
    views[:, 0], views[:, 1] = 500_000, int.from_bytes(b"aaaa")
    buffers = [None, pa.py_buffer(views.tobytes()), pa.py_buffer(b"a" * 500_000)]
    return pa.Array.from_buffers(pa.string_view(), count, buffers)


def read_elsewhere(*paths):
    """(what each file gives, MiB that the process grew) in a process of limited memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, encoding="utf-8", timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *results, grown_mib = done.stdout.splitlines()
    return results, float(grown_mib)


def test_memory_stays_flat_however_much_a_file_holds_or_claims(tmp_path):
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), ["a" * 500_000])
    nothing = pa.ListArray.from_arrays([0, 2**31 - 1], pa.nulls(2**31 - 1))
    pairs = {"prompt": ["p"], "response": ["r"]}
    files = {
        "small": pa.table(pairs), "large": pa.table({"prompt": ["p" * 1000] * 100_000, "response": ["r"] * 100_000}),
        "dictionary": pa.table({"prompt": same, "response": same}), "lists": pa.table(pairs | {"x": nothing}),
        "views": pa.table({"prompt": shared_view(3000), "response": ["r"] * 3000}),
    }  # fmt: skip
    rows = dict(large=1000)
    paths = [write_arrow(tmp_path / f"{name}.arrow", files[name], rows=rows.get(name, 10**6)) for name in files]
    (large, *refusals), grown_mib = read_elsewhere(*paths)
    assert large == "100000" and grown_mib < 60
    assert all("far more than a file of texts does" in refusal for refusal in refusals) and len(refusals) == 3
    for compression in ("lz4", "zstd"):
        path = write_arrow(tmp_path / "x.arrow", files["views"].slice(0, 1), compression=compression)
        assert "compressed, which is not read" in refusal(path)


def test_damaged_files_are_refused_and_never_end_the_process(tmp_path):
    path = write_arrow(tmp_path / "x.arrow", pa.table({"prompt": ["p" * 50, "q"], "response": ["r", "s"]}))
    whole, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 3):
            data[place] = random.integers(256)
        try:
            pairs_of(write(path, bytes(data[: len(data) - random.integers(2) * 40])))
        except ValueError as error:
            assert str(path) in str(error)
    assert "damaged or not arrow" in refusal(write(path, b"no arrow at all"))
    values = pa.array([1], pa.int64())
    for array in (pa.RunEndEncodedArray.from_arrays([1], values), pa.array([[1]], pa.list_view(pa.int64()))):
        assert "is not read" in refusal(write_arrow(path, pa.table({"prompt": ["p"], "response": ["r"], "x": array})))


def test_a_value_that_python_cannot_hold_is_refused_by_the_file_s_name(tmp_path):
    dates = pa.array([10**7], pa.int32()).cast(pa.date32())
    path = write_arrow(tmp_path / "x.arrow", pa.table({"prompt": ["p"], "response": ["r"], "day": dates}))
    assert "a value cannot be read (date value out of range)" in refusal(path)
