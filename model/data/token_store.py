"""Tokenizes the pairs of a file once and keeps their ids on disk, memory-mapped.

A token store is a directory model_save/tokens/<key>/ with pairs.arrow (token ids, EOS included), lengths.npy,
hashes.npy and meta.json. It is built once and atomically; every rank maps it without a copy in memory.
"""

import fcntl
import hashlib
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from tokenize import TokenError

import numpy as np
import pyarrow as pa
import ujson
from datasets import Dataset

from model.data.pair_hashes import write_hashes
from model.data.readers import describe_ignored, read_pairs
from model.runtime.atomic_io import open_own, whole_directory, write_file
from model.runtime.json_stream import read_object

FORMAT = 1  # a store of another format is built again
PAIRS_PER_BATCH = 4096
COUNTS = "pairs", "empty", "prompts_cut", "responses_cut", "prompt_tokens", "response_tokens"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class TokenStore:
    """Tokenized examples on disk, addressed by row number."""

    rows: Dataset
    lengths: np.ndarray  # (rows, 2): tokens of the prompt and of the response; memory-mapped
    hashes: np.ndarray  # uint64 (rows, 2): hash of the prompt and of the pair; memory-mapped
    meta: dict
    directory: Path

    def __len__(self):
        return len(self.lengths)

    @property
    def identity(self):
        """Equal for stores with the same pairs in the same order, truncated alike, whatever file they came from."""
        return f"{self.meta['ids_sha256']} {self.meta['source']['max_seq_len']}"

    @property
    def file_identity(self):
        """The `identity` in checkpoints of format 0, computed from the bytes of the file."""
        source = self.meta["source"]
        return f"{self.meta['sha256']} {source['max_seq_len']} {source['columns']}"

    def tokens(self, ids):
        """(prompt ids, response ids) of the examples `ids`, in that order; int64 (tokens,) each, concatenated."""
        firsts, token_ids, offsets, sides = self._on_disk
        batches = np.searchsorted(firsts, ids, side="right") - 1
        rows, flat = ids - firsts[batches], []
        for (first_offset, first_id), lengths in zip(sides, self.lengths[ids].astype(np.int64).T, strict=True):
            starts = first_id[batches] + offsets[first_offset[batches] + rows]
            before = np.cumsum(lengths) - lengths
            flat.append(token_ids[np.arange(lengths.sum()) + np.repeat(starts - before, lengths)].astype(np.int64))
        return tuple(flat)

    @cached_property
    def _on_disk(self):
        """What `tokens` needs to gather any pairs in one look-up, without slicing a table for each pair.

        (first row of each batch, the mapped file as token ids, the mapped file as int32 offsets, and for each side
        where its offsets and its ids begin in every batch).
        """
        columns = [self.rows.data.column(name).chunks for name in ("prompt_ids", "response_ids")]
        buffers = [[part.buffers() for part in column] for column in columns]  # validity, offsets, validity, ids
        first = min(part[1].address for column in buffers for part in column)
        end = max(part[3].address + part[3].size for column in buffers for part in column)
        mapped = pa.foreign_buffer(first, end - first, base=self.rows)
        token_ids = np.frombuffer(mapped, columns[0][0].type.value_type.to_pandas_dtype())
        offsets = np.frombuffer(mapped, np.int32, count=(end - first) // 4)
        sides = [
            (_addresses(column, 1, first) // 4, _addresses(column, 3, first) // token_ids.itemsize)
            for column in buffers
        ]
        return np.cumsum([0, *map(len, columns[0])])[:-1], token_ids, offsets, sides


def _addresses(column, index, first):
    """int64 (batches,): byte position of one buffer of each batch after the address `first`."""
    return np.array([part[index].address - first for part in column])


def open_store(path, tokenizer, max_seq_len, root, *, columns=("", ""), progress=None, stop=lambda: False):
    """The TokenStore of the pairs in `path`; one of the calling processes builds it if it does not exist.

    Calls `progress(rows)` while it tokenizes. Raises KeyboardInterrupt when `stop()` returns true, and ValueError for a
    file without usable pairs.
    """
    source = _source(path, tokenizer, max_seq_len, columns)
    directory = _directory(source, root)
    if not _is_built(directory):
        with _lock(directory.with_suffix(".lock"), stop):
            if not _is_built(directory) and not _adopt(source, directory):
                _build(source, tokenizer, directory, progress, stop)
    return read_store(directory)


def find_store(path, tokenizer, max_seq_len, root, *, columns=("", "")):
    """The TokenStore that `open_store` would return, or None if it is not built yet."""
    directory = _directory(_source(path, tokenizer, max_seq_len, columns), root)
    return read_store(directory) if _is_built(directory) else None


def token_lengths(pairs, tokenizer, max_seq_len):
    """(pairs, 2): tokens of each prompt and response, EOS included, as in a store; skips pairs with a blank side."""
    pairs = [pair for pair in pairs if all(side.strip() for side in pair)]
    sides = [_encode(texts, tokenizer, max_seq_len)[0] for texts in zip(*pairs, strict=True)]
    return np.array([[len(ids) for ids in side] for side in sides]).reshape(2, -1).T


def _directory(source, root):
    return Path(root) / hashlib.sha256(ujson.dumps(source, sort_keys=True).encode()).hexdigest()[:16]


def read_store(directory):
    """The TokenStore in `directory`; raises ValueError if it is damaged or may not be read."""
    try:
        meta = read_object(directory / "meta.json")
        if missing := {"source", "sha256", "ids_sha256", "ignored", *COUNTS} - meta.keys():
            raise ValueError(f"meta.json lacks {', '.join(sorted(missing))}")
        rows = Dataset.from_file(str(directory / "pairs.arrow")).with_format("arrow")
        lengths, hashes = (
            np.lib.format.open_memmap(directory / name, mode="r") for name in ("lengths.npy", "hashes.npy")
        )
        return TokenStore(rows, lengths, hashes, meta, directory)
    except (ValueError, FileNotFoundError, TokenError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(f"the tokens in {directory} are damaged ({error}): delete that directory") from None
    except PermissionError as error:
        raise _unreadable(directory, error) from None


def _is_built(directory):
    try:
        (directory / "meta.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError as error:  # Path.exists hides this error from Python 3.14 on
        raise _unreadable(directory, error) from None
    return True


def _unreadable(directory, error):
    return ValueError(f"the tokens in {directory} cannot be read ({error}): allow it, or delete that directory")


def store_schema(vocab_size):
    """Arrow schema of pairs.arrow: lists of token ids for both sides, of two bytes each if vocab_size allows."""
    kind = pa.uint16() if vocab_size <= 2**16 else pa.int32()
    return pa.schema([(name, pa.list_(kind)) for name in ("prompt_ids", "response_ids")])


def _source(path, tokenizer, max_seq_len, columns):
    """Everything that determines the content of a store; raises ValueError if the file is missing."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a parquet, json, jsonl, csv or tsv file")
    stat = path.stat()
    return dict(
        format=FORMAT, path=str(path.resolve()), size=stat.st_size, mtime_ns=stat.st_mtime_ns,
        tokenizer=tokenizer.fingerprint, max_seq_len=max_seq_len, columns=list(columns),
    )  # fmt: skip


@contextmanager
def _lock(path, stop):
    """Hold a file lock, which the system releases if this process dies; waits for another process that holds it.

    Raises KeyboardInterrupt when `stop()` returns true.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop():
                    raise KeyboardInterrupt from None
                time.sleep(POLL_SECONDS)
        yield


def _adopt(source, directory):
    """Rename the store of a file that differs only in mtime, with equal content; returns whether there was one."""
    content = None
    for meta_path in directory.parent.glob("[!.]*/meta.json"):
        try:
            meta = read_object(meta_path)
        except (OSError, ValueError):
            continue  # damaged; opening that store reports it
        if {**meta.get("source", {}), "mtime_ns": 0} != {**source, "mtime_ns": 0}:
            continue
        content = content or _sha256(source["path"])
        if content == meta.get("sha256"):
            write_file(meta_path, ujson.dumps({**meta, "source": source}).encode())
            os.rename(meta_path.parent, directory)
            return True
    return False


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(source, tokenizer, directory, progress, stop):
    counts, ignored = dict.fromkeys(COUNTS, 0), Counter()
    with whole_directory(directory) as draft:
        lengths = _write_pairs(source, tokenizer, draft / "pairs.arrow", counts, ignored, progress, stop)
        if not counts["pairs"]:
            raise ValueError(
                f"{source['path']}: none of its {counts['empty']} pairs has text on both sides; name the columns with "
                "--prompt_column and --response_column, or clean the file with scripts/prepare_data.py"
            )
        np.save(draft / "lengths.npy", np.concatenate(lengths))
        ids_sha256 = write_hashes(draft, counts["pairs"])
        meta = dict(source=source, sha256=_sha256(source["path"]), ids_sha256=ids_sha256, **counts)
        meta["ignored"] = describe_ignored(ignored)
        (draft / "meta.json").write_text(ujson.dumps(meta))


def _write_pairs(source, tokenizer, path, counts, ignored, progress, stop):
    """Write the token ids of all pairs as an Arrow stream; returns their lengths, uint16 (pairs, 2) per batch."""
    schema = store_schema(tokenizer.vocab_size)
    pairs, lengths = read_pairs(source["path"], *source["columns"], ignored=ignored), []
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while batch := list(islice(pairs, PAIRS_PER_BATCH)):
            if stop():
                raise KeyboardInterrupt
            kept = [(prompt, response) for prompt, response in batch if prompt.strip() and response.strip()]
            counts["empty"] += len(batch) - len(kept)
            sides = [_encode(texts, tokenizer, source["max_seq_len"]) for texts in zip(*kept, strict=True)]
            if sides:
                columns = [_list_array(side[0], kind) for side, kind in zip(sides, schema.types, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=schema))
                lengths.append(np.array([[len(ids) for ids in side[0]] for side in sides], np.uint16).T)
                _count(counts, sides, lengths[-1])
            if progress:
                progress(counts["pairs"] + counts["empty"])
    return lengths


def _encode(texts, tokenizer, max_seq_len):
    """(ids of each text, truncated and ended by one EOS, number of texts truncated)."""
    encoded = tokenizer.encode_batch(list(texts))
    num_cut = sum(len(ids) >= max_seq_len for ids in encoded)
    return [[*ids[: max_seq_len - 1], tokenizer.eos_id] for ids in encoded], num_cut


def _list_array(rows, list_type):
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(rows), list_type.value_type.to_pandas_dtype(), count=offsets[-1])
    return pa.ListArray.from_arrays(offsets, flat)


def _count(counts, sides, lengths):
    for (_, num_cut), name, tokens in zip(sides, ("prompt", "response"), lengths.sum(axis=0), strict=True):
        counts[f"{name}s_cut"] += num_cut
        counts[f"{name}_tokens"] += int(tokens)
    counts["pairs"] += len(lengths)


def describe_store(store):
    """One line: number of pairs, their mean lengths, and the share that was truncated."""
    meta, pairs = store.meta, store.meta["pairs"]
    line = f"{meta['source']['path']}: {pairs:,} pairs, {meta['prompt_tokens'] / pairs:.1f} + "
    line += f"{meta['response_tokens'] / pairs:.1f} tokens on average; cut to {meta['source']['max_seq_len']} tokens: "
    line += f"{meta['prompts_cut'] / pairs:.2%} of prompts, {meta['responses_cut'] / pairs:.2%} of responses"
    line += f"; {meta['empty']:,} pairs with an empty side left out" if meta["empty"] else ""
    return line + (f"; {meta['ignored']}" if meta["ignored"] else "")
