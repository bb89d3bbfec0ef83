"""How a network that reads whole dialogues reads a preference: two dialogues that begin alike."""

import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np

from model.data.encoded_dialogue import EncodedDialogue
from model.data.token_store import Encoded
from model.data.turn_template import turn_template
from model.train.objectives.preference_pairs import interleaved, repeated


@dataclass(frozen=True)
class DialogueForm:
    """Both dialogues in the chat template of the tokenizer, whose text is `template`; their common ids are stored once.

    All the assistant's turns of a response are learnt. A dialogue has at most max_seq_len tokens.
    """

    template: str
    learn_empty_thoughts: bool = False

    columns = ("question_ids", "chosen_ids", "rejected_ids", "chosen_turns", "rejected_turns")

    @property
    def encoding(self):
        template = hashlib.sha256(self.template.encode()).hexdigest()
        return f"dialogues {template}{' empty thoughts' if self.learn_empty_thoughts else ''}"

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (chosen Conversation, rejected Conversation)."""
        template, ignored = turn_template(tokenizer, self.learn_empty_thoughts), Counter()
        chosen, rejected = (
            template.encode_dialogues(list(column), ignored)
            for column in (zip(*rows, strict=True) if rows else ((), ()))
        )
        whole = [(one, other) for one, other in zip(chosen, rejected, strict=True) if one and other]
        cuts = [[_from_common(one, both).cut(max_seq_len) for one in both] for both in whole]
        kept = [(both, cut) for both, cut in zip(whole, cuts, strict=True) if all(_learns(one) for one in cut)]
        num_cut = [
            sum(len(cut[side].question) + len(cut[side].rest) < len(both[side].question) + len(both[side].rest)
                for both, cut in kept)
            for side in (0, 1)
        ]  # fmt: skip
        cuts = [cut for _, cut in kept]
        columns = [[one.question for one, _ in cuts]]
        columns += [[cut[side].rest for cut in cuts] for side in (0, 1)]
        columns += [[cut[side].turn_lengths for cut in cuts] for side in (0, 1)]
        singles, moved = sum(len(row[0].turns) == 2 for row in rows), sum(both[0].systems_moved for both, _ in kept)
        return Encoded(columns, [0, *num_cut, 0, 0], {}, 0, min(singles, len(kept)), moved, ignored)

    def network_lengths(self, lengths):
        """Tokens of questions and responses of rows with these lengths in the token store."""
        return np.stack([2 * lengths[:, 0], lengths[:, 1] + lengths[:, 2]], axis=1)

    def target_tokens(self, store, ids):
        """int64 (rows, 2): learnt tokens of the chosen and of the rejected response."""
        turns, counts = store.tokens(ids)[3:], store.lengths[ids, 3:].astype(np.int64)
        learnt = [_sums(own * (_places(num) % 2 == 0), num) for own, num in zip(turns, counts.T, strict=True)]
        return np.stack(learnt, axis=1)

    def sequences(self, store, ids):
        """Sequences of a question and a response each; the question stands twice."""
        questions, *responses, chosen_turns, rejected_turns = store.tokens(ids)
        lengths = store.lengths[ids].astype(np.int64)
        turns = interleaved((chosen_turns, rejected_turns), lengths[:, 3:])
        is_target = np.repeat(_places(lengths[:, 3:].ravel()) % 2 == 0, turns)
        targets = interleaved(responses, lengths[:, 1:3])
        return repeated(questions, lengths[:, 0], targets, lengths[:, 1:3], is_target)

    def questions(self, store, ids):
        """(dialogues up to where the responses differ in form, the first answers of the chosen ones)."""
        ends = np.cumsum(store.lengths[ids].astype(np.int64), axis=0)[:-1].T
        columns = [np.split(flat, own) for flat, own in zip(store.tokens(ids), ends, strict=True)]
        return columns[0], [rest[_first_answer(turns)] for rest, turns in zip(columns[1], columns[3], strict=True)]


def _from_common(one, both):
    """An EncodedDialogue whose question is what those of `both` have in common."""
    if both[0].question == both[1].question:
        return one
    first, second = (np.array(each.question) for each in both)
    shortest = min(len(first), len(second))
    differs = np.flatnonzero(first[:shortest] != second[:shortest])
    common = int(differs[0]) if len(differs) else shortest
    if not (own := one.question[common:]):
        return one
    return EncodedDialogue(one.question[:common], own + one.rest, [0, len(own), *one.turn_lengths], one.systems_moved)


def _learns(one):
    """Whether an EncodedDialogue has a question and a learnt token."""
    return bool(one.question) and sum(one.turn_lengths[::2]) > 0


def _first_answer(turns):
    """Slice of the first learnt answer of a response with these turn lengths."""
    begin = 0 if turns[0] else int(turns[1])
    return slice(begin, begin + int(turns[0] or turns[2]))


def _places(counts):
    """Number of each item in its row, for rows of so many items."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _sums(values, counts):
    """Sum of each row's values, of which it has at least one."""
    return np.add.reduceat(values, np.cumsum(counts) - counts)
