"""Figures of answers are what people would count."""

import itertools
import random

import pytest

from model.generate.answer_quality import Answer, common_length, distinct_2, measures, repeats, rouge_l, words_of


def test_a_loop_is_a_run_that_stands_three_times():
    assert repeats([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 4], 4)
    assert not repeats([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3], 4)
    assert repeats([7] * 6, 4) and not repeats([7] * 5, 4), "runs may overlap"
    assert repeats("1+1等于1+1等于1+1等于1+1等于", 8) and not repeats("1+1等于1+1等于1+1等于", 8)
    assert not repeats([], 4) and not repeats("", 8)


def test_words_are_those_of_latin_text_and_the_characters_of_chinese_text():
    assert words_of("Hello, World-2! 你好，世界a1 ça") == ["hello", "world", "2", "你", "好", "世", "界", "a1", "ça"]


def test_the_common_length_is_that_of_the_longest_common_subsequence():
    def longest(one, other):
        if not one or not other:
            return 0
        if one[-1] == other[-1]:
            return 1 + longest(one[:-1], other[:-1])
        return max(longest(one[:-1], other), longest(one, other[:-1]))

    draw = random.Random(0)
    for sizes in itertools.product((0, 1, 5, 7), repeat=2):
        one, other = (draw.choices("abc", k=size) for size in sizes)
        assert common_length(one, other) == longest(one, other)


# rouge-score 0.1.2: RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure
@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("the cat sat on the mat", "The cat is on the mat.", 10 / 12),
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("a b c", "x y", 0.0),
        ("", "x", 0.0),
    ],
)
def test_rouge_l_is_that_of_rouge_score(answer, reference, score):
    assert rouge_l(answer, reference) == pytest.approx(score)


def test_rouge_l_of_chinese_goes_by_characters():
    assert rouge_l("今天天气很好。", "今天天气真好") == pytest.approx(2 * 5 / 12)


def test_distinct_2_is_the_share_of_different_pairs_of_words():
    assert distinct_2(["你好你好", "a b"]) == 3 / 4
    assert distinct_2(["", "a"]) == 0.0


def test_the_figures_of_answers():
    looped = Answer(3, "q", "1+1等于1+1等于1+1等于1+1等于", "等于2。", True, False)
    good = Answer(5, "q", " 等于2。\n", "等于2。", False, True, True)
    figures = measures([looped, good])
    names = ("loops", "loops_chars", "reference_loops", "ended", "exact_match")
    assert {name: figures[name] for name in names} == dict.fromkeys(names, 0.5)
    assert figures["length_ratio"] == (20 + 6) / 8
    assert figures["rouge_l"] == pytest.approx((2 * 2 / (16 + 3) + 1) / 2)
