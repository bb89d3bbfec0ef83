"""The losses of a pair of responses, one preferred to the other, from their log-probabilities."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

LEAST_SURPRISE = 1e-6  # nats a token: odds of a response that is certain are not infinite


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of each pair; `kind` is one of the keys of LOSSES.

    A response's score is its log-probability, less that under the reference for the kinds of WITH_REFERENCE; with
    `per_token` it is divided by its tokens. Its reward is `beta` times its score.
    """

    kind: str
    beta: float
    gamma: float = 0.0  # simpo: the reward by which the chosen response should be ahead
    label_smoothing: float = 0.0  # share of the pairs that are taken to be the wrong way round
    per_token: bool = False

    @property
    def needs_reference(self) -> bool:
        return self.kind in WITH_REFERENCE

    def scores(self, log_probs, references, tokens):
        """Scores of responses with these log-probabilities, those of the reference, and numbers of tokens."""
        scores = log_probs - references if self.needs_reference else log_probs
        return scores / tokens.clamp(min=1) if self.per_token else scores

    def losses(self, chosen, rejected):
        """Loss (pairs,) of the scores (pairs,) of the chosen and of the rejected responses."""
        return LOSSES[self.kind](self, chosen, rejected)


def sigmoid(loss, chosen, rejected):
    """DPO (Rafailov et al. 2023, arXiv 2305.18290), with label smoothing as Mitchell 2023 has it; SimPO with gamma."""
    ahead = loss.beta * (chosen - rejected) - loss.gamma
    smoothing = loss.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(ahead) - smoothing * F.logsigmoid(-ahead)


def ipo(loss, chosen, rejected):
    """IPO (Azar et al. 2023, arXiv 2310.12036): the scores are to be 1 / (2 beta) apart."""
    return (chosen - rejected - 1 / (2 * loss.beta)) ** 2


def orpo(loss, chosen, rejected):
    """The odds ratio of ORPO (Hong et al. 2024, arXiv 2403.07691) of mean log-probabilities, times beta."""
    return -loss.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(mean_log_probs):
    surprise = mean_log_probs.clamp(max=-LEAST_SURPRISE)
    return surprise - torch.log(-torch.expm1(surprise))


LOSSES = dict(sigmoid=sigmoid, ipo=ipo, orpo=orpo, simpo=sigmoid)  # SimPO: Meng et al. 2024, arXiv 2405.14734
WITH_REFERENCE = ("sigmoid", "ipo")
