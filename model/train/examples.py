"""The rows of a token store as an objective presents them to a network."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.data.file_list import names_of
from model.data.length_histogram import histogram, mixed
from model.data.sampler import Mixture
from model.data.sequences import with_places
from model.data.token_store import TokenStore
from model.nn.base import Family, Packing
from model.train.objectives.protocol import Objective

ROWS_AT_A_TIME = 4096  # whose sequences are made to know their lengths


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
    places: bool = False  # batches are for training against loops
    mixture: Mixture | None = None  # what an epoch takes of the files; None: each row once

    def __len__(self):
        return len(self.store)

    @property
    def epoch_pairs(self):
        """Rows of an epoch."""
        return self.mixture.epoch_pairs if self.mixture else len(self)

    @cached_property
    def bounds(self):
        """Most tokens of each column of every row in any epoch, (rows, columns)."""
        return self.objective.length_bounds(self.store.lengths)

    @cached_property
    def histogram(self):
        """Lengths of `bounds`, each as often as an epoch takes it."""
        return mixed(self.bounds, self.mixture) if self.mixture else histogram(self.bounds)

    @property
    def binned_lengths(self):
        """{column: Lengths.binned of it}, for plots."""
        names, num_columns = self.objective.columns, self.histogram.tokens.shape[1]
        if len(names) != num_columns:  # a network may take several columns as one
            names = [f"column {place}" for place in range(num_columns)]
        return {name.removesuffix("_ids"): self.histogram.binned(place) for place, name in enumerate(names)}

    def lengths(self, ids, epoch):
        """Tokens of each column of the rows `ids` in this epoch, int64 (rows, columns)."""
        return self.objective.lengths(self.store, ids, self.seed, epoch)

    def weights(self, ids, epoch):
        """(divisors of the loss sums, divisors of the metric sums) of the rows `ids`."""
        return self.objective.weights(self.store, ids, self.seed, epoch)

    def sequences(self, ids, epoch):
        """Sequences of the rows `ids` in this epoch."""
        sequences = self.objective.sequences(self.store, ids, self.seed, epoch)
        return with_places(sequences) if self.places else sequences

    def longest_questions(self, count):
        """The ids of the inputs that answers follow, for the rows with the longest source."""
        ids = np.argsort(-self.bounds[:, 0].astype(np.int64), kind="stable")[:count]
        return self.objective.questions(self.store, ids)[0]

    def batch(self, ids, epoch, bucket=None):
        """The network's batch of the rows `ids`, in host memory; padded to `bucket`, if one is given."""
        sequences = self.sequences(ids, epoch)
        num_sequences = bucket.examples * self.objective.sequences_per_row if bucket else 0
        packing = Packing(self.first_id, self.kernels, bucket, num_sequences, self.dropout)
        return self.family.collate(sequences, packing)


def check_lengths(examples, max_tokens, new_tokens=0):
    """Raise ValueError if a sequence has more than the `max_tokens` of the network; None: any length is right.

    A sequence has all its columns; so has a question with an answer of `new_tokens` (0: no answers are generated).
    """
    if max_tokens is None:
        return
    files = names_of([file["path"] for file in examples.store.meta["source"]["files"]])
    room = f"the network has places for {max_tokens}"
    if (longest := _longest_sequence(examples, max_tokens)) > max_tokens:
        raise ValueError(f"{files}: a sequence has {longest} tokens, and {room}: lower --max_seq_len")
    if new_tokens and (question := len(examples.longest_questions(1)[0])) + new_tokens > max_tokens:
        raise ValueError(
            f"{files}: a question has {question} tokens and its answer up to --max_new_tokens={new_tokens}, and {room} "
            "together: lower --max_new_tokens or --max_seq_len, or type --bleu_pairs=0, which generates no answers"
        )


def _longest_sequence(examples, limit):
    """Most tokens of a sequence, all its columns together; exact where a row with several has more than `limit`."""
    totals = examples.bounds.sum(axis=1, dtype=np.int64)
    if examples.objective.sequences_per_row == 1 or totals.max() <= limit:
        return int(totals.max())
    rows = np.flatnonzero(totals > limit)
    parts = np.split(rows, range(ROWS_AT_A_TIME, len(rows), ROWS_AT_A_TIME))
    return max(int(examples.sequences(part, 1).lengths.sum(axis=1).max()) for part in parts)
