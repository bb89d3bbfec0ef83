import pytest
import torch

from model.nn.philox import philox

# kat_vectors of Random123 (Salmon et al.): (rounds, counter, key, words)
KNOWN = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(words):
    return [torch.tensor(int(word, 16)) for word in words.split()]


@pytest.mark.parametrize("rounds, counter, key, words", KNOWN)
def test_the_words_are_those_of_the_reference_implementation(rounds, counter, key, words):
    assert philox(numbers(counter), numbers(key), rounds) == tuple(numbers(words))


def test_counters_broadcast_against_each_other():
    columns, rows = torch.arange(3)[None, :], torch.arange(4)[:, None]
    words = philox((columns, rows, rows, rows), (5, 6))
    for row in range(4):
        for column in range(3):
            alone = philox([torch.tensor(n) for n in (column, row, row, row)], (5, 6))
            assert [int(word[row, column]) for word in words] == [int(word) for word in alone]
