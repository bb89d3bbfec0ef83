"""A thinking answer in a chat template: what the template writes around a thought, and the ids of both."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from model.data.conversation import Turn
from model.data.tokenizer import ChatTokenizer

THINKS = "thinks"  # the role, in a frame, of an answer with a thought


def frame_roles(turns: list[Turn]) -> tuple[str, ...]:
    """The roles of the turns, THINKS for answers with thoughts."""
    return tuple(THINKS if turn.thought else turn.role for turn in turns)


@dataclass(frozen=True)
class ThoughtFrame:
    """`opening` stands before a thought, `middle` between it and the answer's text.

    A tokenizer cuts a text at control tokens alone, so what stands between two of them is encoded as one text.
    """

    opening: str
    middle: str
    opening_ids: list[int]  # up to its last control token
    lead: str  # what follows that token
    trail: str  # what stands before the first control token of `middle`
    middle_ids: list[int] | None  # its control tokens; None: it has none
    text_lead: str  # what follows them

    @classmethod
    def of(cls, opening: str, middle: str, control: re.Pattern, tokenizer: ChatTokenizer) -> "ThoughtFrame":
        """That of a template's texts; `control` matches the tokenizer's control tokens."""
        opens = max((found.end() for found in control.finditer(opening)), default=0)
        places = [found.span() for found in control.finditer(middle)]
        first, last = (places[0][0], places[-1][1]) if places else (len(middle), len(middle))
        return cls(
            opening, middle, tokenizer.parse(opening[:opens]) if opens else [], opening[opens:],
            middle[:first], tokenizer.parse(middle[first:last]) if places else None, middle[last:],
        )  # fmt: skip

    def texts(self, turn: Turn) -> list[str]:
        """What of a turn is encoded, each part by itself."""
        if not turn.thought:
            return [turn.text]
        if self.middle_ids is None:
            return [self.lead + turn.thought + self.middle + turn.text]
        return [self.lead + turn.thought + self.trail, self.text_lead + turn.text]

    def ids(self, turn: Turn, encoded: Iterator[list[int]]) -> list[int]:
        """The ids of a turn; takes those of its `texts` from `encoded`."""
        if not turn.thought:
            return next(encoded)
        thought = [*self.opening_ids, *next(encoded)]
        return thought if self.middle_ids is None else [*thought, *self.middle_ids, *next(encoded)]


NO_THOUGHTS = ThoughtFrame("", "", [], "", "", None, "")  # of a template that shows none
