"""What a tokenizer's chat template writes around texts, and what it can say at all."""

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, pairwise

from model.data.conversation import Turn, join_sides, system_first
from model.data.rendered_text import Guard
from model.data.template_abilities import TEXTS, Abilities, abilities, looked_for, marks_answers, probes
from model.data.template_process import render_all
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
        talks = [(Turn("user", asked), Turn("assistant", said)) for asked, said in TEXTS]
        talks += [(Turn("system", talks[0][0].text), *one, *other) for one, other in pairwise(talks)]
        shown = self.render([self.guard.draft(turns).request for turns in talks])
        pairs = zip(talks, shown, strict=True)
        return all(self._framed(turns) in (None, one.get("text")) for turns, one in pairs) or not self.can.header

    @property
    def _shows_empty_thoughts(self):
        return any("<think>" in piece for piece in self._pieces(("user", "assistant")))

    def _framed(self, turns):
        """The text of the turns in their frame; None where the template refuses their roles."""
        try:
            pieces = self._pieces(tuple(turn.role for turn in turns))
        except ValueError:
            return None
        return "".join(chain(*zip(pieces, [turn.text for turn in turns], strict=False), pieces[-1:]))

    def _pieces(self, roles):
        """Texts that the template puts before, between and behind turns of these roles."""
        places = [f"\ue000{number}\ue001" for number in range(len(roles))]
        messages = [dict(role=role, content=place) for role, place in zip(roles, places, strict=True)]
        (shown,) = self.render([dict(messages=messages, tools=None, prompt=False, thinking=None)])
        if "error" in shown:
            raise ValueError(f"{self.name} cannot show {', '.join(roles[:4])}: {shown['error']}")
        before, *rest = _PLACE.split(shown["text"])
        if rest[::2] != places:
            raise ValueError(f"{self.name} does not show each of {', '.join(roles[:4])} once, in this order")
        return [before, *rest[1::2]]

    def frame(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Ids that the template puts before, between and behind turns of these roles, one list more than roles.

        Raises ValueError if the template does not show each turn once, in their order.
        """
        if roles in self.frames:
            return self.frames[roles]
        pieces = self._pieces(roles)
        ids = {piece: self.tokenizer.parse(piece) if piece else [] for piece in set(pieces)}
        frame = [ids[piece] for piece in pieces]
        if len(roles) <= MAX_KEPT_TURNS:
            self.frames[roles] = frame
        return frame

    def placed(self, turns):
        """The turns as the template shows them: as they are, else those of one role joined, else the system's first."""
        roles = tuple(turn.role for turn in turns)
        if roles not in self.arranged:
            self.arranged[roles] = next((way for way in WAYS if self._shows(way(turns))), WAYS[-1])
        return self.arranged[roles](turns)

    def _shows(self, turns):
        try:
            self.frame(tuple(turn.role for turn in turns))
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
