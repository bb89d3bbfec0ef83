"""Files of several objectives in one run: each row is learnt as its file's objective says."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from model.data.sequences import Sequences


@dataclass(frozen=True)
class Mixed:
    """Objectives whose loss is the cross-entropy of the targets: a step is divided by the targets of all its rows.

    `parts` are those of the files, in order, which have so many `rows` in the token store; () before it is there.
    """

    parts: tuple
    rows: tuple = ()

    name = "mix"
    derived = ()
    sequences_per_row, has_answers = 1, False

    @property
    def encoding(self):
        return " + ".join(f"{part.name} {part.encoding}" for part in self.parts)

    @property
    def columns(self):
        """Those of the part that has most; rows of the others have one id in the columns that they lack."""
        return max((part.columns for part in self.parts), key=len)

    @property
    def values(self):
        return tuple(dict.fromkeys(name for part in self.parts for name in part.values))

    @property
    def metrics(self):
        return self.parts[0].metrics

    @property
    def needs(self):
        return " or ".join(dict.fromkeys(part.needs for part in self.parts))

    @property
    def readers(self):
        """What reads and encodes each file."""
        return tuple(Reader(part, len(self.columns), self.values) for part in self.parts)

    def derive(self, model, batch, chunk_tokens):
        return {}

    def row_tokens(self, max_seq_len):
        return max(part.row_tokens(max_seq_len) for part in self.parts)

    def length_bounds(self, lengths):
        return self._by_row(np.arange(len(lengths)), lambda part, ids: part.length_bounds(lengths[ids]))

    def lengths(self, store, ids, seed, epoch):
        return self._by_row(ids, lambda part, own: part.lengths(store, own, seed, epoch))

    def sequences(self, store, ids, seed, epoch):
        """Those of one objective after those of another."""
        shared = [part.sequences(store, own, seed, epoch) for part, own in self._shares(ids)]
        return _joined(shared, self._network_columns)

    def weights(self, store, ids, seed, epoch):
        shares = [part.weights(store, own, seed, epoch) for part, own in self._shares(ids)]
        return tuple(tuple(map(sum, zip(*sums, strict=True))) for sums in zip(*shares, strict=True))

    def losses(self, model, batch, chunk_tokens):
        return self.parts[0].losses(model, batch, chunk_tokens)

    @cached_property
    def _network_columns(self):
        """How many columns the network reads, of the part that has most."""
        row = np.full((1, len(self.columns)), 2)
        return max(part.length_bounds(row).shape[1] for part in self.parts)

    def _places(self, ids):
        """Which of the different parts each of the rows `ids` belongs to, and these parts."""
        different = list(dict.fromkeys(self.parts))
        numbers = np.array([different.index(part) for part in self.parts])
        return numbers[np.searchsorted(np.cumsum(self.rows), ids, side="right")], different

    def _shares(self, ids):
        """[(part, its rows among `ids`)] of the parts that have some."""
        ids = np.asarray(ids)
        places, different = self._places(ids)
        return [(part, own) for number, part in enumerate(different) if len(own := ids[places == number])]

    def _by_row(self, ids, lengths_of):
        """int64 (rows, columns of the network): what `lengths_of(part, ids)` gives for the rows of each part."""
        places, different = self._places(ids)
        lengths = np.zeros((len(ids), self._network_columns), np.int64)
        for number, part in enumerate(different):
            if (is_own := places == number).any():
                own = lengths_of(part, ids[is_own])
                lengths[is_own, -own.shape[1] :] = own
        return lengths


@dataclass(frozen=True)
class Reader:
    """Reads and encodes a file for a part of a Mixed, to rows of so many columns with these values."""

    part: object
    num_columns: int
    values: tuple

    def read(self, path, columns, ignored):
        return self.part.read(path, columns, ignored)

    def encode(self, rows, tokenizer, max_seq_len):
        encoded = self.part.encode(rows, tokenizer, max_seq_len)
        num_rows, missing = len(encoded.columns[0]), self.num_columns - len(encoded.columns)
        values = {name: encoded.values.get(name, [0] * num_rows) for name in self.values}
        columns = [*encoded.columns, *([[0]] * num_rows for _ in range(missing))]
        return replace(encoded, columns=columns, num_cut=[*encoded.num_cut, *[0] * missing], values=values)


def _joined(parts, num_columns):
    """Sequences of several objectives end to end; those of fewer columns, in one stream, have empty ones in front."""
    empty = np.zeros(0, np.int64)
    columns = zip(*([empty] * (num_columns - len(part.columns)) + [*part.columns] for part in parts), strict=True)
    lengths = [np.pad(part.lengths, ((0, 0), (num_columns - part.lengths.shape[1], 0))) for part in parts]
    is_target = [np.ones(len(part.columns[-1]), bool) if part.is_target is None else part.is_target for part in parts]
    return Sequences(
        tuple(np.concatenate(column) for column in columns), np.concatenate(lengths), np.concatenate(is_target),
        ids=np.concatenate([part.ids for part in parts]),
    )  # fmt: skip
