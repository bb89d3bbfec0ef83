"""What a tokenizer's chat template writes around texts, and what it can say at all."""

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, pairwise

from model.data.conversation import Turn, join_sides, system_first
from model.data.rendered_text import Guard
from model.data.template_abilities import TEXTS, Abilities, abilities, looked_for, marks_answers, probes
from model.data.template_process import render_all
from model.data.thought_frame import NO_THOUGHTS, THINKS, ThoughtFrame, frame_roles
from model.data.tokenizer import ChatTokenizer
from model.data.tokenizer_file import load_settings

MAX_KEPT_TURNS = 128  # of a frame that is kept
_PLACE = re.compile("(\ue000[0-9]+\ue001)")


@dataclass(frozen=True)
class TemplateFrames:
    """A chat template of a tokenizer, rendered once for each order of roles, with placeholders for the texts."""

    tokenizer: ChatTokenizer
    text: str
    learn_empty_thoughts: bool = False
    frames: dict = field(default_factory=dict, compare=False)  # {roles: ids before, between and behind the turns}
    shown_thoughts: dict = field(default_factory=dict, compare=False)  # {roles: which thoughts the template shows}
    arranged: dict = field(default_factory=dict, compare=False)  # {roles: how the template shows such turns}

    @cached_property
    def end_id(self) -> int:
        """The control token that the template puts behind an answer, or the tokenizer's EOS if it puts none."""
        behind = self.frame(("user", "assistant"))[-1]
        return behind[0] if behind and behind[0] in self.tokenizer.control_ids() else self.tokenizer.eos_id

    @cached_property
    def can(self) -> Abilities:
        """What the template shows."""
        control = self.tokenizer.control_ids()
        return abilities(self.render(probes()), lambda text: not control.isdisjoint(self.tokenizer.parse(text)))

    @cached_property
    def guard(self) -> Guard:
        return Guard(self.tokenizer)

    @cached_property
    def looked_for(self) -> re.Pattern:
        return looked_for(self.text)

    @cached_property
    def has_plain_frames(self) -> bool:
        """Whether plain texts, put where the placeholders stand, are what the template shows of them.

        Not so where it changes texts, or says itself what is learnt of an answer.
        """
        if self.can.header and (marks_answers(self.text) or self.learn_empty_thoughts and self._shows_empty_thoughts):
            return False
        return not self.can.header or self._frames_equal([(asked, Turn("assistant", said)) for asked, said in TEXTS])

    @cached_property
    def has_thought_frames(self) -> bool:
        """Whether the same holds for answers with thoughts."""
        if self.thought_frame is NO_THOUGHTS or not self.has_plain_frames:
            return False
        answers = [Turn("assistant", said, thought=asked) for asked, said in TEXTS]
        plain = [turn._replace(thought="") if place % 3 == 1 else turn for place, turn in enumerate(answers)]
        return self._frames_equal([(asked, turn) for (asked, _), turn in zip(TEXTS, plain, strict=True)])

    def _frames_equal(self, examples):
        """Whether frames give what the template shows of each (question, answer), alone and behind another."""
        talks = [(Turn("user", asked), answer) for asked, answer in examples]
        talks += [(Turn("system", talks[0][0].text), *one, *other) for one, other in pairwise(talks)]
        shown = self.render([self.guard.draft(turns).request for turns in talks])
        return all(self._framed(turns) in (None, one.get("text")) for turns, one in zip(talks, shown, strict=True))

    @cached_property
    def thought_frame(self) -> ThoughtFrame:
        """What the template writes around a thought; NO_THOUGHTS if it shows none or answers are not found."""
        if not (self.can.thoughts and self.can.header):
            return NO_THOUGHTS
        question, answer = dict(role="user", content="q"), dict(role="assistant", content="\ue0000\ue001")
        request = dict(messages=[question, answer | dict(reasoning_content="\ue0001\ue001")], tools=None)
        (shown,) = self.render([request | dict(prompt=False, thinking=None)])
        opening, thought, middle, *rest = _PLACE.split(shown["text"].rpartition(self.can.header)[2])
        if thought != "\ue0001\ue001" or rest[:1] != ["\ue0000\ue001"]:
            return NO_THOUGHTS
        return ThoughtFrame.of(opening, middle, self.guard.pattern, self.tokenizer)

    @cached_property
    def beginning(self) -> str:
        """What the template shows between a question and its answer, which has no thought."""
        return self._pieces(("user", "assistant"))[0][1]

    @property
    def _shows_empty_thoughts(self):
        return any("<think>" in piece for piece in self._pieces(("user", "assistant"))[0])

    def _framed(self, turns):
        """The text of the turns in their frame; None where the template refuses their roles."""
        try:
            pieces, shows = self._pieces(frame_roles(turns))
        except ValueError:
            return None
        around = self.thought_frame
        texts = [
            f"{around.opening}{turn.thought}{around.middle}{turn.text}" if has_thought else turn.text
            for turn, has_thought in zip(turns, shows, strict=True)
        ]
        return "".join(chain(*zip(pieces, texts, strict=False), pieces[-1:]))

    def _pieces(self, roles):
        """Texts that the template puts before, between and behind turns of these roles; of which it shows a thought."""
        places, thoughts = ([f"\ue000{first + n}\ue001" for n in range(len(roles))] for first in (0, len(roles)))
        messages = [
            dict(role="assistant", content=place, reasoning_content=thought)
            if role == THINKS
            else dict(role=role, content=place)
            for role, place, thought in zip(roles, places, thoughts, strict=True)
        ]
        (shown,) = self.render([dict(messages=messages, tools=None, prompt=False, thinking=None)])
        if "error" in shown:
            raise ValueError(f"{self.name} cannot show {', '.join(roles[:4])}: {shown['error']}")
        text, shows = shown["text"], []
        for role, place, thought in zip(roles, places, thoughts, strict=True):
            shows.append(role == THINKS and thought in text)
            if shows[-1]:
                text = text.replace(f"{self.thought_frame.opening}{thought}{self.thought_frame.middle}{place}", place)
        before, *rest = _PLACE.split(text)
        if rest[::2] != places:
            raise ValueError(f"{self.name} does not show each of {', '.join(roles[:4])} once, in this order")
        return [before, *rest[1::2]], shows

    def frame(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Ids that the template puts before, between and behind turns of these roles, one list more than roles.

        Raises ValueError if the template does not show each turn once, in their order.
        """
        if roles in self.frames:
            return self.frames[roles]
        pieces, shows = self._pieces(roles)
        ids = {piece: self.tokenizer.parse(piece) if piece else [] for piece in set(pieces)}
        frame = [ids[piece] for piece in pieces]
        if len(roles) <= MAX_KEPT_TURNS:
            self.frames[roles], self.shown_thoughts[roles] = frame, shows
        return frame

    def without_hidden_thoughts(self, turns: list[Turn]) -> list[Turn]:
        """The turns without the thoughts that the template does not show."""
        roles = frame_roles(turns)
        if THINKS not in roles:
            return turns
        self.frame(roles)
        shows = self.shown_thoughts.get(roles) or self._pieces(roles)[1]
        return [turn if has else turn._replace(thought="") for turn, has in zip(turns, shows, strict=True)]

    def placed(self, turns):
        """The turns as the template shows them: as they are, else those of one role joined, else the system's first."""
        roles = frame_roles(turns)
        if roles not in self.arranged:
            self.arranged[roles] = next((way for way in WAYS if self.shows(way(turns))), WAYS[-1])
        return self.arranged[roles](turns)

    def shows(self, turns: list[Turn]) -> bool:
        """Whether the template shows turns of these roles, each once and in their order."""
        try:
            self.frame(frame_roles(turns))
        except ValueError:
            return False
        return True

    def render(self, requests: list[dict]) -> list[dict]:
        """What the template makes of these requests (template_process.render_all)."""
        return render_all(self.text, requests, _special_tokens(self.tokenizer))

    @property
    def name(self) -> str:
        """The template in a message."""
        return f"the chat template of the tokenizer in {self.tokenizer.directory}"


WAYS = (list, join_sides, system_first)  # in which a template may show turns


@cache
def _special_tokens(tokenizer):
    """The special tokens as a template knows them: bos_token, eos_token, …"""
    named = {name: value for name, value in load_settings(tokenizer.directory).items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return dict(bos_token="") | {name: text for name, text in texts.items() if isinstance(text, str)}
