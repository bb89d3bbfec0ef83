"""A dialogue as token ids, of which the answers are learnt."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EncodedDialogue:
    """A dialogue up to its first learnt answer, and from there on to the end of its last one."""

    question: list[int]
    rest: list[int]
    turn_lengths: list[int]  # of `rest` in turn: an answer with the token that ends it, what is not learnt, an answer …
    systems_moved: int = 0  # texts that the template shows only at the beginning

    @classmethod
    def from_learnt(cls, ids: list[int], is_learnt: np.ndarray) -> "EncodedDialogue | None":
        """That of a dialogue's ids and which of them are learnt; None if none is."""
        places = np.flatnonzero(is_learnt)
        if not len(places):
            return None
        first, end = int(places[0]), int(places[-1]) + 1
        changes = np.flatnonzero(np.diff(is_learnt[first:end])) + 1
        lengths = np.diff([0, *changes, end - first]).tolist()
        return cls(ids[:first], ids[first:end], lengths)

    def cut(self, max_tokens: int) -> "EncodedDialogue":
        """Its first `max_tokens` tokens, without what follows the last answer; `rest` is empty if no answer fits."""
        room, lengths = max(max_tokens - len(self.question), 0), []
        for length in self.turn_lengths:
            lengths.append(min(length, room - sum(lengths)))
        while lengths and (not lengths[-1] or not len(lengths) % 2):
            lengths.pop()
        return EncodedDialogue(self.question, self.rest[: sum(lengths)], lengths)
