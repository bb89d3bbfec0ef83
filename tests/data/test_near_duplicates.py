import random

import pytest

from model.data.near_duplicates import SHINGLE_CHARS, SIMILARITY, Signatures

pytest.importorskip("rensa")
WORDS = [chr(code) for code in range(0x4E00, 0x4E00 + 2000)]


def text_of(seed, length=120):
    return "".join(random.Random(seed).choices(WORDS, k=length))


def shared(one, other):
    """The Jaccard similarity of two texts' pieces."""
    sides = [{text[n : n + SHINGLE_CHARS] for n in range(len(text) - SHINGLE_CHARS + 1)} for text in (one, other)]
    return len(sides[0] & sides[1]) / len(sides[0] | sides[1])


def found_in(texts, batch=7):
    signatures = Signatures()
    for start in range(0, len(texts), batch):
        signatures.add(texts[start : start + batch])
    found, partner = signatures.near_duplicates()
    return found.tolist(), partner.tolist()


def test_a_text_with_one_character_changed_is_found_with_its_partner_and_others_are_not():
    texts = [text_of(n) for n in range(100)]
    changed = [texts[n][:60] + "变" + texts[n][61:] for n in range(0, 100, 5)]
    assert all(shared(one, texts[n]) >= 0.9 for one, n in zip(changed, range(0, 100, 5), strict=True))
    found, partner = found_in(texts + changed)
    assert found == [False] * 100 + [True] * 20
    assert partner[100:] == list(range(0, 100, 5))


def test_a_text_that_shares_half_is_not_found():
    texts = [text_of(n) for n in range(50)]
    halves = [text[:80] + text_of(n + 1000, 40) for n, text in enumerate(texts)]
    assert 0.4 < shared(halves[0], texts[0]) < SIMILARITY - 0.2
    assert not any(found_in(texts + halves)[0])


def test_equal_short_and_empty_texts_are_found_and_bad_characters_do_no_harm():
    found, partner = found_in(["好", "", "\ud83d", "好", "", "你好"])
    assert (found, partner[3:5]) == ([False, False, False, True, True, False], [0, 1])


def test_no_texts_have_no_duplicates():
    assert found_in([]) == ([], [])
