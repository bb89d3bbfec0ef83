"""Cleaned conversations as a parquet file: a row each, as `messages` and `tools`, or `prompt` and `response`.

Where all are single pairs, the columns are `prompt` and `response`; the one of documents is `text`.
"""

import json
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from model.data.conversation import Conversation, Document

ROW_GROUP_ROWS, ROW_GROUP_CHARS = 20_000, 16_000_000
NUM_FIRST_TEXTS = 4  # more than one exchange, because many conversations begin with the same greeting
_MESSAGE = [("role", pa.string()), ("content", pa.string())]
_MORE = [("reasoning_content", pa.string()), ("tool_calls", pa.string()), ("weight", pa.int8())]
# The forms of a file, each of which holds what those before it hold.
PAIRS = pa.schema({"prompt": pa.string(), "response": pa.string()})
MESSAGES = pa.schema({"messages": pa.list_(pa.struct(_MESSAGE))})
ALL_OF_MESSAGES = pa.schema({"messages": pa.list_(pa.struct(_MESSAGE + _MORE)), "tools": pa.string()})
TEXTS = pa.schema({"text": pa.string()})
FORMS = PAIRS, MESSAGES, ALL_OF_MESSAGES


class NeedsForm(Exception):
    """A row does not fit the form that the file was begun with."""

    def __init__(self, form: pa.Schema):
        super().__init__()
        self.form = form


def form_of(item: Conversation | Document) -> pa.Schema:
    """The first of FORMS that holds all that a Conversation says; TEXTS for a Document."""
    if isinstance(item, Document):
        return TEXTS
    turns = item.turns
    if item.tools or any(turn.thought or turn.calls or not turn.learnt for turn in turns):
        return ALL_OF_MESSAGES
    return PAIRS if [turn.role for turn in turns] == ["user", "assistant"] else MESSAGES


def write_parquet(
    items: Iterator[Conversation | Document], paths: list[Path], validation_share: float, form: pa.Schema
) -> list[array]:
    """Write the items, `validation_share` of them to the second path, if any; returns a hash of each prompt by file.

    The first texts of a conversation decide which file it goes to, so that it stays there when it goes on. Raises
    NeedsForm at the first item that does not fit `form`, and ValueError where documents stand among conversations.
    """
    prompts, groups = [array("Q") for _ in paths], [_Group() for _ in paths]
    limit = int(validation_share * 2**64) if len(paths) > 1 else 0
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb")) for path in paths]  # pyarrow itself opens only names in UTF-8
        writers = [stack.enter_context(pq.ParquetWriter(file, form, compression="zstd")) for file in files]
        for num_before, item in enumerate(items):
            _check_form(item, form, num_before)
            place = int(int.from_bytes(fingerprint(*first_texts(item))[:8]) < limit)
            prompts[place].append(prompt_number(item))
            groups[place].add(item, form)
            if groups[place].is_full():
                groups[place].write(writers[place], form)
        for writer, group in zip(writers, groups, strict=True):
            if group.rows:
                group.write(writer, form)
    return prompts


def _check_form(item, form, num_before):
    needed = form_of(item)
    if needed is form:
        return
    if TEXTS in (needed, form) and num_before:
        raise ValueError(
            "some rows are plain text and some are conversations: prepare the files of each kind with a command of "
            "their own"
        )
    if form is TEXTS or needed is TEXTS or FORMS.index(needed) > FORMS.index(form):
        raise NeedsForm(needed)


class _Group:
    """Rows of a row group to come."""

    def __init__(self):
        self.rows, self.num_chars = [], 0

    def add(self, item, form):
        self.rows.append(_row(item, form))
        self.num_chars += (
            sum(len(turn.text) + len(turn.thought) for turn in item.turns) if form is not TEXTS else (len(item.text))
        )

    def is_full(self):
        return len(self.rows) == ROW_GROUP_ROWS or self.num_chars >= ROW_GROUP_CHARS

    def write(self, writer, form):
        columns = zip(*self.rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, form, strict=True)]
        writer.write_table(pa.Table.from_arrays(arrays, schema=form))
        self.rows, self.num_chars = [], 0


def _row(item, form):
    """Values of the columns of a form."""
    if form is TEXTS:
        return (item.text,)
    if form is PAIRS:
        return item.turns[0].text, item.turns[1].text
    if form is MESSAGES:
        return ([dict(role=turn.role, content=turn.text) for turn in item.turns],)
    messages = [
        dict(
            role=turn.role,
            content=turn.text,
            reasoning_content=turn.thought or None,
            tool_calls=f"[{', '.join(turn.calls)}]" if turn.calls else None,
            weight=None if turn.learnt else 0,
        )
        for turn in item.turns
    ]
    return messages, item.tools or None


def fingerprint(*texts: str) -> bytes:
    """16-byte hash of the texts; clean text has no NUL, so NUL can separate them."""
    return blake2b("\0".join(texts).encode(), digest_size=16).digest()


def key_of(item: Conversation | Document) -> bytes:
    """Equal for conversations that say the same, and for equal documents: a hash."""
    if isinstance(item, Document):
        return fingerprint(item.text)
    if form_of(item) is PAIRS:
        return fingerprint(item.turns[0].text, item.turns[1].text)
    return fingerprint(json.dumps(item, ensure_ascii=False))


def first_texts(item: Conversation | Document) -> list[str]:
    """The first texts of a conversation that are not the system's, at most NUM_FIRST_TEXTS."""
    if isinstance(item, Document):
        return [item.text]
    return [turn.text for turn in item.turns if turn.role != "system"][:NUM_FIRST_TEXTS]


def prompt_number(item: Conversation | Document) -> int:
    """A hash of the first question of a conversation, or of a document."""
    question = (
        item.text
        if isinstance(item, Document)
        else (next((turn.text for turn in item.turns if turn.role == "user"), ""))
    )
    return int.from_bytes(fingerprint(question)[:8])
