"""Preferences of a file: conversations with a chosen and a rejected response."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from model.data.conversation import Conversation
from model.data.file_request import ROWS, FileRequest
from model.data.readers import only_conversations

NEEDS = (
    "a prompt with a chosen and a rejected response (columns prompt, chosen and rejected, as texts or messages); rows "
    "with one response, and a label that says whether it is good (KTO), train with --objective=pairs: it learns the "
    "good ones"
)


def read_preferences(
    path: str | Path, columns: tuple[str, str], ignored: Counter
) -> Iterator[tuple[Conversation, Conversation]]:
    """Yield (chosen, rejected) of each row that has both: the same turns up to the first answer that is learnt.

    `columns` are those of prompt and chosen response; empty: found by name. Rows without a rejected response, or with
    two equal ones, are counted in `ignored`. Raises as `read_conversations`, and ValueError if no row has both.
    """
    request = FileRequest(*columns, ignored=ignored, wants_rejected=True)
    num_rows = num_usable = 0
    for num_rows, one in enumerate(only_conversations(path, request), 1):  # noqa: B007
        begin = next((place for place, turn in enumerate(one.turns) if turn.role == "assistant" and turn.learnt), None)
        if begin is None or not one.rejected:
            ignored[ROWS, "rows without a rejected response"] += 1
        elif [*one.rejected] == [*one.turns[begin:]]:
            ignored[ROWS, "rows with two equal responses"] += 1
        else:
            num_usable += 1
            yield Conversation(one.turns, one.tools), Conversation([*one.turns[:begin], *one.rejected], one.tools)
    if not num_usable:
        raise ValueError(f"{path}: none of its {num_rows:,} rows has {NEEDS}")
