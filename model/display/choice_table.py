"""How many questions with choices a model answers, in lines to read."""

import math
from dataclasses import dataclass

from model.display.catalogue import texts_here
from model.runtime.terminal import printable


@dataclass(frozen=True)
class SubjectScore:
    name: str
    right: int
    questions: int

    @property
    def share(self):
        return self.right / self.questions


def choice_lines(model, scores, shortened):
    """A line for each SubjectScore and one for all, and one on questions that were `shortened`; none without scores."""
    if not scores:
        return []
    text, right, questions = texts_here(), sum(s.right for s in scores), sum(s.questions for s in scores)
    lines = [
        text("choices.subject", name=printable(score.name), percent=100 * score.share, questions=score.questions)
        for score in scores
    ]
    share, mean = right / questions, sum(score.share for score in scores) / len(scores)
    error = 100 * math.sqrt(share * (1 - share) / questions)
    values = dict(percent=100 * share, error=error, mean=100 * mean, questions=questions, subjects=len(scores))
    lines.append(text("choices.all", model=model, **values))
    if any(shortened.values()):
        lines.append(text("choices.shortened", fewer=shortened["fewer"], cut=shortened["cut"]))
    return lines
