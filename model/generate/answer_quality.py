"""What people notice in answers, as numbers: repetition, endings, length, variety, agreement with the references.

Everything is counted from the answers themselves, so figures of all ranks together are those of one.
"""

import re
from collections import Counter
from dataclasses import dataclass

LOOP_TOKENS, LOOP_CHARACTERS, LOOP_TIMES = 4, 8, 3  # so long a run that stands so often is a loop
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\W_{IDEOGRAPHS}]+")


@dataclass(frozen=True)
class Answer:
    """An answer beside the right one."""

    row: int  # of the examples
    question: str
    answer: str
    reference: str
    loops: bool  # among its tokens
    ended: bool  # by itself, not because it had max_new_tokens
    reference_loops: bool = False


def repeats(items, size) -> bool:
    """Whether a run of `size` neighbours in `items`, token ids or a text, stands LOOP_TIMES times."""
    runs = Counter(zip(*(items[start:] for start in range(size)), strict=False))
    return any(count >= LOOP_TIMES for count in runs.values())


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation; of Chinese each character is one."""
    return WORD.findall(text.lower())


def common_length(one, other) -> int:
    """Length of the longest common subsequence of two lists (bit-parallel: Crochemore et al. 2001, Hyyrö 2004)."""
    places, every = {}, (1 << len(one)) - 1
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    row = every  # a zero bit for each word of `one` with which the subsequence grows
    for word in other:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & every
    return len(one) - row.bit_count()


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004; as the package rouge-score has it), 0 to 1."""
    one, other = words_of(answer), words_of(reference)
    common = common_length(one, other)
    return 2 * common / (len(one) + len(other)) if common else 0.0


def distinct_2(texts) -> float:
    """The share of different pairs among all pairs of neighbouring words (Li et al. 2016); 0 where there is none."""
    pairs = [pair for words in map(words_of, texts) for pair in zip(words, words[1:], strict=False)]
    return len(set(pairs)) / max(len(pairs), 1)


def measures(answers: list[Answer]) -> dict[str, float]:
    """Figures of at least one Answer; shares and ROUGE-L from 0 to 1.

    loops, loops_chars: answers in which 4 tokens, or 8 characters, stand three times; reference_loops: the references
    with such tokens; ended: answers that ended by themselves; length_ratio: characters of all answers to those of all
    references; exact_match: answers that are the reference but for space around them.
    """
    pairs = [(each.answer, each.reference) for each in answers]
    flags = dict(
        loops=[each.loops for each in answers],
        loops_chars=[repeats(answer, LOOP_CHARACTERS) for answer, _ in pairs],
        reference_loops=[each.reference_loops for each in answers],
        ended=[each.ended for each in answers],
        exact_match=[answer.strip() == reference.strip() for answer, reference in pairs],
        rouge_l=[rouge_l(*pair) for pair in pairs],
    )
    lengths = (sum(map(len, side)) for side in zip(*pairs, strict=True))
    ratio = next(lengths) / max(next(lengths), 1)
    means = {name: sum(values) / len(answers) for name, values in flags.items()}
    return means | dict(length_ratio=ratio, distinct_2=distinct_2(answer for answer, _ in pairs))
