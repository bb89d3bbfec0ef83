"""Writes a token store: reads the files, encodes their rows, and puts the ids on the disk."""

import gc
import hashlib
import os
from collections import Counter
from contextlib import contextmanager
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import ujson

from model.data.conversation import Conversation
from model.data.file_list import names_of
from model.data.file_request import describe_ignored
from model.data.row_hashes import write_hashes
from model.runtime.atomic_io import whole_directory

ROWS_PER_BATCH, CHARS_PER_BATCH = 4096, 1 << 22  # the tokens of the latter take 0.6 GB of host memory
ALLOCATIONS = 200_000  # between two collections of garbage


def write_store(source, key, directory, progress, stop):
    """Write the token store of a Source, whose `key` it is, to `directory`, whole or not at all.

    Raises as `open_store`, and ValueError for a file that changed since `key` was made.
    """
    counts, ignored = Counter(), Counter()
    with whole_directory(directory) as draft, unchanged(key["files"]) as sha256, rare_collections():
        batches = _encoded_batches(source, counts, ignored, progress, stop)
        lengths, values = _write_ids(source, draft / "ids.arrow", batches)
        if not lengths:
            names = names_of(source.paths)
            columns = ", ".join(filter(None, source.columns))
            asked = f" (columns asked for: {columns})" if columns else ""
            raise ValueError(f"{names}: none of its {counts['empty']} rows has {source.objective.needs}{asked}")
        lengths = np.concatenate(lengths)
        np.save(draft / "lengths.npy", lengths)
        for name, parts in values.items():
            np.save(draft / f"{name}.npy", np.concatenate(parts))
        ids_sha256 = write_hashes(draft, len(lengths), values)
        meta = dict(
            source=key, sha256=sha256, ids_sha256=ids_sha256, ignored=describe_ignored(ignored),
            ignored_counts=[[*key, count] for key, count in ignored.items()],
            rows=len(lengths), rows_of_files=[counts["file", place] for place in range(len(source.paths))],
            empty=counts["empty"], tokens=lengths.sum(axis=0, dtype=np.int64).tolist(),
            cut=[counts["cut", column] for column in range(lengths.shape[1])], turns_left_out=counts["turns"],
            single_pairs=counts["singles"], systems_moved=counts["moved"], texts=counts["texts"],
            chunks=counts["chunks"],
        )  # fmt: skip
        (draft / "meta.json").write_text(ujson.dumps(meta))


@contextmanager
def rare_collections():
    """Inside of it Python looks for cyclic garbage seldom: rows are texts and lists of numbers, where it finds none.

    At Python's own pace this takes an eighth of the time of pairs and a quarter of that of dialogues.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(ALLOCATIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def unchanged(files):
    """Gives the hashes of what is read inside of it, those of the bytes of `files`, each dict(path, size, mtime_ns).

    Raises ValueError where a file is not as it was then: what was read may be a part of each version. That is the error
    too if reading failed.
    """
    _check_times(files)
    sha256 = sha256_of(files)
    try:
        yield sha256
    except (ValueError, OSError):
        _check_times(files)
        raise
    _check_times(files)
    for file, before, after in zip(files, sha256.split(), sha256_of(files).split(), strict=True):
        if before != after:
            raise _changed(file)


def _check_times(files):
    for file in files:
        try:
            found = os.stat(file["path"])
        except FileNotFoundError:
            raise _changed(file) from None
        if (found.st_size, found.st_mtime_ns) != (file["size"], file["mtime_ns"]):
            raise _changed(file) from None


def _changed(file):
    return ValueError(
        f"{file['path']}: the file changed while it was read: wait until it is written as a whole, then type the same "
        "command again"
    )


def sha256_of(files):
    """Hashes of the bytes of each file."""
    digests = []
    for each in files:
        with open(each["path"], "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(digests)


def _encoded_batches(source, counts, ignored, progress, stop):
    """Yield an Encoded for each ROWS_PER_BATCH rows of a file; adds to `counts` and `ignored`."""
    for place, reader, batch in _row_batches(source, ignored):
        if stop():
            raise KeyboardInterrupt
        encoded = reader.encode(batch, source.tokenizer, source.max_seq_len)
        num_kept = len(encoded.columns[0])
        ignored.update(encoded.ignored)
        num_used = num_kept if encoded.texts is None else encoded.texts
        counts.update(read=len(batch), empty=len(batch) - num_used, turns=encoded.turns_left_out)
        counts.update({} if encoded.texts is None else dict(texts=num_used, chunks=num_kept))
        counts.update(singles=encoded.single_pairs, moved=encoded.systems_moved)
        counts.update({("cut", column): num_cut for column, num_cut in enumerate(encoded.num_cut)})
        counts.update({("file", place): num_kept})
        if num_kept:
            yield encoded
        if progress:
            progress(counts["read"])


def _row_batches(source, ignored):
    """Yield (place of the file, what reads it, list of its next rows) of all files in their order."""
    readers = source.readers or [source.objective] * len(source.paths)
    for place, (path, reader) in enumerate(zip(source.paths, readers, strict=True)):
        rows = reader.read(path, source.columns, ignored)
        while batch := taken_rows(rows, ROWS_PER_BATCH, CHARS_PER_BATCH):
            yield place, reader, batch


def taken_rows(rows, most, most_chars):
    """The next rows, `most` of them, fewer where their texts are long."""
    taken, num_chars = [], 0
    for row in islice(rows, most):
        taken.append(row)
        num_chars += sum(map(len, texts_in(row)))
        if num_chars > most_chars:
            break
    return taken


def texts_in(row):
    """Yield the texts of a row of an objective: its own, and those of its conversations."""
    for value in row:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Conversation):
            yield value.tools
            for turn in value.turns:
                yield from (turn.text, turn.thought, *turn.calls)


def store_schema(columns, vocab_size):
    """Arrow schema of ids.arrow: a list of token ids for each column, of two bytes each if vocab_size allows."""
    kind = pa.uint16() if vocab_size <= 2**16 else pa.int32()
    return pa.schema([(name, pa.list_(kind)) for name in columns])


def column_lengths(encoded):
    """(rows, columns): tokens of each column of the rows of an Encoded, as in a store."""
    return np.array([[len(ids) for ids in column] for column in encoded.columns]).reshape(len(encoded.columns), -1).T


def _write_ids(source, path, batches):
    """Write the ids of all Encoded as an Arrow stream; returns lists of the batches' lengths, and of their values."""
    objective = source.objective
    schema = store_schema(objective.columns, source.tokenizer.vocab_size)
    lengths, values = [], {name: [] for name in objective.values}
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for encoded in batches:
            columns = [_list_array(column, kind) for column, kind in zip(encoded.columns, schema.types, strict=True)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            lengths.append(column_lengths(encoded).astype(np.uint16))
            for name, parts in values.items():
                parts.append(np.asarray(encoded.values[name], np.float32))
    return lengths, values


def _list_array(rows, list_type):
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(rows), str(list_type.value_type), count=offsets[-1])
    return pa.ListArray.from_arrays(offsets, flat)
