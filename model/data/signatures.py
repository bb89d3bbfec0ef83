"""What a file is by its first bytes, whatever its name says."""

import json
from pathlib import Path

from model.data.compressed import data_suffix, open_bytes

SIGNATURES = (  # first bytes, what it is, the suffix with which it is read
    (b"\x1f\x8b", "it is compressed by gzip: add .gz to its name", ""),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd: add .zst to its name", ""),
    (b"BZh", "it is compressed by bzip2: unpack it with bunzip2", ""),
    (b"\xfd7zXZ", "it is compressed by xz: unpack it with unxz", ""),
    (b"PK\x03\x04", "it is a zip archive, as .xlsx is: unpack it, or save the table as .csv", ""),
    (b"PAR1", "it is parquet: give it the suffix .parquet", ".parquet"),
    (b"ARROW1", "it is an Arrow file: give it the suffix .arrow", ".arrow"),
    (b"version https://git-lfs", "it is Git LFS's pointer to a file: fetch the file with git lfs pull", ""),
)
TABLES = (".csv", ".tsv")
LINE_BYTES = 1 << 16


def check_signature(path: Path) -> None:
    """Raise ValueError for a file that is something else than its name says."""
    with open_bytes(path) as file:
        line = file.readline(LINE_BYTES)
    suffix = data_suffix(path)
    for begin, what, own_suffix in SIGNATURES:
        if line.startswith(begin) and suffix != own_suffix:
            raise ValueError(f"{path}: {what}")
    if suffix in TABLES and _is_json(line):
        raise ValueError(f"{path}: it holds JSON: give it the suffix .jsonl")


def _is_json(line):
    if line.lstrip(b"\xef\xbb\xbf \t")[:1] not in (b"{", b"["):
        return False
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict | list) or line.strip() in (b"[", b"{")
    except (ValueError, RecursionError):
        return line.strip() in (b"[", b"{")
