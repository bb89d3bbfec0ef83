"""The format of a conversation: the token ids that a network reads when something was said before the question.

docs/conversations.md describes it. Training, `test`, chat, server and the chat_template of an exported tokenizer share
this module, so it knows neither torch nor the options of a run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from model.data.tokenizer import ROLE_MARKS, ChatTokenizer

FORMAT = "marks 1"  # part of a token store's key: another format needs another name
ROLES = ("system", "user", "assistant")
BLOCK_TURNS = 64  # of a long conversation, encoded together
MARKS = dict(zip(ROLES, ROLE_MARKS, strict=False))  # the fourth, <|end|>, is not needed: the next mark ends a turn


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says; `role` is one of ROLES."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Context:
    """What was said before a question: a system text, and the first `end` of `turns`, oldest first.

    The questions of a dialogue share one list, so that a dialogue of n turns takes the memory of n turns, not of n²/2.
    """

    turns: list[Turn]
    end: int
    system: str = ""


@dataclass(frozen=True)
class EncodedQuestions:
    """Ids of each question with its context, and what did not fit."""

    ids: list[list[int]]
    num_cut: int  # rows whose question or system text was truncated
    turns_left_out: int  # earlier turns, counted once for each question that they are missing from


def add_turn(turns: list[Turn], role: str, text: str) -> None:
    """Append a turn to `turns`; a blank text adds nothing, and one of the same role is joined to the last, by a line.

    Raises ValueError for an unknown role.
    """
    _check_role(role)
    if turns and turns[-1].role == role and text.strip():
        turns[-1] = Turn(role, turns[-1].text + "\n" + text)
    elif text.strip():
        turns.append(Turn(role, text))


def tidy(turns: Iterable[Turn]) -> list[Turn]:
    """The turns that have text: those of the system first, as one, then the others, those of one side in a row joined.

    Joined texts stand on lines of their own. Raises ValueError for an unknown role.
    """
    said = []
    for turn in turns:
        _check_role(turn.role)
        said += [turn] if turn.text.strip() else []
    said.sort(key=lambda turn: turn.role != "system")
    sides = groupby(said, key=lambda turn: turn.role)
    return [Turn(role, "\n".join(turn.text for turn in side)) for role, side in sides]


def _check_role(role):
    if role not in ROLES:
        raise ValueError(f"a turn of role {role!r}: it must be one of {', '.join(ROLES)}")


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


def encode_conversation(
    turns: Iterable[Turn], tokenizer: ChatTokenizer, max_tokens: int, prefix: str = ""
) -> list[int]:
    """Ids that a network reads to answer the last of `turns`, at most `max_tokens`, EOS included.

    `prefix` stands before each of the user's turns, as its text does.

    When there are more, the oldest turns go first, each as a whole; then the system text loses its end, then the
    question. System turns count as one text wherever they stand. Raises ValueError if the last turn is not the user's.
    """
    said = tidy(turns)
    if not said or said[-1].role != "user":
        raise ValueError("the last turn of a conversation must be the user's, with text in it: it is what is answered")
    question = said.pop().text
    if not said:
        return encode_questions([question], [None], tokenizer, max_tokens, prefix).ids[0]
    system = said.pop(0).text if said[0].role == "system" else ""
    marks, pieces = marks_of(tokenizer), {}

    def encode(turns):
        keys = [(turn.role, turn.text) for turn in turns]
        pieces.update(_encode_pieces(keys, marks, tokenizer, prefix))
        return [pieces[key] for key in keys]

    encode([Turn("user", question)])
    encode([Turn("system", system)] if system else [])
    encode_newest(said, encode, max_tokens)
    ids, *_ = _fit(question, Context(said, len(said), system), pieces, marks.closer, max_tokens - 1)
    return [*ids, tokenizer.eos_id]


def encode_questions(
    questions: Sequence[str],
    contexts: Sequence[Context | None],
    tokenizer: ChatTokenizer,
    max_tokens: int,
    prefix: str = "",
) -> EncodedQuestions:
    """EncodedQuestions of many questions, each with its Context, or None: then its ids are those of its text and EOS.

    Every text is encoded once, however many contexts it is part of. `prefix` stands before each of the user's turns.
    """
    if not any(contexts):
        encoded = tokenizer.encode_batch([prefix + question for question in questions])
        num_cut = sum(len(ids) >= max_tokens for ids in encoded)
        return EncodedQuestions([[*ids[: max_tokens - 1], tokenizer.eos_id] for ids in encoded], num_cut, 0)
    marks, rows = marks_of(tokenizer), list(zip(questions, contexts, strict=True))
    pieces = _encode_pieces(_keys(rows, max_tokens), marks, tokenizer, prefix)
    fitted = [_fit(question, context, pieces, marks.closer, max_tokens - 1) for question, context in rows]
    ids, is_cut, left_out = zip(*fitted, strict=True)
    return EncodedQuestions([[*row, tokenizer.eos_id] for row in ids], sum(is_cut), sum(left_out))


@dataclass(frozen=True)
class Marks:
    """How a tokenizer shows whose turn it is: a turn is opener, ids of prefix and text, closer.

    The last turn of a conversation has EOS in place of the closer.
    """

    openers: dict[str, list[int]]  # by role
    prefixes: dict[str, str]  # by role
    closer: list[int]


def marks_of(tokenizer: ChatTokenizer) -> Marks:
    """The tokenizer's role marks or, where it lacks them, "user: " and the like, with EOS between the turns.

    Raises ValueError for a tokenizer that encodes the names of the roles alike.
    """
    added = tokenizer.backend.get_added_tokens_decoder().items()
    ids = {token.content: token_id for token_id, token in added if token.special}
    if ids.keys() >= set(MARKS.values()):
        return Marks({role: [ids[mark]] for role, mark in MARKS.items()}, dict.fromkeys(ROLES, ""), [])
    prefixes = {role: f"{role}: " for role in ROLES}
    if len(set(map(tuple, tokenizer.encode_batch(list(prefixes.values()))))) < len(ROLES):
        raise ValueError(
            f"the tokenizer in {tokenizer.directory} has no role marks and encodes {', '.join(ROLES)} alike: train one "
            "with scripts/train_tokenizer.py, or type --single_turn=True"
        )
    return Marks(dict.fromkeys(ROLES, []), prefixes, [tokenizer.eos_id])


def _keys(rows, max_tokens):
    """The (role, text) that the rows may need; the role of a question without context is ""."""
    keys, spans = {}, {}
    for question, context in rows:
        keys["user" if context else "", question] = None
        if context:
            first = max(0, context.end - max_tokens)  # each turn takes at least one token
            _, start, end = spans.get(id(context.turns), (None, first, 0))
            spans[id(context.turns)] = context.turns, min(start, first), max(end, context.end)
            if context.system:
                keys["system", context.system] = None
    for turns, start, end in spans.values():
        keys.update(((turn.role, turn.text), None) for turn in turns[start:end])
    return list(keys)


def _encode_pieces(keys, marks, tokenizer, prefix):
    """{(role, text): ids of the turn}; those of role "" are of prefix and text alone."""
    begins = {"": prefix} | marks.prefixes | {"user": marks.prefixes["user"] + prefix}
    encoded = tokenizer.encode_batch([begins[role] + text for role, text in keys])
    turns = zip(keys, encoded, strict=True)
    return {key: [*marks.openers[key[0]], *ids, *marks.closer] if key[0] else ids for key, ids in turns}


def _fit(question, context, pieces, closer, room):
    """(ids without EOS, whether question or system text was truncated, turns left out), at most `room` ids."""
    if context is None:
        ids = pieces["", question]
        return ids[:room], len(ids) > room, 0
    turn = pieces["user", question]
    last = turn[: min(len(turn) - len(closer), room)]
    system = _cut(pieces.get(("system", context.system), []), closer, room - len(last))
    kept = _newest(context, pieces, room - len(last) - len(system))
    is_cut = len(last) + len(closer) < len(turn) or len(system) < len(pieces.get(("system", context.system), []))
    return [*system, *chain.from_iterable(reversed(kept)), *last], is_cut, context.end - len(kept)


def _cut(piece, closer, room):
    """The ids of a turn without its end where it has more than `room`; none if only its opener fits."""
    if len(piece) <= room:
        return piece
    kept = piece[: max(0, room - len(closer))]
    return [*kept, *closer] if len(kept) > 1 else []


def _newest(context, pieces, room):
    """The ids of the newest turns of a context that fit in `room`, newest first."""
    kept = []
    for place in range(context.end - 1, -1, -1):
        turn = context.turns[place]
        if room <= 0 or (room := room - len(pieces[turn.role, turn.text])) < 0:
            break
        kept.append(pieces[turn.role, turn.text])
    return kept
