"""A conversation as a T5 reads it: each learnt answer with its question and what was said before, as token ids.

docs/conversations.md describes it. Training, `test`, chat, server and the chat_template of an exported tokenizer share
this module, so it knows neither torch nor the options of a run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from model.data.conversation import ROLES, Conversation, Document, Turn, encode_newest, join_sides, tidy
from model.data.file_request import CONTEXT, PART
from model.data.t5_turns import THINK, text_turns
from model.data.thoughts import CLOSES, with_thought
from model.data.tokenizer import ROLE_MARKS, ChatTokenizer

PLAIN_ANSWER = Turn("assistant", "")[2:]
MOVED = "system texts amid a dialogue, put first"
FORMAT = "marks 1"  # part of a token store's key: another format needs another name
MARKS = dict(zip(ROLES, ROLE_MARKS, strict=False))  # the fourth, <|end|>, is not needed: the next mark ends a turn


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


def pairs_of(
    conversations: Iterable[Conversation], ignored: Counter, single_turn: bool = False
) -> Iterator[tuple[str, str, Context | None]]:
    """Yield (question, answer, Context or None) of each learnt answer; with `single_turn` the Context is None.

    What is not said so is counted in `ignored`.
    """
    for conversation in conversations:
        if single_turn and len(conversation.turns) > 2:
            conversation, num_systems = _without_system(conversation)
            pairs = exchanges(conversation, ignored)
            left_out = {(CONTEXT, ""): sum(context is not None for *_, context in pairs)}
            left_out[PART, "system texts"] = num_systems
            ignored.update({key: count for key, count in left_out.items() if count})
            yield from ((question, answer, None) for question, answer, _ in pairs)
        else:
            yield from exchanges(conversation, ignored)


def _without_system(conversation):
    turns = [turn for turn in conversation.turns if turn.role != "system"]
    return conversation._replace(turns=turns), len(conversation.turns) - len(turns)


def single_pairs(items: Iterable[Conversation | Document], ignored: Counter) -> Iterator[Conversation | Document]:
    """Yield a Conversation of each learnt answer with its question alone; documents as they are."""
    for item in items:
        if isinstance(item, Document):
            yield item
        else:
            for question, answer, _ in pairs_of([item], ignored, single_turn=True):
                yield Conversation((Turn("user", question), Turn("assistant", answer)))


def exchanges(conversation: Conversation, ignored: Counter) -> list[tuple[str, str, Context | None]]:
    """(question, answer, Context or None) of each learnt answer; what this format cannot say is counted in `ignored`.

    A last question has the answer "", and a conversation without a learnt answer gives one row of empty texts. A system
    text holds from where it stands on; this format puts it first.
    """
    turns = conversation.turns
    if len(turns) == 2 and turns[0].role == "user" and turns[1].role == "assistant" and not conversation.tools:
        if turns[1][2:] == PLAIN_ANSWER and CLOSES not in turns[1].text:
            return [(turns[0].text, turns[1].text, None)]
    talk, systems, system = [], [], ""
    for turn in text_turns(conversation, ignored):
        if turn.role == "system":
            if talk:
                ignored[PART, MOVED] += 1
            system = f"{system}\n{turn.text}" if system else turn.text
        elif talk and talk[-1].role == turn.role:
            systems[-1] = system
            talk.append(turn)
        else:
            systems.append(system)
            talk.append(turn)
    spoken = join_sides(talk)
    rows = []
    for place, turn in enumerate(spoken):
        if turn.role == "assistant" and turn.learnt:
            begun = systems[place - 1]
            context = Context(spoken, place - 1, begun) if place > 1 or begun else None
            asked = spoken[place - 1].text + (THINK if turn.thought else "")
            rows.append((asked, with_thought(turn.thought, turn.text), context))
    if spoken and spoken[-1].role == "user":
        rows.append((spoken[-1].text, "", None))
    return rows or [("", "", None)]


def encode_conversation(
    turns: Iterable[Turn],
    tokenizer: ChatTokenizer,
    max_tokens: int,
    prefix: str = "",
    tools: str = "",
    thinking: bool = False,
) -> list[int]:
    """Ids that a network reads to answer the last of `turns`, at most `max_tokens`, EOS included.

    `prefix` stands before each of the user's turns, as its text does. `tools` is the JSON text of those that may be
    called; `thinking` asks for a thought before the answer.

    When there are more, the oldest turns go first, each as a whole; then the system text loses its end, then the
    question. System turns count as one text wherever they stand. Raises ValueError if the last turn is not the user's.
    """
    before = tidy(text_turns(Conversation(list(turns), tools), Counter()))
    if not before or before[-1].role != "user":
        raise ValueError("the last turn of a conversation must be the user's, with text in it: it is what is answered")
    question = before.pop().text + (THINK if thinking else "")
    if not before:
        return encode_questions([question], [None], tokenizer, max_tokens, prefix).ids[0]
    system = before.pop(0).text if before[0].role == "system" else ""
    marks, pieces = marks_of(tokenizer), {}

    def encode(turns):
        keys = [(turn.role, turn.text) for turn in turns]
        pieces.update(_encode_pieces(keys, marks, tokenizer, prefix))
        return [pieces[key] for key in keys]

    encode([Turn("user", question)])
    encode([Turn("system", system)] if system else [])
    encode_newest(before, encode, max_tokens)
    ids, *_ = _fit(question, Context(before, len(before), system), pieces, marks.closer, max_tokens - 1)
    return [*ids, tokenizer.eos_id]


def encode_questions(
    questions: Sequence[str],
    contexts: Sequence[Context | None],
    tokenizer: ChatTokenizer,
    max_tokens: int,
    prefix: str = "",
    answers: dict[str, list[int]] | None = None,
) -> EncodedQuestions:
    """EncodedQuestions of many questions, each with its Context, or None: then its ids are those of its text and EOS.

    Every text is encoded once, however many contexts it is part of, and not at all if `answers` has its ids. `prefix`
    stands before each of the user's turns.
    """
    if not any(contexts):
        encoded = tokenizer.encode_batch([prefix + question for question in questions])
        num_cut = sum(len(ids) >= max_tokens for ids in encoded)
        return EncodedQuestions([[*ids[: max_tokens - 1], tokenizer.eos_id] for ids in encoded], num_cut, 0)
    marks, rows = marks_of(tokenizer), list(zip(questions, contexts, strict=True))
    keys, pieces = _keys(rows, max_tokens), {}
    if answers and not marks.prefixes["assistant"]:
        shown = [text for role, text in keys if role == "assistant" and text in answers]
        pieces = {("assistant", text): [*marks.openers["assistant"], *answers[text], *marks.closer] for text in shown}
    pieces |= _encode_pieces([key for key in keys if key not in pieces], marks, tokenizer, prefix)
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
