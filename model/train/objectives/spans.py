"""The objective `span`: read a text with spans taken out, and write these (T5's span corruption, arXiv 1910.10683)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.data.documents import chunks_of, encode_texts
from model.data.row_draws import row_bits
from model.data.sequences import Sequences
from model.data.span_noise import Noise, corrupt
from model.train.objectives.chunks import Chunks


@dataclass(frozen=True)
class Spans(Chunks):
    """The spans of a chunk are drawn anew in each epoch; source and target have at most `max_tokens`, EOS included.

    `sentinels` are the ids of <extra_id_0>, <extra_id_1>, …, one for each span of the longest chunk.
    """

    noise: Noise = Noise(0.15, 3.0)
    max_tokens: int = 512
    sentinels: tuple = ()
    eos_id: int = 0

    name = "span"

    @cached_property
    def chunk_tokens(self):
        """Tokens of the longest chunk."""
        return self.noise.chunk_tokens(self.max_tokens)

    @property
    def encoding(self):
        return f"chunks of {self.chunk_tokens}"

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (text,)."""
        return encode_texts(rows, tokenizer, lambda ids: chunks_of(ids, self.chunk_tokens))

    def row_tokens(self, max_seq_len):
        return self.chunk_tokens

    def length_bounds(self, lengths):
        return self.noise.column_tokens(np.asarray(lengths[:, 0], np.int64))

    def lengths(self, store, ids, seed, epoch):
        return self.length_bounds(store.lengths[ids])

    def sequences(self, store, ids, seed, epoch):
        chunk_lengths = store.lengths[ids, 0].astype(np.int64)
        bits = row_bits(f"spans/{seed}/{epoch}", ids)
        columns = corrupt(store.tokens(ids)[0], chunk_lengths, self.noise, bits, self.sentinels, self.eos_id)
        return Sequences(columns, self.noise.column_tokens(chunk_lengths), ids=np.asarray(ids, np.int64))

    def weights(self, store, ids, seed, epoch):
        target_tokens = int(self.lengths(store, ids, seed, epoch)[:, 1].sum())
        return (target_tokens,), (target_tokens,) * len(self.metrics)
