"""Which way of choosing tokens suits a model: what is tried, and a rule over what was measured of each.

The rule, on answers to validation questions:

1. Of all ways those are sound in which at most MOST_LOOPS of the answers loop and at least LEAST_ENDED end by
   themselves; or no more than of the references, where these do worse. Without a sound way those with the least excess
   are left.
2. A penalty is left out unless the best way without one has less than PENALTY_GAIN chrF less, or is not left.
3. Where half of the references have at most SHORT_TOKENS, greedy decoding is taken if no way has more exact matches,
   else the one with most. Otherwise the way with the highest chrF is taken.
"""

from dataclasses import dataclass, replace

from model.generate.sampling import GREEDY, Sampling

MOST_LOOPS, LEAST_ENDED = 0.02, 0.97
SHORT_TOKENS = 20  # of a reference
PENALTY, PENALTY_GAIN = 1.1, 1.0
TOP_K = 50  # of a draw: as many as transformers draws from by default; of all tokens a draw takes longer
DRAWN = (
    Sampling(temperature=0.7, top_k=TOP_K, top_p=0.95),
    Sampling(temperature=0.85, top_k=TOP_K, top_p=0.95),
    Sampling(temperature=1.0, top_k=TOP_K, min_p=0.1),
)


@dataclass(frozen=True)
class References:
    """What the right answers are like."""

    median_tokens: float
    loops: float  # share in which a run of tokens stands three times
    ended: float  # share that an answer has enough tokens for


@dataclass(frozen=True)
class Tried:
    """What answers were like with a Sampling; shares from 0 to 1, chrF from 0 to 100."""

    sampling: Sampling
    loops: float
    ended: float
    exact_match: float
    chrf: float


def ways_to_try(guard: int = 0) -> tuple[list[Sampling], list[Sampling]]:
    """The ways that are tried, without and with a penalty, greedy first; `guard`: their no_repeat_ngram_size."""
    plain = [replace(way, no_repeat_ngram_size=guard) for way in (GREEDY, *DRAWN)]
    return plain, [replace(way, repetition_penalty=PENALTY) for way in plain]


def choose_way(tried: list[Tried], references: References) -> tuple[Tried, str]:
    """(the Tried that the rule above takes, of at least one, why: `sound`, `short` or, if none is sound, `least`)."""
    least = min(_excess(one, references) for one in tried)
    left = [one for one in tried if _excess(one, references) == least]
    plain = [one for one in left if one.sampling.repetition_penalty == 1]
    highest = max(one.chrf for one in left)
    if plain and max(one.chrf for one in plain) > highest - PENALTY_GAIN:
        left = plain
    if references.median_tokens > SHORT_TOKENS:
        return max(left, key=lambda one: one.chrf), "least" if least else "sound"
    return max(left, key=lambda one: (one.exact_match, not one.sampling.temperature, one.chrf)), "short"


def _excess(one: Tried, references: References) -> float:
    """By how much these answers loop more often than is sound, and end less often; 0 if they are sound."""
    loops = one.loops - max(MOST_LOOPS, references.loops)
    unended = min(LEAST_ENDED, references.ended) - one.ended
    return max(loops, 0.0) + max(unended, 0.0)
