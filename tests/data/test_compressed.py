"""Files with .gz and .zst: the rows of what they hold, in bounded memory, or a reason."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.data import compressed
from tests.data.files import pairs_of, refusal, write

PAIRS = [("问 1", "答, 1"), ("q\n2", "a 2")]
TEXTS = {
    ".jsonl": '{"prompt": "问 1", "response": "答, 1"}\n{"prompt": "q\\n2", "response": "a 2"}\n',
    ".json": '[{"prompt": "问 1", "response": "答, 1"}, {"prompt": "q\\n2", "response": "a 2"}]',
    ".csv": 'prompt,response\n问 1,"答, 1"\n"q\n2",a 2\n',
    ".tsv": 'prompt\tresponse\n问 1\t"答, 1"\n"q\n2"\ta 2\n',
}


def packed(data, suffix):
    return gzip.compress(data) if suffix == ".gz" else pa.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_each_format_is_read_as_if_it_were_not_compressed(tmp_path, packing):
    for suffix, text in TEXTS.items():
        for name, encoding in (("utf8", "utf-8"), ("chinese", "gb18030")):
            path = write(tmp_path / f"{name}{suffix}{packing.upper()}", packed(text.encode(encoding), packing))
            assert pairs_of(path) == PAIRS, path
    table, sink = (
        pa.table(dict(zip(("prompt", "response"), zip(*PAIRS, strict=True), strict=True))),
        pa.BufferOutputStream(),
    )
    pq.write_table(table, sink)
    assert pairs_of(write(tmp_path / f"x.parquet{packing}", packed(sink.getvalue().to_pybytes(), packing))) == PAIRS
    two = packed(TEXTS[".jsonl"].encode(), packing) * 2
    assert pairs_of(write(tmp_path / f"two_members.jsonl{packing}", two)) == PAIRS * 2


def test_what_is_damaged_cut_or_expands_without_limit_is_refused(tmp_path, monkeypatch):
    for packing in (".gz", ".zst"):
        whole, path = packed(TEXTS[".jsonl"].encode() * 9000, packing), tmp_path / f"x.jsonl{packing}"
        for data in (whole[:-9], b"no archive " * 9, whole + b"more"):
            assert "damaged or cut" in refusal(write(path, data))
        write(path, packed(b'"' + b"a" * 70_000_000, packing))
        monkeypatch.setattr(compressed, "BYTES_PER_BYTE", 1)
        monkeypatch.setattr(compressed, "FREE_BYTES", 1 << 20)
        assert "expands to more than 1 times its size" in refusal(path)
        monkeypatch.undo()
    assert "unknown suffix '.gz'" in refusal(write(tmp_path / "x.gz", gzip.compress(b"x")))
