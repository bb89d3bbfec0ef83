"""How a decoder-only network reads a dialogue: the chat template of its tokenizer, around the ids of each turn's text.

The template (Jinja, rendered in transformers' sandbox in a process of its own) never sees a text: it is rendered with a
placeholder for each turn, once for each order of roles. So no text is parsed as a control token, and where each answer
begins and ends is known. A tokenizer without a template has ChatML's, with its own role marks if it lacks ChatML's
tokens.
"""

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

from model.data.conversation import Turn, encode_newest, join_sides, tidy
from model.data.t5_text import marks_of
from model.data.template_process import render
from model.data.tokenizer import ChatTokenizer
from model.data.tokenizer_file import load_settings

TEMPLATE_FILE, MAX_TEMPLATE_CHARS = "chat_template.jinja", 1 << 16
SURROGATE = re.compile("[\ud800-\udfff]")
CHATML = "<|im_start|>", "<|im_end|>"
MAX_TURNS, MAX_KEPT_TURNS = 4096, 128  # of a dialogue, the oldest beyond are left out; of a frame that is kept
_PLACE = re.compile("(\ue000[0-9]+\ue001)")
_DEFAULT = """\
{%- for message in messages -%}{{- OPENERS[message.role] + message.content + CLOSER -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- OPENERS["assistant"] -}}{%- endif -%}
"""


@dataclass(frozen=True)
class EncodedDialogue:
    """A dialogue up to its first learnt answer, and from there on to the end of its last one."""

    question: list[int]
    rest: list[int]
    turn_lengths: list[int]  # of `rest` in turn: an answer with the token that ends it, what is not learnt, an answer …
    systems_moved: int = 0  # texts that the template shows only at the beginning

    def cut(self, max_tokens: int) -> "EncodedDialogue":
        """Its first `max_tokens` tokens, without what follows the last answer; `rest` is empty if no answer fits."""
        room, lengths = max(max_tokens - len(self.question), 0), []
        for length in self.turn_lengths:
            lengths.append(min(length, room - sum(lengths)))
        lengths = [length for length in lengths if length]
        lengths = lengths if len(lengths) % 2 else lengths[:-1]
        return EncodedDialogue(self.question, self.rest[: sum(lengths)], lengths)


@dataclass(frozen=True)
class TurnTemplate:
    """A tokenizer's chat template; `end_id` is the token that ends an answer."""

    tokenizer: ChatTokenizer
    text: str
    frames: dict = field(default_factory=dict, compare=False)  # {roles: ids before, between and behind the turns}
    refused: set = field(default_factory=set, compare=False)  # roles that the template does not show in their order

    @property
    def end_id(self) -> int:
        """The control token that the template puts behind an answer, or the tokenizer's EOS if it puts none."""
        behind = self.frame(("user", "assistant"))[-1]
        return behind[0] if behind and behind[0] in self.tokenizer.control_ids() else self.tokenizer.eos_id

    def frame(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Ids that the template puts before, between and behind turns of these roles, one list more than roles.

        Raises ValueError if the template does not show each turn once, in their order.
        """
        if roles in self.frames:
            return self.frames[roles]
        places = [f"\ue000{number}\ue001" for number in range(len(roles))]
        before, *shown = _PLACE.split(_render(self, roles, places))
        if shown[::2] != places:
            raise ValueError(f"{self._name()} does not show each of {', '.join(roles[:4])} once, in this order")
        pieces = [before, *shown[1::2]]
        ids = {piece: self.tokenizer.parse(piece) if piece else [] for piece in set(pieces)}
        frame = [ids[piece] for piece in pieces]
        if len(roles) <= MAX_KEPT_TURNS:
            self.frames[roles] = frame
        return frame

    def encode_dialogues(self, dialogues: list[list[Turn]]) -> list[EncodedDialogue | None]:
        """Each dialogue, the texts of all of them encoded together; None for one without a learnt answer."""
        dialogues = [_tidy(turns) for turns in dialogues]
        placed = [self._placed(turns) for turns in dialogues]
        texts = iter(self._encode([turn for turns in placed for turn in turns]))
        encoded = [self._joined(turns, [next(texts) for _ in turns]) for turns in placed]
        moved = [turns is not now for turns, now in zip(dialogues, placed, strict=True)]
        return [replace(one, systems_moved=1) if one and has else one for one, has in zip(encoded, moved, strict=True)]

    def _joined(self, turns, ids):
        answers = [place for place, turn in enumerate(turns) if turn.role == "assistant" and turn.learnt]
        if not answers:
            return None
        first, last = answers[0], answers[-1]
        frame, end = self.frame(tuple(turn.role for turn in turns[: last + 1])), self.end_id
        rest, lengths = [], []
        for place, following in pairwise(answers):
            behind = _woven(frame[place + 1 : following + 1], ids[place + 1 : following])
            has_end = behind[:1] == [end]
            parts = [*ids[place], *behind[:has_end]], behind[has_end:]
            rest += chain(*parts)
            lengths += map(len, parts)
        return EncodedDialogue(
            _woven(frame[: first + 1], ids[:first]), [*rest, *ids[last], end], [*lengths, len(ids[last]) + 1]
        )

    def _placed(self, turns):
        """The turns as they are or, where the template does not show system texts amid a dialogue, with these first."""
        roles = tuple(turn.role for turn in turns)
        if "system" not in roles[1:]:
            return turns
        if roles not in self.refused:
            try:
                self.frame(roles)
                return turns
            except ValueError:
                self.refused.add(roles)
        return tidy(turns)

    def encode_question(self, turns: list[Turn], max_tokens: int) -> list[int]:
        """Ids that a network reads to answer the last of `turns`, at most `max_tokens`.

        When there are more, the oldest turns but the system's go first, as many as rendering shows to be needed; then
        the question loses its end. Only a system text that leaves no room for the question gives more. Raises
        ValueError if the last turn is not the user's.
        """
        turns = self._placed(_tidy(turns))
        if not turns or turns[-1].role != "user":
            raise ValueError(
                "the last turn of a conversation must be the user's, with text in it: it is what is answered"
            )
        num_system = int(turns[0].role == "system")
        system, said = turns[:num_system], turns[num_system:]
        system_ids, ids = self._encode(system), encode_newest(said, self._encode, max_tokens)
        said = said[len(said) - len(ids) :]
        is_whole = len(system) + len(said) == len(turns)
        starts = [place for place, turn in enumerate(said) if turn.role == "user" or place == 0 and is_whole]

        def asked(start):
            return self._asked([*system, *said[start:]], [*system_ids, *ids[start:]])

        read = asked(starts[0])
        if len(read) > max_tokens:
            later = starts[1:] or starts
            read = asked(later[bisect_left(later[:-1], True, key=lambda start: len(asked(start)) <= max_tokens)])
        if (excess := len(read) - max_tokens) > 0:
            ids[-1] = ids[-1][: max(len(ids[-1]) - excess, 1)]
            read = asked(starts[-1])
        return read

    def _encode(self, turns):
        return self.tokenizer.encode_batch([turn.text for turn in turns])

    def _asked(self, turns, ids):
        frame = self.frame((*(turn.role for turn in turns), "assistant"))
        return _woven(frame[:-1], ids)

    def _name(self):
        return f"the chat template of the tokenizer in {self.tokenizer.directory}"


def _woven(frame, ids):
    """The first list of `frame`, the first of `ids`, the second of `frame` …; `frame` has one more."""
    return [*chain.from_iterable(chain(*zip(frame, ids, strict=False))), *frame[-1]]


def _tidy(turns):
    """The turns with text, stripped; those of one side in a row are joined."""
    stripped = [turn._replace(text=text) for turn in turns if (text := turn.text.strip())]
    turns = join_sides(stripped)
    num_system = sum(turn.role == "system" for turn in turns[:1])
    return [*turns[:num_system], *turns[num_system:][-MAX_TURNS:]]


def _render(template, roles, contents):
    """The text of these messages; raises ValueError for whatever the template raises."""
    messages = [dict(role=role, content=content) for role, content in zip(roles, contents, strict=True)]
    tokenizer = template.tokenizer
    names = dict(eos_token=tokenizer.eos_id, pad_token=tokenizer.pad_id)
    tokens = {name: tokenizer.backend.id_to_token(number) for name, number in names.items()} | dict(bos_token="")
    try:
        return render(template.text, messages, tokens)
    except ValueError as error:
        raise ValueError(f"{template._name()} cannot show {', '.join(roles[:4])}: {error}") from None


@cache
def turn_template(tokenizer: ChatTokenizer) -> TurnTemplate:
    """The TurnTemplate of a tokenizer: of its chat_template.jinja, its tokenizer_config.json, or the default.

    Raises ValueError for one that is damaged or too large.
    """
    path = Path(tokenizer.directory, TEMPLATE_FILE)
    text = _own_template(path)
    text = default_template(tokenizer) if text is None else text
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE_CHARS or SURROGATE.search(text):
        raise ValueError(
            f"{path}: a chat template must be a text of at most {MAX_TEMPLATE_CHARS:,} characters, none of them half a "
            "character (a lone surrogate such as \\ud83d)"
        )
    return TurnTemplate(tokenizer, text)


def _own_template(path):
    """The template at `path` or in the tokenizer_config.json beside it; None if there is none."""
    text = path.read_text(encoding="utf-8") if path.is_file() else load_settings(path.parent).get("chat_template")
    if isinstance(text, list):  # several, each with a name
        named = (one.get("template") for one in text if isinstance(one, dict) and one.get("name") == "default")
        return next(named, None)
    return text


def default_template(tokenizer: ChatTokenizer) -> str:
    """ChatML's template, or one of the tokenizer's role marks and EOS if it lacks ChatML's tokens."""
    if all(tokenizer.backend.token_to_id(token) is not None for token in CHATML):
        openers = {role: f"{CHATML[0]}{role}\n" for role in ("system", "user", "assistant")}
        closer = CHATML[1] + "\n"
    else:
        marks, closer = marks_of(tokenizer), tokenizer.backend.id_to_token(tokenizer.eos_id)
        shown = {role: "".join(map(tokenizer.backend.id_to_token, ids)) for role, ids in marks.openers.items()}
        openers = {role: shown[role] + marks.prefixes[role] for role in shown}
    values = dict(OPENERS=openers, CLOSER=closer)
    return "".join(f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items()) + _DEFAULT


def with_turn_end(tokenizer: ChatTokenizer) -> ChatTokenizer:
    """`tokenizer`, for which an answer ends where its template ends it."""
    return replace(tokenizer, eos_id=turn_template(tokenizer).end_id)


def write_turn_template(tokenizer: ChatTokenizer, directory: str | Path) -> None:
    """Write the template to a directory that holds a copy of the tokenizer's files, unless one of them has it."""
    path = Path(directory, TEMPLATE_FILE)
    if _own_template(path) is None:
        path.write_text(turn_template(tokenizer).text, encoding="utf-8")
