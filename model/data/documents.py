"""Plain text as the objectives on text store it: documents, tokenised once, in chunks, each a row."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from model.data.conversation import Conversation, Document
from model.data.file_request import FileRequest
from model.data.readers import followed, read_items
from model.data.token_store import Encoded
from model.data.tokenizer import ChatTokenizer

MAX_BATCH_CHARS = 1 << 22  # tokenised at a time
NEEDS = "a text of two tokens or more; name its column with --prompt_column"


def texts_of(item: Conversation | Document) -> tuple[str, ...]:
    """What is said in one row of a file."""
    if isinstance(item, Document):
        return (item.text,)
    return tuple(text for turn in item.turns for text in (turn.thought, turn.text) if text)


def read_texts(path: str, columns: tuple[str, str], ignored: Counter) -> Iterator[tuple[str]]:
    """Yield (text,) of each document of a file; a pair or a dialogue is one, each text on a line of its own."""
    for item in followed(read_items(path, FileRequest(*columns, ignored=ignored))):
        yield ("\n".join(texts_of(item)),)


def encode_texts(rows: list[tuple[str]], tokenizer: ChatTokenizer, cut: Callable) -> Encoded:
    """Encoded of the chunks that `cut` makes of the ids of each document; blank ones are left out."""
    chunks, num_texts = [], 0
    for texts in in_batches([text for (text,) in rows if text and not text.isspace()]):
        found = [cut(ids) for ids in tokenizer.encode_batch(texts)]
        num_texts += sum(map(bool, found))
        chunks += chain.from_iterable(found)
    return Encoded([chunks], [0], {}, texts=num_texts)


def in_batches(texts):
    """Yield the texts in lists of MAX_BATCH_CHARS characters or one text."""
    batch, num_chars = [], 0
    for text in texts:
        if batch and num_chars + len(text) > MAX_BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch


def chunks_of(ids: list[int], size: int, overlap: int = 0) -> list[list[int]]:
    """The ids in chunks of `size`, each but the first beginning with the last `overlap` ids of the one before.

    A rest of a single id is left out: there is nothing to predict in it.
    """
    starts = range(0, len(ids) - overlap, size - overlap)
    return [chunk for start in starts if len(chunk := ids[start : start + size]) > 1]
