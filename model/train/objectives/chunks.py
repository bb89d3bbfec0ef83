"""What the objectives on plain text share: documents in, chunks of token ids as rows, cross-entropy out."""

from dataclasses import dataclass

from model.data.documents import NEEDS, read_texts


@dataclass(frozen=True)
class Chunks:
    """Cross-entropy of the learnt tokens, plus `z_loss` times the squared log-normaliser (arXiv 2204.02311).

    A row of the token store is a chunk of a document, in its only column; a store may have other columns behind it.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0

    columns = ("text_ids",)
    values = derived = ()
    sequences_per_row, has_answers = 1, False
    needs = NEEDS

    @property
    def metrics(self):
        return ("loss", "z_loss") if self.z_loss else ("loss",)

    def read(self, path, columns, ignored):
        """Yield (text,) of each document."""
        return read_texts(path, columns, ignored)

    def derive(self, model, batch, chunk_tokens):
        return {}

    def losses(self, model, batch, chunk_tokens):
        loss, parts = model.cross_entropy(batch, chunk_tokens, self.z_loss, self.label_smoothing)
        return loss[None], parts[: len(self.metrics)]
