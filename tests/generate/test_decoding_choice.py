"""Decoding is chosen as its rule says."""

from dataclasses import replace

import pytest

from model.generate.decoding_choice import DRAWN, PENALTY, References, Tried, choose_way, ways_to_try
from model.generate.sampling import GREEDY

LONG = References(median_tokens=60, loops=0.01, ended=1.0)
SHORT = replace(LONG, median_tokens=8)
LOOPS = Tried(GREEDY, loops=0.44, ended=0.81, exact_match=0.1, chrf=14)
WARM = Tried(DRAWN[0], loops=0.01, ended=0.98, exact_match=0.1, chrf=12)
HOT = replace(WARM, sampling=DRAWN[1], chrf=11)
GUARDED = replace(WARM, sampling=replace(DRAWN[0], repetition_penalty=PENALTY))


def test_greedy_decoding_is_tried_first_and_each_way_with_a_penalty_too():
    plain, guarded = ways_to_try(4)
    ways = [*plain, *guarded]
    assert ways[0] == replace(GREEDY, no_repeat_ngram_size=4) and {way.no_repeat_ngram_size for way in ways} == {4}
    assert [way.repetition_penalty for way in ways] == [1.0] * 4 + [PENALTY] * 4


@pytest.mark.parametrize(
    ("tried", "references", "best", "why"),
    [
        ([LOOPS, HOT, WARM], LONG, WARM, "sound"),
        ([LOOPS, replace(WARM, ended=0.9), HOT], LONG, HOT, "sound"),
        ([LOOPS, HOT], replace(LONG, loops=0.5, ended=0.8), LOOPS, "sound"),  # so do the references
        ([WARM, replace(GUARDED, chrf=12.5)], LONG, WARM, "sound"),  # a penalty that hardly helps
        ([WARM, replace(GUARDED, chrf=14)], LONG, replace(GUARDED, chrf=14), "sound"),
        ([LOOPS, replace(WARM, loops=0.1), GUARDED], LONG, GUARDED, "sound"),
        ([LOOPS, replace(WARM, loops=0.3), replace(HOT, loops=0.1)], LONG, replace(HOT, loops=0.1), "least"),
        ([replace(LOOPS, loops=0, ended=1, chrf=5), WARM], SHORT, replace(LOOPS, loops=0, ended=1, chrf=5), "short"),
        ([replace(LOOPS, loops=0, ended=1), replace(WARM, exact_match=0.2)], SHORT, replace(WARM, exact_match=0.2),
         "short"),
        ([LOOPS, WARM], SHORT, WARM, "short"),
    ],
)  # fmt: skip
def test_the_way_is_sound_and_nearest_to_the_references(tried, references, best, why):
    assert choose_way(tried, references) == (best, why)
