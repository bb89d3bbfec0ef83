"""What a loss has beside the cross-entropy of its targets. Imports no torch: a process that tokenises reads it too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossTerms:
    """Terms of a loss; those that are 0 or empty are off and cost nothing."""

    z_loss: float = 0.0  # weight of the squared log-normaliser (arXiv 2204.02311)
    label_smoothing: float = 0.0  # share of a target's probability that is spread over the vocabulary
    distill_weight: float = 0.0  # share of the loss that compares with the teachers; the rest is that of the targets
    distill_temperature: float = 1.0  # by which the logits of both are divided for that
    against_loops: str = ""  # unlikelihood, scalegrad, contrastive
    loops_weight: float = 0.0
    loops_ngram: int = 1  # 1: what stands in the answer already; 2: what would write a pair of tokens again; …

    @property
    def metrics(self):
        """Names of the sums that are reported, the first of the parts of a loss."""
        return ("loss", "z_loss") if self.z_loss else ("loss",)


PLAIN = LossTerms()
