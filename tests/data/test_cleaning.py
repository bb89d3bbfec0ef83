"""Pairs of text made clean: what is taken out of them, and the reasons why one is of no use."""

import random

import pytest

from model.data.cleaning import clean_pair, clean_text


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("\u3000\u3000第一\xa0段\t完\r\n第二\u2028三\r四 ", "第一 段 完\n第二\n三\n四"),
        ("\ufeff零\u200b宽\u200e\x07\x1b\u00ad\u2060", "零宽"),
        ("缩进\n    code", "缩进\n    code"),
        ("👩\u200d⚕️ 👨\u200d👩\u200d👧 ❤️\u200d🔥 👍🏽 1️⃣", "👩\u200d⚕️ 👨\u200d👩\u200d👧 ❤️\u200d🔥 👍🏽 1️⃣"),
        ("🤦\u200d️", "🤦"),
        ("桥👧\u200d 字\u200d字 \u200d👧 字\ufe0f", "桥👧 字字 👧 字"),
        ("字\ufe0f\u200d👧", "字👧"),
        ("\u200b \ufeff\n", ""),
    ],
)
def test_cleaning_removes_what_shows_nothing_and_keeps_emoji_whole(dirty, clean):
    assert clean_text(dirty) == clean
    assert clean_text(clean) == clean


def test_cleaning_twice_is_cleaning_once():
    rng = random.Random(3)
    alphabet = "a字 \n\t\r\0\u200b\u200d\ufe0f\ufeff\u2028\u3000👩⚕❤🏽1"
    for _ in range(3000):
        once = clean_text("".join(rng.choices(alphabet, k=8)))
        assert clean_text(once) == once


@pytest.mark.parametrize(
    ("prompt", "response", "outcome"),
    [
        (" q\u200b", "a\r\n", ("q", "a")),
        ("\u3000", "", "empty prompt"),
        ("q", "\u200b\n", "empty response"),
        ("q\ufffd", "a", "damaged text"),
        ("q", "李\ue844", "private use"),
        ("q", "\U000f0001", "private use"),
        ("q" * 11, "a", "too long"),
        ("q" * 10, "a" * 10 + " ", ("q" * 10, "a" * 10)),
    ],
)
def test_a_pair_is_cleaned_or_gets_the_reason_why_not(prompt, response, outcome):
    assert clean_pair(prompt, response, max_chars=10) == outcome
