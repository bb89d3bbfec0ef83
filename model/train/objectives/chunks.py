"""What the objectives on plain text share: documents in, chunks of token ids as rows, cross-entropy out."""

from dataclasses import dataclass

from model.data.documents import NEEDS, read_texts
from model.nn.loss_terms import PLAIN, LossTerms


@dataclass(frozen=True)
class Chunks:
    """Cross-entropy of the learnt tokens, and the LossTerms.

    A row of the token store is a chunk of a document, in its only column; a store may have other columns behind it.
    """

    terms: LossTerms = PLAIN

    columns = ("text_ids",)
    values = derived = ()
    sequences_per_row, has_answers = 1, False
    needs = NEEDS

    @property
    def metrics(self):
        return self.terms.metrics

    def read(self, path, columns, ignored):
        """Yield (text,) of each document."""
        return read_texts(path, columns, ignored)

    def derive(self, model, batch, chunk_tokens):
        return {}

    def losses(self, model, batch, chunk_tokens):
        loss, parts = model.cross_entropy(batch, chunk_tokens, self.terms)
        return loss[None], parts[: len(self.metrics)]
