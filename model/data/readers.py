"""Reads users' data files into conversations and documents; no other module reads them.

Formats: .json, .jsonl, .csv, .tsv, .parquet, .arrow and .txt, also with .gz or .zst. Memory is bounded by one buffer,
one item of MAX_ITEM_CHARS and one record batch, whatever the size of the file. Every problem with a file is a
ValueError that names the file, what was found and what to do. All rows are kept, except malformed ones if the caller
handles them with `on_malformed`.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from model.data.arrow_rows import arrow_rows
from model.data.columns import PLAIN_TEXT
from model.data.compressed import data_suffix
from model.data.conversation import Conversation, Document
from model.data.encodings import find_encoding
from model.data.file_request import READ_AS, FileRequest, describe_ignored
from model.data.messages import ASSISTANT_ROLES, USER_ROLES
from model.data.parquet_rows import parquet_rows
from model.data.rows import conversations_of
from model.data.signatures import check_signature
from model.data.text_files import open_text, table_rows
from model.runtime.json_stream import JsonText, OnMalformed, refuse

MAX_LINE_CHARS = 1 << 16  # of a document in a .txt


class NoRows(ValueError):
    """The file has no rows."""


def read_conversations(
    path: str | Path,
    prompt_column: str = "",
    response_column: str = "",
    on_malformed: OnMalformed = refuse,
    ignored: Counter | None = None,
) -> Iterator[Conversation]:
    """Yield the Conversation of each row of the file, in file order and uncleaned.

    If the caller names a column, only that column is used. Otherwise the columns are found for each row by its own
    column names: the prompt is the first of PROMPT_COLUMNS with text in it, the response is the first of
    RESPONSE_COLUMNS that exists; a missing or null side is "". A row with text in both is a pair, whatever other
    columns it has; else its messages are read. Other content is counted in `ignored` (see describe_ignored). Rows that
    continue the row before them, by their history, are one Conversation.

    Raises ValueError for an unreadable file and one without usable columns, NoRows for a file without rows. A malformed
    row (a broken JSON line, a null, a csv row with too many cells, a dialogue with a malformed turn) is passed to
    `on_malformed` and left out if that returns.
    """
    request = FileRequest(prompt_column, response_column, on_malformed, Counter() if ignored is None else ignored)
    return followed(only_conversations(path, request))


def only_conversations(path: str | Path, request: FileRequest) -> Iterator[Conversation]:
    """Yield the Conversation of each row; ValueError for a file of texts."""
    for item in read_items(path, request):
        if isinstance(item, Document):
            raise ValueError(f"{path}: it holds texts without a response: {PLAIN_TEXT}")
        yield item


def followed(items: Iterator[Conversation | Document]) -> Iterator[Conversation | Document]:
    """The items, one for conversations that each repeat all that the one before says, and add a question and answer."""
    last = None
    for item in items:
        if last is not None:
            if _repeats(item, last):
                item = item._replace(turns=[*last.turns, *item.turns[-2:]])
            else:
                yield last
        last = item
    if last is not None:
        yield last


def _repeats(item, last):
    """Whether a Conversation is all that the last one says, of which it learns nothing, and two turns more."""
    if isinstance(item, Document) or isinstance(last, Document) or len(item.turns) != len(last.turns) + 2:
        return False
    return item.tools == last.tools and all(
        now.role == then.role and now.text == then.text and not (now.learnt and now.role == "assistant")
        for now, then in zip(item.turns, last.turns, strict=False)
    )


def read_items(path: str | Path, request: FileRequest) -> Iterator[Conversation | Document]:
    """Yield what each row of the file says; raises as `read_conversations`."""
    items = _items(Path(path), request)
    first = next(items, None)
    if first is None:
        if request.without:
            raise ValueError(f"{path}: {request.without}")
        not_used = describe_ignored(request.ignored)
        raise NoRows(
            f"{path}: no rows found{not_used and f' ({not_used})'}; write one prompt and one response per row (a turn "
            f"of a dialogue counts if its role is one of {', '.join(sorted(USER_ROLES | ASSISTANT_ROLES))})"
        )
    request.has_rows = True
    yield first
    yield from items


def _items(path: Path, request: FileRequest) -> Iterator[Conversation | Document]:
    if not path.is_file():
        raise ValueError(f"{path}: " + ("it is a folder; name a file in it" if path.is_dir() else "no such file"))
    check_signature(path)
    reader = _READERS.get(data_suffix(path))
    if reader is None:
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; give one of {', '.join(_READERS)}")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty (0 bytes); write or download it again")
    yield from reader(path, request)


def _column_items(path: Path, request: FileRequest) -> Iterator[Conversation | Document]:
    index, read = 0, arrow_rows if data_suffix(path) == ".arrow" else parquet_rows

    def rows() -> Iterator[dict]:
        nonlocal index
        for index, row in read(path, request.on_malformed):  # noqa: B007
            yield row

    yield from conversations_of(rows(), lambda: f"{path} row {index + 1:,}", request)


def _json_items(path: Path, request: FileRequest) -> Iterator[Conversation | Document]:
    with open_text(path, _encoding(path, request)) as file:
        text = JsonText(file)
        for items in text.values(request.on_malformed):
            yield from conversations_of(items, lambda: f"{path} line {text.line():,}", request)


def _table_items(path: Path, request: FileRequest) -> Iterator[Conversation | Document]:
    request.hint = "; the first line of a table must name its columns"
    rows = table_rows(path, request.on_malformed, _encoding(path, request))
    return conversations_of(rows, lambda: str(path), request)


def _encoding(path, request):
    """The encoding of a file; what was assumed is noted."""
    encoding = request.encoding or find_encoding(path)
    if not request.encoding and encoding != "utf-8-sig":
        request.ignored[READ_AS, encoding.upper().replace("GB18030", "GB18030 (Chinese)")] += 1
    return encoding


def _text_items(path: Path, request: FileRequest) -> Iterator[Document]:
    """A document for each line that is not blank, a long one in parts."""
    with open_text(path, _encoding(path, request)) as file:
        for line in iter(lambda: file.readline(MAX_LINE_CHARS), ""):
            if line := line.strip("\r\n"):
                yield Document(line)


_READERS = {
    ".json": _json_items,
    ".jsonl": _json_items,
    ".csv": _table_items,
    ".tsv": _table_items,
    ".parquet": _column_items,
    ".txt": _text_items,
    ".arrow": _column_items,
}
