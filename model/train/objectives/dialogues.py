"""The objective `pairs` for networks that read whole dialogues: predict every response, given all that is before it."""

import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np

from model.data.conversation import Conversation, Turn
from model.data.readers import read_conversations
from model.data.sequences import Sequences
from model.data.t5_text import pairs_of
from model.data.token_store import Encoded
from model.data.turn_template import turn_template
from model.nn.loss_terms import PLAIN, LossTerms


@dataclass(frozen=True)
class Dialogues:
    """Cross-entropy of the assistant's turns, and the LossTerms.

    An example is a dialogue in the chat template of the tokenizer, whose text is `template`; it has at most
    `max_tokens`. With `single_turn` each question is a dialogue by itself.
    """

    template: str
    max_tokens: int
    terms: LossTerms = PLAIN
    single_turn: bool = False
    learn_empty_thoughts: bool = False

    name = "dialogues"
    columns = ("question_ids", "dialogue_ids", "turn_lengths")  # the third says which parts of the second are learnt
    values = ("target_tokens",)
    derived = ()
    sequences_per_row, has_answers = 1, True
    needs = "a response that begins within --max_seq_len tokens; name the columns, or clean the file"

    @property
    def encoding(self):
        template = hashlib.sha256(self.template.encode()).hexdigest()
        kind = "single turns" if self.single_turn else "dialogues"
        return f"{kind} {template}{' empty thoughts' if self.learn_empty_thoughts else ''}"

    @property
    def metrics(self):
        return self.terms.metrics

    def read(self, path, columns, ignored):
        """Yield (Conversation,) of each dialogue."""
        conversations = read_conversations(path, *columns, ignored=ignored)
        if self.single_turn:
            pairs = pairs_of(conversations, ignored, single_turn=True)
            return ((Conversation((Turn("user", asked), Turn("assistant", said))),) for asked, said, _ in pairs)
        return ((conversation,) for conversation in conversations)

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (Conversation,)."""
        conversations, ignored = [row[0] for row in rows], Counter()
        dialogues = turn_template(tokenizer, self.learn_empty_thoughts).encode_dialogues(conversations, ignored)
        encoded = zip(dialogues, [len(one.turns) for one in conversations], strict=True)
        kept = [(one.cut(max_seq_len), one, num_turns) for one, num_turns in encoded if one]
        single_pairs = sum(num_turns == 2 for cut, _, num_turns in kept if cut.rest)
        kept = [(cut, one) for cut, one, _ in kept if cut.rest]
        num_cut = [0, sum(len(cut.rest) < len(one.rest) for cut, one in kept), 0]
        left_out = sum(len(one.turn_lengths[::2]) - len(cut.turn_lengths[::2]) for cut, one in kept)
        cuts = [cut for cut, _ in kept]
        columns = [[cut.question for cut in cuts], [cut.rest for cut in cuts], [cut.turn_lengths for cut in cuts]]
        values = dict(target_tokens=[sum(cut.turn_lengths[::2]) for cut in cuts])
        moved = sum(one.systems_moved for _, one in kept)
        return Encoded(columns, num_cut, values, left_out, single_pairs, moved, ignored)

    def derive(self, model, batch, chunk_tokens):
        return {}

    def row_tokens(self, max_seq_len):
        return max_seq_len

    def length_bounds(self, lengths):
        bounds = np.array(lengths[:, :2])
        excess = bounds.sum(axis=1, dtype=np.int64) - self.max_tokens
        bounds[:, 0] = np.maximum(bounds[:, 0] - np.maximum(excess, 0), 1)
        return bounds

    def lengths(self, store, ids, seed, epoch):
        return store.lengths[ids, :2].astype(np.int64)

    def sequences(self, store, ids, seed, epoch):
        *columns, turn_lengths = store.tokens(ids)
        counts = store.lengths[ids, 2].astype(np.int64)
        place = np.arange(len(turn_lengths)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_target = np.repeat(place % 2 == 0, turn_lengths)
        lengths = self.lengths(store, ids, seed, epoch)
        return Sequences(tuple(columns), lengths, is_target, ids=np.asarray(ids, np.int64))

    def weights(self, store, ids, seed, epoch):
        target_tokens = int(np.asarray(store.values["target_tokens"][ids], np.int64).sum())
        return (target_tokens,), (target_tokens,) * len(self.metrics)

    def losses(self, model, batch, chunk_tokens):
        loss, parts = model.cross_entropy(batch, chunk_tokens, self.terms)
        return loss[None], parts[: len(self.metrics)]

    def questions(self, store, ids):
        """The dialogues up to their first responses, and these."""
        questions, rests, turn_lengths = (
            np.split(flat, ends) for flat, ends in zip(store.tokens(ids), _ends(store, ids), strict=True)
        )
        return questions, [rest[: lengths[0]] for rest, lengths in zip(rests, turn_lengths, strict=True)]


def _ends(store, ids):
    """Where each row but the last ends in the concatenated ids, for each column."""
    return np.cumsum(store.lengths[ids].astype(np.int64), axis=0)[:-1].T
