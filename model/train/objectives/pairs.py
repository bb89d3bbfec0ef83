"""The objective `pairs`: predict each token of the response, given the prompt."""

from dataclasses import dataclass

import numpy as np

from model.data.readers import read_pairs
from model.data.sequences import Sequences
from model.data.token_store import Encoded


@dataclass(frozen=True)
class Pairs:
    """Cross-entropy of the responses, plus `z_loss` times the squared log-normaliser (arXiv 2204.02311)."""

    z_loss: float = 0.0

    name = "pairs"
    sides = ("prompt_ids", "response_ids")
    values = derived = ()
    sequences_per_row, has_answers = 1, True
    needs = (
        "text on both sides; name the columns with --prompt_column and --response_column, or clean the file with "
        "scripts/prepare_data.py"
    )

    @property
    def metrics(self):
        return ("loss", "z_loss") if self.z_loss else ("loss",)

    def read(self, path, columns, ignored):
        return read_pairs(path, *columns, ignored=ignored)

    def encode(self, rows, tokenizer, max_seq_len):
        kept = [row for row in rows if all(side.strip() for side in row)]
        texts = zip(*kept, strict=True) if kept else ([], [])
        sides, num_cut = zip(*(_with_eos(side, tokenizer, max_seq_len) for side in texts), strict=True)
        return Encoded(list(sides), list(num_cut), {})

    def derive(self, model, batch, chunk_tokens):
        return {}

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
        loss, parts = model.cross_entropy(batch, chunk_tokens, self.z_loss)
        return loss[None], parts[: len(self.metrics)]

    def questions(self, store, ids):
        return tuple(np.split(flat, ends) for flat, ends in zip(store.tokens(ids), _ends(store, ids), strict=True))


def _with_eos(texts, tokenizer, max_seq_len):
    """(ids of each text, truncated and ended by one EOS, number of texts truncated)."""
    encoded = tokenizer.encode_batch(list(texts))
    num_cut = sum(len(ids) >= max_seq_len for ids in encoded)
    return [[*ids[: max_seq_len - 1], tokenizer.eos_id] for ids in encoded], num_cut


def _ends(store, ids):
    """Where each row but the last ends in the concatenated ids, for each side."""
    return np.cumsum(store.lengths[ids].astype(np.int64), axis=0)[:-1].T
