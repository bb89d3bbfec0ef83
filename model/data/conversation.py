"""A conversation: turns in their order, as every reader gives them and every objective takes them.

Training, `test`, chat and server share this module, so it knows neither torch nor the options of a run.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

ROLES = ("system", "user", "assistant")  # a Turn of a conversation that is read may also be a tool's
TOOL = "tool"
BLOCK_TURNS = 64  # of a long conversation, encoded together


class Turn(NamedTuple):
    """What one speaker says; `role` is one of ROLES, or TOOL for the result of a call."""

    role: str
    text: str
    thought: str = ""  # what the assistant thinks before it
    calls: tuple[str, ...] = ()  # of tools, each the JSON text of {"name": …, "arguments": …}
    learnt: bool = True  # False: an answer that is context only


class Conversation(NamedTuple):
    """Turns in their order, and the tools that may be called: the JSON text of a list, or "".

    `rejected` holds the turns of a worse response in place of those from the first learnt answer on.
    """

    turns: Sequence[Turn]
    tools: str = ""
    rejected: Sequence[Turn] = ()


class Document(NamedTuple):
    """A text that is neither prompt nor response."""

    text: str


def join_sides(turns: Iterable[Turn]) -> list[Turn]:
    """The turns, those of one role in a row as one, learnt only if all are; the results of calls stay apart."""
    runs = ([*run] for _, run in groupby(turns, key=lambda turn: turn.role))
    return [turn for run in runs for turn in (run if len(run) == 1 or run[0].role == TOOL else [_joined(run)])]


def _joined(turns):
    texts, thoughts = ("\n".join(filter(None, parts)) for parts in zip(*(turn[1:3] for turn in turns), strict=True))
    calls = tuple(call for turn in turns for call in turn.calls)
    return Turn(turns[0].role, texts, thoughts, calls, all(turn.learnt for turn in turns))


def system_first(turns: Iterable[Turn]) -> list[Turn]:
    """The turns with the system's first, those of one role in a row joined."""
    return join_sides(sorted(turns, key=lambda turn: turn.role != "system"))


def tidy(turns: Iterable[Turn]) -> list[Turn]:
    """The turns that have text: those of the system first, as one, then the others, those of one role in a row joined.

    Joined texts stand on lines of their own. Raises ValueError for an unknown role.
    """
    with_text = []
    for turn in turns:
        if turn.role not in ROLES:
            raise ValueError(f"a turn of role {turn.role!r}: it must be one of {', '.join(ROLES)}")
        with_text += [turn] if turn.text.strip() else []
    return system_first(with_text)


def encode_newest(turns: list[Turn], encode: Callable, max_tokens: int) -> list[list[int]]:
    """Ids of the newest of `turns`, oldest first: of all that can be among `max_tokens`, and of at most a block more.

    `encode` gives the ids of each turn of a list. Older turns are never encoded, so a long conversation takes the time
    of what a network reads of it.
    """
    newest_first, num_tokens = [], 0
    while len(newest_first) < len(turns) and num_tokens <= max_tokens:
        end = len(turns) - len(newest_first)
        block = encode(turns[max(0, end - BLOCK_TURNS) : end])
        newest_first += reversed(block)
        num_tokens += sum(map(len, block))
    return newest_first[::-1]
