"""Objective: what a step's loss is, from the rows of a file to sums that add up over micro-batches and ranks."""

from typing import Protocol


class Objective(Protocol):
    """A frozen record of an objective's options, with pure functions.

    A row of the file becomes a row of the token store (`read`, `encode`), which becomes one or more sequences of a step
    (`sequences`), of which the network makes sums (`losses`). A step minimises each loss sum divided by its number in
    `weights`, added up; it reports each metric sum divided by its own.
    """

    name: str
    encoding: str  # names the form of the stored ids; part of a token store's key
    columns: tuple[str, ...]  # names of token ids in the token store, at least one token in each row
    values: tuple[str, ...]  # columns of a float32 for each row; `encode` gives them
    derived: tuple[str, ...]  # columns of a float32 for each row; `derive` gives them, from the weights at the start
    # names of the metric sums, at most NUM_SUMS; the first is the loss that best/ minimises. Sums of one figure that
    # have divisors of their own have one name, and all but the first of them stand last.
    metrics: tuple[str, ...]
    sequences_per_row: int  # or, where a source has several targets, targets
    has_answers: bool  # False: `questions` is never called
    needs: str  # what a row must have, for the message about a file without such a row

    def read(self, path, columns, ignored):
        """Yield the rows of a file, tuples of texts and numbers; counts in `ignored` what is not used.

        Raises ValueError for an unreadable file.
        """

    def encode(self, rows, tokenizer, max_seq_len):
        """Encoded of these rows; rows without what is needed are left out."""

    def derive(self, model, batch, chunk_tokens):
        """{name: float32 (rows,)} of the `derived` columns for the rows of a batch, whose derived columns are zeros."""

    def row_tokens(self, max_seq_len):
        """Most tokens of a column of a row, as it is stored."""

    def length_bounds(self, lengths):
        """Most tokens of a row in any epoch, (rows, columns of the network); `lengths` are the store's."""

    def lengths(self, store, ids, seed, epoch):
        """Tokens of the rows `ids` in this epoch, all sequences of a row together; int64 (rows, columns)."""

    def sequences(self, store, ids, seed, epoch):
        """Sequences of the rows `ids` in this epoch. What is drawn at random depends on (seed, epoch, id) alone.

        `Sequences.ids`, by which dropout draws its masks, is a number of its own for each sequence of each row.
        """

    def weights(self, store, ids, seed, epoch):
        """(numbers that the loss sums are divided by, numbers that the metric sums are divided by) for these rows."""

    def losses(self, model, batch, chunk_tokens):
        """(loss sums (losses,) with a gradient, metric sums (metrics,) without one) of a batch.

        Shapes are fixed and nothing is read on the host, so that a step can be captured as a CUDA graph.
        """

    def questions(self, store, ids):
        """(inputs, references): for each row the ids that an answer follows, and those of the right answer."""
