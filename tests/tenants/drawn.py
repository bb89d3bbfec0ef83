"""An objective for tests: what it learns is drawn anew in each epoch, and its two loss sums have a divisor each."""

from dataclasses import dataclass

import numpy as np
import torch

from model.data.sequences import Sequences
from model.nn.loss_terms import LossTerms
from model.train.objectives.pairs import Pairs


@dataclass(frozen=True)
class Drawn(Pairs):
    """Pairs without a beginning of each column: cross-entropy, a mean over tokens, and z-loss, a mean over rows."""

    z_loss: float = 0.1

    name = "drawn"
    metrics = ("loss", "z_loss")

    def _starts(self, store, ids, seed, epoch):
        """Tokens that each column of the rows lacks in this epoch, (rows, columns)."""
        draws = [np.random.default_rng([seed, epoch, int(row)]).random(2) for row in ids]
        return (np.reshape(draws, (-1, 2)) * store.lengths[ids]).astype(np.int64)

    def lengths(self, store, ids, seed, epoch):
        return store.lengths[ids].astype(np.int64) - self._starts(store, ids, seed, epoch)

    def sequences(self, store, ids, seed, epoch):
        whole, starts = store.lengths[ids].astype(np.int64), self._starts(store, ids, seed, epoch)
        columns = []
        for flat, lengths, first in zip(store.tokens(ids), whole.T, starts.T, strict=True):
            place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            columns.append(flat[place >= np.repeat(first, lengths)])
        return Sequences(tuple(columns), whole - starts, ids=np.asarray(ids, np.int64))

    def weights(self, store, ids, seed, epoch):
        tokens = int(self.lengths(store, ids, seed, epoch)[:, 1].sum())
        return (tokens, len(ids)), (tokens, len(ids))

    def losses(self, model, batch, chunk_tokens):
        loss, parts = model.cross_entropy(batch, chunk_tokens)
        total, _ = model.cross_entropy(batch, chunk_tokens, LossTerms(self.z_loss))
        return torch.stack([loss, total - loss]), torch.stack([parts[0], (total - loss).detach()])
