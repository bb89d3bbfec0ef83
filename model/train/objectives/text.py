"""The objective `text`: predict each token of a text, given those before it (a causal language model)."""

from dataclasses import dataclass

import numpy as np

from model.data.documents import chunks_of, encode_texts
from model.data.sequences import Sequences
from model.train.objectives.chunks import Chunks


@dataclass(frozen=True)
class Text(Chunks):
    """EOS ends a document, and a chunk begins with the last token of the one before.

    So each token of a document but its first is predicted once.
    """

    name, encoding = "text", "chunks that overlap by a token, EOS behind a text"

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (text,)."""
        return encode_texts(rows, tokenizer, lambda ids: chunks_of([*ids, tokenizer.eos_id], max_seq_len, overlap=1))

    def row_tokens(self, max_seq_len):
        return max_seq_len

    def length_bounds(self, lengths):
        return lengths[:, :1]

    def lengths(self, store, ids, seed, epoch):
        return store.lengths[ids, :1].astype(np.int64)

    def sequences(self, store, ids, seed, epoch):
        lengths = self.lengths(store, ids, seed, epoch)
        return Sequences(store.tokens(ids)[:1], lengths, ids=np.asarray(ids, np.int64))

    def weights(self, store, ids, seed, epoch):
        target_tokens = int(store.lengths[ids, 0].sum(dtype=np.int64)) - len(ids)
        return (target_tokens,), (target_tokens,) * len(self.metrics)
