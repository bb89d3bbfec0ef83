"""Tokenizes the rows of one or more files once and keeps their ids on disk, memory-mapped.

A token store is a directory model_save/tokens/<key>/ with ids.arrow (token ids, EOS included), lengths.npy, hashes.npy,
a <name>.npy for each column of plain values, and meta.json. The objective names the columns. The store is built once
and atomically; every rank maps it without a copy in memory.
"""

import hashlib
import logging
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tokenize import TokenError

import numpy as np
import pyarrow as pa
import ujson

from model.data.file_list import names_of
from model.data.store_writer import sha256_of, write_store
from model.data.tokenizer import ChatTokenizer
from model.runtime.atomic_io import held_lock, write_file
from model.runtime.json_stream import read_object

# A store of another format is built again: up to 7, the EOS was not in the key, up to 6, thoughts and tools were left
# out, up to 5, dialogues were taken apart, up to 4, </s> was parsed.
FORMAT = 8
META = {"source", "sha256", "ids_sha256", "ignored", "rows", "rows_of_files", "empty", "tokens", "cut"}
META |= {"turns_left_out"}
OLDER = "the tokens of {} in {} are of another version and are made anew: that directory can be deleted"
LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Source:
    """Everything that determines the content of a token store.

    `objective` is an Objective (model/train/objectives/protocol.py): it names the columns, reads rows and encodes them.
    """

    paths: tuple  # of the files, whose rows follow one another
    objective: object
    tokenizer: ChatTokenizer
    max_seq_len: int  # most tokens of a column, EOS included
    columns: tuple = ("", "")  # of the file, as the user named them; empty: found by name
    readers: tuple = ()  # for each file, what reads and encodes its rows; (): `objective`

    def key(self):
        """Plain values that differ for stores of different content; raises ValueError if a file is missing."""
        return dict(
            format=FORMAT, files=[_file_key(Path(path)) for path in self.paths],
            tokenizer=self.tokenizer.fingerprint, eos_id=self.tokenizer.eos_id, max_seq_len=self.max_seq_len,
            columns=list(self.columns), objective=self.objective.name, encoding=self.objective.encoding,
        )  # fmt: skip


def _file_key(path):
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a parquet, json, jsonl, csv or tsv file")
    stat = path.stat()
    # a file in the cache of huggingface_hub is a link to one whose name is a hash
    return dict(path=str(path.parent.resolve() / path.name), size=stat.st_size, mtime_ns=stat.st_mtime_ns)


@dataclass(frozen=True)
class Encoded:
    """Token ids and values of a batch of rows."""

    columns: list  # for each column, the ids of each row: a list of lists
    num_cut: list  # for each column, the number of rows that were truncated
    values: dict  # {name of a column of plain values: a number for each row}
    turns_left_out: int = 0  # earlier turns that did not fit, counted for each row
    single_pairs: int = 0  # rows that are a question with its answer, and nothing before them
    systems_moved: int = 0  # rows whose system text stands first, though it was said amid them
    ignored: Counter = field(default_factory=Counter)  # what the form of these ids cannot say (file_request)
    texts: int | None = None  # that the rows are chunks of; None: each row is one of the file


@dataclass(frozen=True)
class TokenStore:
    """Tokenized examples on disk, addressed by row number."""

    rows: pa.Table  # memory-mapped; datasets.Dataset.from_file reads its file too
    lengths: np.ndarray  # (rows, columns) in tokens; memory-mapped
    hashes: np.ndarray  # uint64 (rows, 2): hash of the first column and of the whole row; memory-mapped
    values: dict  # {name: float32 (rows,)}; memory-mapped
    meta: dict
    directory: Path
    maps: tuple = ()  # the mmaps of its files

    def __len__(self):
        return len(self.lengths)

    @property
    def rows_of_files(self):
        """Number of rows of each file, in order."""
        return self.meta["rows_of_files"]

    @property
    def identity(self):
        """Equal for stores with the same rows in the same order, truncated alike, whatever file they came from."""
        return f"{self.meta['ids_sha256']} {self.meta['source']['max_seq_len']}"

    @property
    def file_identity(self):
        """The `identity` in checkpoints of format 0, computed from the bytes of its only file."""
        source = self.meta["source"]
        return f"{self.meta['sha256']} {source['max_seq_len']} {source['columns']}"

    def tokens(self, ids):
        """The ids of each column of the examples `ids`, in that order: a tuple of int64 (tokens,), concatenated.

        Raises RuntimeError if a file became shorter since it was opened: reading it would end this process (SIGBUS).
        """
        if any(each.size() < len(each) for each in self.maps):
            raise RuntimeError(
                f"the tokens in {self.directory} were cut short while they were in use: delete that directory, then "
                "resume"
            )
        firsts, token_ids, offsets, first_places = self._on_disk
        batches = np.searchsorted(firsts, ids, side="right") - 1
        rows, flat = ids - firsts[batches], []
        for (first_offset, first_id), lengths in zip(first_places, self.lengths[ids].astype(np.int64).T, strict=True):
            starts = first_id[batches] + offsets[first_offset[batches] + rows]
            before = np.cumsum(lengths) - lengths
            flat.append(token_ids[np.arange(lengths.sum()) + np.repeat(starts - before, lengths)].astype(np.int64))
        return tuple(flat)

    @cached_property
    def _on_disk(self):
        """What `tokens` needs to gather any rows in one look-up, without slicing a table for each row.

        (first row of each batch, the mapped file as token ids, the mapped file as int32 offsets, and for each column
        where its offsets and its ids begin in every batch).
        """
        columns = [column.chunks for column in self.rows.columns]
        buffers = [[part.buffers() for part in column] for column in columns]  # validity, offsets, validity, ids
        first = min(part[1].address for column in buffers for part in column)
        end = max(part[3].address + part[3].size for column in buffers for part in column)
        mapped = pa.foreign_buffer(first, end - first, base=self.rows)
        token_ids = np.frombuffer(mapped, np.dtype(str(columns[0][0].type.value_type)))
        offsets = np.frombuffer(mapped, np.int32, count=(end - first) // 4)
        first_places = [
            (_addresses(column, 1, first) // 4, _addresses(column, 3, first) // token_ids.itemsize)
            for column in buffers
        ]
        return np.cumsum([0, *map(len, columns[0])])[:-1], token_ids, offsets, first_places


def _addresses(column, index, first):
    """int64 (batches,): byte position of one buffer of each batch after the address `first`."""
    return np.array([part[index].address - first for part in column])


def open_store(source, root, progress=None, stop=lambda: False, write=write_store):
    """The TokenStore of a Source; one of the calling processes builds it, with `write`, if it does not exist.

    Calls `progress(rows)` while it tokenizes. Raises KeyboardInterrupt when `stop()` returns true, and ValueError for a
    file without usable rows.
    """
    key = source.key()
    directory = _directory(key, root)
    if not _is_built(directory):
        with held_lock(directory.with_suffix(".lock"), stop):
            if not _is_built(directory) and not _adopt(key, directory):
                write(source, key, directory, progress, stop)
    return read_store(directory)


def find_store(source, root):
    """The TokenStore that `open_store` would return, or None if it is not built yet."""
    directory = _directory(source.key(), root)
    return read_store(directory) if _is_built(directory) else None


def _directory(key, root):
    return Path(root) / hashlib.sha256(ujson.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def read_store(directory):
    """The TokenStore in `directory`; raises ValueError if it is damaged or may not be read."""
    try:
        meta = read_object(directory / "meta.json")
        if missing := META - meta.keys():
            raise ValueError(f"meta.json lacks {', '.join(sorted(missing))}")
        with open(directory / "ids.arrow", "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        rows = pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()
        names = [path.stem for path in sorted(directory.glob("*.npy"))]
        arrays = {name: open_column(directory / f"{name}.npy", len(rows)) for name in names}
        maps = (mapped, *(array.base for array in arrays.values()))
        lengths, hashes = arrays.pop("lengths"), arrays.pop("hashes")
        return TokenStore(rows, lengths, hashes, arrays, meta, directory, maps)
    except (ValueError, KeyError, FileNotFoundError, TokenError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise _damaged(directory, error) from None
    except PermissionError as error:
        raise _unreadable(directory, error) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(directory, error) from None  # pyarrow's, for a file that is too short


def open_column(path, num_rows, mode="r"):
    """The array in an .npy file, memory-mapped; raises ValueError unless the file is whole and has so many rows."""
    array = np.lib.format.open_memmap(path, mode=mode)
    if len(array) != num_rows:
        raise ValueError(f"{path.name} has {len(array):,} rows, and must have {num_rows:,}")
    return array


def _is_built(directory):
    try:
        (directory / "meta.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError as error:  # Path.exists hides this error from Python 3.14 on
        raise _unreadable(directory, error) from None
    return True


def _damaged(directory, error):
    return ValueError(f"the tokens in {directory} are damaged ({error}): delete that directory")


def _unreadable(directory, error):
    return ValueError(f"the tokens in {directory} cannot be read ({error}): allow it, or delete that directory")


def _adopt(key, directory):
    """Rename the store of files that differ only in mtime, with equal content; returns whether there was one."""
    content, paths = None, [file["path"] for file in key["files"]]
    for meta_path in directory.parent.glob("[!.]*/meta.json"):
        try:
            meta = read_object(meta_path)
        except (OSError, ValueError):
            continue  # damaged; opening that store reports it
        source = meta.get("source", {})
        if source.get("format") != FORMAT and [file.get("path") for file in source.get("files", ())] == paths:
            LOGGER.info(OLDER.format(names_of(paths), meta_path.parent))
        if _without_times(source) != _without_times(key):
            continue
        content = content or sha256_of(key["files"])
        if content == meta.get("sha256"):
            write_file(meta_path, ujson.dumps({**meta, "source": key}).encode())
            os.rename(meta_path.parent, directory)
            return True
    return False


def _without_times(key):
    """The key of a store without the times at which its files were changed; None for one of another format."""
    files = key.get("files", ()) if key.get("format") == FORMAT else ()
    return {**key, "files": [{**file, "mtime_ns": 0} for file in files]} if files else None
