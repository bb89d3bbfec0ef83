"""The objective `prefix`: predict the second part of a text, given the first (a prefix language model)."""

from dataclasses import dataclass

import numpy as np

from model.data.documents import chunks_of, encode_texts
from model.data.row_draws import places, row_bits
from model.data.sequences import Sequences
from model.train.objectives.chunks import Chunks


@dataclass(frozen=True)
class Prefix(Chunks):
    """Where a chunk is divided is drawn anew in each epoch, each place as likely as another.

    A network with an encoder reads the first part, which ends with `eos_id`, and writes the second; without an `eos_id`
    both are one stream, of which the second part is learnt.
    """

    eos_id: int | None = None

    name, encoding = "prefix", "chunks, EOS behind a text"

    def encode(self, rows, tokenizer, max_seq_len):
        """`rows` are (text,)."""
        return encode_texts(rows, tokenizer, lambda ids: chunks_of([*ids, tokenizer.eos_id], max_seq_len))

    def row_tokens(self, max_seq_len):
        return max_seq_len

    def length_bounds(self, lengths):
        chunks = np.asarray(lengths[:, :1], np.int64)
        return chunks if self.eos_id is None else np.concatenate([chunks, chunks - 1], axis=1)

    def lengths(self, store, ids, seed, epoch):
        chunks = store.lengths[ids, 0].astype(np.int64)
        if self.eos_id is None:
            return chunks[:, None]
        first = self._first_parts(chunks, ids, seed, epoch)
        return np.stack([first + 1, chunks - first], axis=1)

    def sequences(self, store, ids, seed, epoch):
        tokens, chunks = store.tokens(ids)[0], store.lengths[ids, 0].astype(np.int64)
        first = self._first_parts(chunks, ids, seed, epoch)
        is_second, numbers = places(chunks) >= np.repeat(first, chunks), np.asarray(ids, np.int64)
        if self.eos_id is None:
            return Sequences((tokens,), chunks[:, None], is_second, ids=numbers)
        read = np.insert(tokens[~is_second], np.cumsum(first), self.eos_id)
        return Sequences((read, tokens[is_second]), np.stack([first + 1, chunks - first], axis=1), ids=numbers)

    def _first_parts(self, chunks, ids, seed, epoch):
        """Tokens of the first part of each of the rows `ids`, whose `chunks` have these lengths."""
        drawn = row_bits(f"prefix/{seed}/{epoch}", ids) >> np.uint64(32)
        return (drawn % (chunks - 1).astype(np.uint64)).astype(np.int64) + 1

    def weights(self, store, ids, seed, epoch):
        chunks = store.lengths[ids, 0].astype(np.int64)
        target_tokens = int((chunks - self._first_parts(chunks, ids, seed, epoch)).sum())
        return (target_tokens,), (target_tokens,) * len(self.metrics)
