"""Training a tokenizer: its alphabet leaves room for merges, and texts are sampled, sliced or too few."""

import pytest
from tokenizers import Tokenizer

from model.data import tokenizer_training
from model.data.tokenizer import (
    NUM_SENTINELS,
    count_merged_tokens,
    load_tokenizer,
)
from model.data.tokenizer_training import first_tokens, train_tokenizer
from tests.data.test_tokenizer import synthetic_texts


def test_at_least_half_of_the_learnt_tokens_are_merges_when_characters_abound(tmp_path):
    train_tokenizer(synthetic_texts(6000, num_characters=2500), 1107, tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    learnt = set(backend.get_vocab()) - {*first_tokens(NUM_SENTINELS)}
    assert len(learnt) == 1107 - 370
    assert sum(len(token) > 1 for token in learnt) >= len(learnt) / 2


def test_at_least_half_of_8000_tokens_are_left_to_merges():
    text = "".join(chr(0x4E00 + n) for n in range(9000))
    assert 8000 - 370 - len(tokenizer_training._alphabet([text], 8000 - 370)) >= 4000


def test_equally_frequent_characters_enter_the_alphabet_in_a_fixed_order():
    text = "".join(chr(0x4E00 + n) for n in range(5000))
    assert tokenizer_training._alphabet([text], 630) == tokenizer_training._alphabet([text[::-1]], 630)


def test_huge_input_is_sampled_uniformly_and_repeatably_with_a_warning(caplog):
    texts = [f"{n:08d}" for n in range(20_000)]
    sample = tokenizer_training._sample_slices(iter(texts), max_symbols=8_000)
    assert 4_000 <= sum(map(len, sample)) <= 8_000
    assert sample == tokenizer_training._sample_slices(iter(texts), max_symbols=8_000)
    assert 8_000 < sum(map(int, sample)) / len(sample) < 12_000
    assert "of 160,000 characters" in caplog.text


def test_long_texts_are_sliced_without_losing_a_character():
    text = "".join(chr(0x4E00 + n) for n in range(5000))
    sample = tokenizer_training._sample_slices([text])
    assert "".join(sample) == text
    assert max(map(len, sample)) <= 512


@pytest.mark.parametrize(("vocab_size", "num_texts"), [(399, 1000), (507, 0), (507, 1)])
def test_training_refuses_too_few_tokens_or_texts(tmp_path, vocab_size, num_texts):
    with pytest.raises(ValueError, match="400"):
        train_tokenizer(["你好"] * num_texts, vocab_size, tmp_path)
    assert not list(tmp_path.iterdir())


def test_there_are_as_many_sentinels_as_asked_for_and_no_text_spells_one(tmp_path):
    for size, limit in ((457, "at least 550"), (1_048_577, "at most 1048576")):
        with pytest.raises(ValueError, match=f"vocab_size is {size}: it must be {limit}"):
            train_tokenizer(synthetic_texts(300, num_characters=10), size, tmp_path, sentinels=250)
    train_tokenizer(synthetic_texts(300, num_characters=10), 607, tmp_path, sentinels=250)
    tokenizer = load_tokenizer(tmp_path)
    ids = [tokenizer.backend.token_to_id(f"<extra_id_{number}>") for number in (0, 249)]
    assert ids == [263, 512] and count_merged_tokens(tokenizer) < 607 - 520
    assert not set(tokenizer.encode("<extra_id_0><extra_id_249>")) & set(ids)
    assert tokenizer.backend.token_to_id("<extra_id_250>") is None
