"""How many questions with choices a model answers, in lines to read."""

import math
from dataclasses import dataclass

from model.display.catalogue import texts_here
from model.display.model_table import table_lines
from model.runtime.terminal import printable


@dataclass(frozen=True)
class SubjectScore:
    name: str
    right: int
    questions: int

    @property
    def share(self):
        return self.right / self.questions


def subject_lines(scores):
    """A line for each SubjectScore."""
    text = texts_here()
    return [
        text("choices.subject", name=printable(score.name), percent=100 * score.share, questions=score.questions)
        for score in scores
    ]


def subject_table(scores):
    """A table with a column for each model of `scores`, lists of SubjectScore by name, and a row for each subject."""
    told = [[f"{100 * score.share:.1f} %" for score in of_model] for of_model in scores.values()]
    subjects = [printable(score.name) for score in next(iter(scores.values()))]
    rows = [list(row) for row in zip(subjects, *told, strict=True)]
    return table_lines([["", *map(printable, scores)], *rows])


def sum_lines(model, scores, shortened):
    """A line for all questions of the SubjectScores, and one on questions that were `shortened`."""
    text, right, questions = texts_here(), sum(s.right for s in scores), sum(s.questions for s in scores)
    share, mean = right / questions, sum(score.share for score in scores) / len(scores)
    error = 100 * math.sqrt(share * (1 - share) / questions)
    values = dict(percent=100 * share, error=error, mean=100 * mean, questions=questions, subjects=len(scores))
    lines = [text("choices.all", model=model, **values)]
    if any(shortened.values()):
        lines.append(text("choices.shortened", fewer=shortened["fewer"], cut=shortened["cut"]))
    return lines
