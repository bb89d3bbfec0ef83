"""How a network that reads pairs reads a preference: a source, which an encoder reads once, and two targets."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from model.data.sequences import Sequences
from model.data.t5_text import FORMAT, encode_questions, exchanges
from model.data.token_store import Encoded


@dataclass(frozen=True)
class PairForm:
    """The question with its context, in the format of model/data/t5_text.py, and the first answer of each response.

    `prefix` stands before each question. Without `shares_source` the source stands before each target, as a network
    that reads one stream needs it.
    """

    prefix: str = ""
    shares_source: bool = True

    columns = ("prompt_ids", "chosen_ids", "rejected_ids")

    @property
    def encoding(self):
        return f"{FORMAT} prefix {self.prefix!r}" if self.prefix else FORMAT

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (chosen Conversation, rejected Conversation)."""
        ignored, kept = Counter(), []
        for chosen, rejected in rows:
            question, answer, context = exchanges(chosen, ignored)[0]
            worse = exchanges(rejected, Counter())[0][1]
            if question.strip() and answer.strip() and worse.strip():
                kept.append((question, context, answer, worse))
        questions, contexts, *answers = zip(*kept, strict=True) if kept else ([], [], [], [])
        sources = encode_questions(questions, contexts, tokenizer, max_seq_len, self.prefix)
        encoded = [tokenizer.encode_batch(list(texts)) for texts in answers]
        targets = [[[*ids[: max_seq_len - 1], tokenizer.eos_id] for ids in column] for column in encoded]
        num_cut = [sources.num_cut, *(sum(len(ids) >= max_seq_len for ids in column) for column in encoded)]
        singles = contexts.count(None)
        return Encoded([sources.ids, *targets], num_cut, {}, sources.turns_left_out, singles, ignored=ignored)

    def network_lengths(self, lengths):
        """Tokens of source and targets of rows with these lengths in the token store."""
        sources = lengths[:, 0] if self.shares_source else 2 * lengths[:, 0]
        return np.stack([sources, lengths[:, 1] + lengths[:, 2]], axis=1)

    def target_tokens(self, store, ids):
        """int64 (rows, 2): learnt tokens of the chosen and of the rejected response."""
        return store.lengths[ids, 1:3].astype(np.int64)

    def sequences(self, store, ids):
        """Sequences of a source with two targets, or with one."""
        lengths, (prompts, *responses) = store.lengths[ids].astype(np.int64), store.tokens(ids)
        targets = interleaved(responses, lengths[:, 1:])
        if self.shares_source:
            return Sequences((prompts, targets), self.network_lengths(lengths), target_lengths=lengths[:, 1:])
        return repeated(prompts, lengths[:, 0], targets, lengths[:, 1:])

    def questions(self, store, ids):
        """(questions, chosen answers)."""
        ends = np.cumsum(store.lengths[ids].astype(np.int64), axis=0)[:-1].T
        return tuple(np.split(flat, own) for flat, own in list(zip(store.tokens(ids), ends, strict=True))[:2])


def repeated(sources, source_lengths, targets, target_lengths, is_target=None):
    """Sequences of a target each, behind its row's source; `target_lengths` (rows, 2)."""
    twice = np.repeat(source_lengths[:, None], 2, axis=1)
    lengths = np.stack([twice.ravel(), target_lengths.ravel()], axis=1)
    return Sequences((interleaved((sources, sources), twice), targets), lengths, is_target)


def interleaved(columns, lengths):
    """The ids of several columns, row by row: those of the first column's row, of the second's, … of the next row."""
    parts = (np.split(flat, np.cumsum(own)[:-1]) for flat, own in zip(columns, lengths.T, strict=True))
    return np.concatenate([part for row in zip(*parts, strict=True) for part in row])
