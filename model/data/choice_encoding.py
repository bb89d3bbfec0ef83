"""Questions with choices as token ids: what a network reads, and what it chooses among."""

from collections import Counter
from dataclasses import dataclass, field
from os.path import commonprefix

import numpy as np

from model.data.choice_files import LETTERS, Style, Subject
from model.data.tokenizer import ChatTokenizer

MAX_PROMPT_TOKENS = 2048  # as CMMLU's and MMLU's publications have it; examples that do not fit are left out


@dataclass(frozen=True)
class AskedChoices:
    """What the network reads for each question, then ids that all choices begin with, then one for each choice."""

    contexts: list[np.ndarray]  # int64 (tokens,) each
    prefixes: list[list[int]]  # empty for most tokenizers
    candidates: np.ndarray  # int64 (questions, choices)
    counts: Counter = field(default_factory=Counter)  # questions with "fewer" examples, and "cut" ones

    @property
    def lengths(self):
        """Tokens of what is read and of what is predicted, int64 (questions, 2)."""
        return np.array([[len(c), len(p) + 1] for c, p in zip(self.contexts, self.prefixes, strict=True)])


@dataclass(frozen=True)
class QuestionReader:
    """How a network reads a question."""

    tokenizer: ChatTokenizer
    reads_on: bool  # it goes on with the text; else it reads it to its EOS, and answers
    max_tokens: int
    prefix: str = ""  # a T5's, before each question

    def encode(self, texts):
        """Ids of each text, an EOS at its end if that ends it."""
        end = [] if self.reads_on else [self.tokenizer.eos_id]
        return [[*ids, *end] for ids in self.tokenizer.encode_batch([self.prefix + text for text in texts])]


def encode_choices(subjects: list[Subject], num_shots: int, reader: QuestionReader) -> AskedChoices:
    """The AskedChoices of all questions, in their order.

    A question that has more tokens than `reader.max_tokens` is asked with fewer examples, and at last loses its
    beginning. Raises ValueError if the tokenizer does not tell the letters apart.
    """
    contexts, prefixes, candidates, counts = [], [], [], Counter()
    letters = {subject.style: letter_ids(subject.style, reader) for subject in subjects}
    for subject in subjects:
        contexts += _contexts(subject, num_shots, reader, counts)
        prefix, ids = letters[subject.style]
        prefixes += [prefix] * len(subject.questions)
        candidates += [ids] * len(subject.questions)
    return AskedChoices(contexts, prefixes, np.array(candidates, np.int64), counts)


def _contexts(subject, num_shots, reader, counts):
    """What is read for each question of a subject, arrays of ids."""
    found, left = {}, list(range(len(subject.questions)))
    for shots in range(num_shots, -1, -1):
        rows = reader.encode([subject.prompt(subject.questions[place], shots) for place in left])
        fits = [len(ids) <= reader.max_tokens or not shots for ids in rows]
        found |= {place: ids for place, ids, ok in zip(left, rows, fits, strict=True) if ok}
        left = [place for place, ok in zip(left, fits, strict=True) if not ok]
        counts["fewer"] += len(left) if shots == num_shots else 0
        if not left:
            break
    counts["cut"] += sum(len(ids) > reader.max_tokens for ids in found.values())
    return [np.array(found[place][-reader.max_tokens :], np.int64) for place in sorted(found)]


def letter_ids(style: Style, reader: QuestionReader) -> tuple[list[int], list[int]]:
    """(ids that the letters of all answers begin with, the id of each that tells it from the others).

    Of a decoder they are the ids behind the last line of a prompt, which go on with it.
    """
    encode, before = reader.tokenizer.encode, style.after if reader.reads_on else ""
    start = len(encode(before)) if before else 0
    answers = [encode(before + style.space + letter)[start:] for letter in LETTERS]
    prefix = commonprefix(answers)
    ids = [answer[len(prefix)] for answer in answers if len(answer) > len(prefix)]
    if len(set(ids)) < len(LETTERS):
        raise ValueError(
            f"the tokenizer in {reader.tokenizer.directory} does not tell the answers {', '.join(LETTERS)} apart "
            f"behind {style.after!r}: choose a model whose tokenizer has these letters"
        )
    return prefix, ids
