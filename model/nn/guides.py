"""What a loss looks at beside the logits and the labels of its targets: teachers' logits, and tokens seen before."""

from dataclasses import dataclass

import torch

from model.nn.flat_params import padded_rows

WINDOW = 64  # tokens before a target of which a loss against loops speaks


@dataclass(frozen=True)
class TeacherOutput:
    """A network's output on the targets of a batch, without gradients; its logits are hidden_ND @ table_VD.T."""

    hidden_ND: torch.Tensor
    table_WD: torch.Tensor  # with padding rows
    vocabulary: int


@dataclass(frozen=True)
class Guides:
    """What a loss looks at beside the logits and the labels of its targets."""

    teachers: tuple = ()  # of TeacherOutput
    places_N: torch.Tensor | None = None  # targets that stand directly before each target, in its answer

    def __bool__(self):
        return bool(self.teachers) or self.places_N is not None


NO_GUIDES = Guides()


def teacher_logits(teachers, chunk, vocabulary):
    """(teachers, C, ids): the logits of the targets in `chunk`, a slice, for the ids that all vocabularies have.

    `vocabulary` is the student's. A tokenizer's ids are below each of them; what is above is padding.
    """
    shared = min(vocabulary, *(teacher.vocabulary for teacher in teachers))
    hidden, columns = [teacher.hidden_ND[chunk] for teacher in teachers], padded_rows(shared)
    logits = hidden[0].new_empty(len(teachers), len(hidden[0]), columns)
    for out, hidden_CD, teacher in zip(logits, hidden, teachers, strict=True):
        torch.mm(hidden_CD, teacher.table_WD[:columns].T, out=out)
    return logits[:, :, :shared]


def seen_ids(labels_N, places_N, chunk, ngram):
    """int64 (C, WINDOW): the different ids that stand within WINDOW tokens before each target of a chunk, else -1.

    With an `ngram` above 1 only those behind the same ngram - 1 tokens as the target: they would write these again.
    """
    rows = torch.arange(len(labels_N), device=labels_N.device)[chunk, None]
    steps, places = torch.arange(1, WINDOW + 1, device=labels_N.device), places_N[chunk, None]
    is_seen = steps <= places
    for back in range(1, ngram):
        alike = _label_at(labels_N, rows - steps - back) == _label_at(labels_N, rows - back)
        is_seen &= alike & (steps + back <= places)
    ids = torch.where(is_seen, _label_at(labels_N, rows - steps).long(), -1).sort(dim=1).values
    ids[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -1)
    return ids


def _label_at(labels_N, rows):
    return labels_N[rows.clamp(min=0)]
