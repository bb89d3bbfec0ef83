"""The rows of a token store as an objective presents them to a network."""

from dataclasses import dataclass
from functools import cached_property

from model.data.length_histogram import histogram, mixed
from model.data.sampler import Mixture
from model.data.token_store import TokenStore
from model.nn.base import Family, Packing
from model.train.objectives.base import Objective


@dataclass(frozen=True)
class Examples:
    """Rows by number: their lengths, and batches of them."""

    store: TokenStore
    objective: Objective
    family: Family
    first_id: int  # token id that a sequence of targets begins with
    seed: int = 0
    kernels: bool = False  # batches are for the Triton kernels
    dropout: bool = False  # batches are for training with dropout
    mixture: Mixture | None = None  # what an epoch takes of the files; None: each row once

    def __len__(self):
        return len(self.store)

    @property
    def epoch_pairs(self):
        """Rows of an epoch."""
        return self.mixture.epoch_pairs if self.mixture else len(self)

    @cached_property
    def bounds(self):
        """Most tokens of each side of every row in any epoch, (rows, sides)."""
        return self.objective.length_bounds(self.store.lengths)

    @cached_property
    def histogram(self):
        """Lengths of `bounds`, each as often as an epoch takes it."""
        return mixed(self.bounds, self.mixture) if self.mixture else histogram(self.bounds)

    def lengths(self, ids, epoch):
        """Tokens of each side of the rows `ids` in this epoch, int64 (rows, sides)."""
        return self.objective.lengths(self.store, ids, self.seed, epoch)

    def weights(self, ids, epoch):
        """(divisors of the loss sums, divisors of the metric sums) of the rows `ids`."""
        return self.objective.weights(self.store, ids, self.seed, epoch)

    def sequences(self, ids, epoch):
        """Sequences of the rows `ids` in this epoch."""
        return self.objective.sequences(self.store, ids, self.seed, epoch)

    def batch(self, ids, epoch, bucket=None):
        """The network's batch of the rows `ids`, in host memory; padded to `bucket`, if one is given."""
        sequences = self.sequences(ids, epoch)
        num_sequences = bucket.examples * self.objective.sequences_per_row if bucket else 0
        packing = Packing(self.first_id, self.kernels, bucket, num_sequences, self.dropout)
        return self.family.collate(sequences, packing)
