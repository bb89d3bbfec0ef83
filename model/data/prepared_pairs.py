"""Cleaned pairs as a parquet file; a pair keeps what was said before it in the columns `system` and `history`."""

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from model.data.cleaning import clean_context, first_texts
from model.data.conversation import Context

ROW_GROUP_PAIRS, ROW_GROUP_CHARS = 20_000, 16_000_000
SCHEMA = pa.schema({"prompt": pa.string(), "response": pa.string()})
HISTORY = pa.list_(pa.list_(pa.string()))  # of [question, answer], oldest first
CONTEXT_SCHEMA = pa.schema([*SCHEMA, pa.field("system", pa.string()), pa.field("history", HISTORY)])


@dataclass(frozen=True, slots=True)
class PreparedPair:
    """A cleaned pair with its cleaned context, and the first texts of its dialogue."""

    prompt: str
    response: str
    context: Context | None
    first_texts: tuple[str, ...]

    def key(self) -> bytes:
        """Equal for pairs of equal text and context: a hash."""
        context = [self.context.system, *(turn.text for turn in self.context.turns)] if self.context else []
        return fingerprint(self.prompt, self.response, *context)

    def num_chars(self) -> int:
        turns = self.context.turns if self.context else ()
        return len(self.prompt) + len(self.response) + sum(len(turn.text) for turn in turns)

    def row(self) -> tuple:
        """Values of the columns of CONTEXT_SCHEMA."""
        if not self.context:
            return self.prompt, self.response, None, None
        return self.prompt, self.response, self.context.system or None, _history(self.context.turns) or None


def in_context(
    pair: tuple[str, str], context: Context | None, max_chars: int, max_context_chars: int
) -> tuple[PreparedPair, bool]:
    """(the cleaned pair with its context, cleaned; whether texts of the context cannot be used)."""
    if context is None:
        return PreparedPair(*pair, None, pair), False
    kept, is_shortened = clean_context(context, max_chars, max_context_chars)
    return PreparedPair(*pair, kept, first_texts(context, *pair, max_chars)), is_shortened


class HasContext(Exception):
    """A pair has a context, and the file was begun without columns for it."""


def write_parquet(
    pairs: Iterator[PreparedPair], paths: list[Path], validation_share: float, with_context: bool
) -> list[array]:
    """Write the pairs, `validation_share` of them to the second path, if any; returns a hash of each prompt by file.

    The pairs of a dialogue from its second on go to one file: `first_texts` decides. Raises HasContext at the first
    pair with a context unless `with_context`.
    """
    prompts, groups = [array("Q") for _ in paths], [_Group() for _ in paths]
    limit = int(validation_share * 2**64) if len(paths) > 1 else 0
    schema = CONTEXT_SCHEMA if with_context else SCHEMA
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]  # pyarrow itself opens only names in UTF-8
        writers = [stack.enter_context(pq.ParquetWriter(file, schema, compression="zstd")) for file in files]
        for pair in pairs:
            if pair.context and not with_context:
                raise HasContext
            place = int(int.from_bytes(fingerprint(*pair.first_texts)[:8]) < limit)
            prompts[place].append(int.from_bytes(fingerprint(pair.prompt)[:8]))
            groups[place].add(pair)
            if groups[place].is_full():
                groups[place].write(writers[place], schema)
        for writer, group in zip(writers, groups, strict=True):
            if group.rows:
                group.write(writer, schema)
    return prompts


class _Group:
    """Rows of a row group to come."""

    def __init__(self):
        self.rows, self.num_chars = [], 0

    def add(self, pair):
        self.rows.append(pair.row())
        self.num_chars += pair.num_chars()

    def is_full(self):
        return len(self.rows) == ROW_GROUP_PAIRS or self.num_chars >= ROW_GROUP_CHARS

    def write(self, writer, schema):
        columns = list(zip(*self.rows, strict=True))[: len(schema)]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        self.rows, self.num_chars = [], 0


def fingerprint(*texts: str) -> bytes:
    """16-byte hash of the texts; clean text has no NUL, so NUL can separate the sides."""
    return blake2b("\0".join(texts).encode(), digest_size=16).digest()


def _history(turns):
    """[[question, answer], …] of turns that alternate but for the first, which may be an answer."""
    exchanges = []
    for turn in turns:
        if turn.role == "user" or not exchanges or exchanges[-1][1]:
            exchanges.append(["", ""])
        exchanges[-1][turn.role == "assistant"] = turn.text
    return exchanges
