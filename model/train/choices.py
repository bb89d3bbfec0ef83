"""Which of a question's choices a model finds likeliest, for many questions in few forward passes."""

from dataclasses import dataclass

import numpy as np

from model.data.packing import cut
from model.generate.scoring import score_next
from model.nn.base import LanguageModel
from model.runtime.activity import now_doing
from model.runtime.distributed import Ranks, gather_json
from model.train.evaluate import Parts, evaluating, values_of_share


@dataclass(frozen=True)
class PassSize:
    """Tokens of a forward pass."""

    tokens: int

    def halved(self, longest):
        """Half of it, or None where that is less than a question of `longest` tokens."""
        return PassSize(self.tokens // 2) if self.tokens > longest else None


def likeliest_choices(ranks: Ranks, model: LanguageModel, first_id, asked, tokens):
    """The place of the likeliest choice of each question, int64 (questions,), on every rank; None if a stop was asked.

    A forward pass takes about `tokens` tokens, fewer once memory ran out. Raises NothingFits if a question by itself
    does not fit.
    """
    lengths = asked.lengths
    longest = int(lengths.sum(axis=1).max())

    def cut_up(ids, size):
        return cut(ids, lengths[ids], size.tokens)

    def choose(ids, size):
        contexts, prefixes = ([side[i] for i in ids] for side in (asked.contexts, asked.prefixes))
        values = score_next(model, first_id, contexts, prefixes, asked.candidates[ids])
        return list(zip(ids.tolist(), values.argmax(axis=1).tolist(), strict=True))

    share_ids = np.arange(ranks.rank, len(lengths), ranks.world_size)
    now_doing("evaluating", total=len(share_ids))
    parts = Parts(cut_up, choose, lambda size: size.halved(longest))
    with evaluating(model):
        values = values_of_share(ranks, share_ids, PassSize(tokens), parts)
    if values is None:
        return None
    chosen = np.zeros(len(lengths), np.int64)
    for place, choice in (pair for rank in gather_json(ranks, values) for part in rank for pair in part):
        chosen[place] = choice
    return chosen
