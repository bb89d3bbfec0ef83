"""The objective `pairs`: predict each token of the response, given the prompt and what was said before it."""

from dataclasses import dataclass

import numpy as np

from model.data.readers import read_conversations
from model.data.sequences import Sequences
from model.data.t5_text import FORMAT, encode_questions, pairs_of
from model.data.token_store import Encoded
from model.nn.loss_terms import PLAIN, LossTerms


@dataclass(frozen=True)
class Pairs:
    """Cross-entropy of the responses, and the LossTerms.

    With `single_turn` each question of a conversation is a prompt by itself; otherwise its context is in the prompt,
    in the format of model/data/t5_text.py. `prefix` stands before each question.
    """

    terms: LossTerms = PLAIN
    single_turn: bool = False
    prefix: str = ""

    name = "pairs"
    columns = ("prompt_ids", "response_ids")
    values = derived = ()
    sequences_per_row, has_answers = 1, True
    needs = (
        "text in prompt and response; name the columns with --prompt_column and --response_column, or clean the file "
        "with scripts/prepare_data.py"
    )

    @property
    def encoding(self):
        encoding = "" if self.single_turn else FORMAT
        return f"{encoding} prefix {self.prefix!r}" if self.prefix else encoding

    @property
    def metrics(self):
        return self.terms.metrics

    def read(self, path, columns, ignored):
        """Yield (prompt, response, Context or None) of each learnt response."""
        return pairs_of(read_conversations(path, *columns, ignored=ignored), ignored, self.single_turn)

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (prompt, response, Context or None)."""
        kept = [row for row in rows if row[0].strip() and row[1].strip()]
        prompts, responses, contexts = zip(*kept, strict=True) if kept else ([], [], [])
        encoded = tokenizer.encode_batch(list(responses))
        known = dict(zip(responses, encoded, strict=True)) if any(contexts) else None
        sources = encode_questions(prompts, contexts, tokenizer, max_seq_len, self.prefix, known)
        targets = [[*ids[: max_seq_len - 1], tokenizer.eos_id] for ids in encoded]
        num_cut = [sources.num_cut, sum(len(ids) >= max_seq_len for ids in encoded)]
        return Encoded([sources.ids, targets], num_cut, {}, sources.turns_left_out, contexts.count(None))

    def derive(self, model, batch, chunk_tokens):
        return {}

    def row_tokens(self, max_seq_len):
        return max_seq_len

    def length_bounds(self, lengths):
        return lengths

    def lengths(self, store, ids, seed, epoch):
        return store.lengths[ids].astype(np.int64)

    def sequences(self, store, ids, seed, epoch):
        return Sequences(store.tokens(ids), store.lengths[ids].astype(np.int64), ids=np.asarray(ids, np.int64))

    def weights(self, store, ids, seed, epoch):
        target_tokens = int(store.lengths[ids, 1].sum(dtype=np.int64))
        return (target_tokens,), (target_tokens,) * len(self.metrics)

    def losses(self, model, batch, chunk_tokens):
        loss, parts = model.cross_entropy(batch, chunk_tokens, self.terms)
        return loss[None], parts[: len(self.metrics)]

    def questions(self, store, ids):
        return tuple(np.split(flat, ends) for flat, ends in zip(store.tokens(ids), _ends(store, ids), strict=True))


def _ends(store, ids):
    """Where each row but the last ends in the concatenated ids, for each column."""
    return np.cumsum(store.lengths[ids].astype(np.int64), axis=0)[:-1].T
