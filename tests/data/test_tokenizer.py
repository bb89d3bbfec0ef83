"""The ids of a trained tokenizer, loading and copying tokenizers, and what loading refuses."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, T5Config

from model.data.tokenizer import (
    BYTE_TOKENS,
    MODE_TOKENS,
    NUM_SENTINELS,
    PROBE,
    ROLE_MARKS,
    SPECIAL_TOKENS,
    copy_tokenizer,
    load_tokenizer,
)
from model.data.tokenizer_training import first_tokens, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TRAPS = [
    "<extra_id_0>",
    "<extra_id_42>",
    "<|user|>",
    "<|end|>",
    "[S2S]",
    "[EOS]",
    "[PAD]",
    "[UNK]",
    "<0x41>",
    "<0xE4><0xBD><0xA0>",
    "</s>",
    "<pad>",
    "[",
    "<0x",
    "▁",
    "Ġ",
]
BLANKS = ["", " ", "  ", "\n", "\r\n", "\t", "\u3000", "\u00a0", "\u200b", "\u2028", "\x85", "\x00", "\x1b", "\x7f"]
SIGNS = ["👨‍👩‍👧", "1️⃣", "🇨🇳", "é", "e\u0301", "ﷺ", "𠀀", "\ue000", "\ufeff", "\ufffd", "\U0010ffff", "，", "……"]
SCRIPTS = [(0x20, 0x7E), (0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x400, 0x4FF), (0x600, 0x6FF)]
SCRIPTS += [(0x900, 0x97F), (0xE00, 0xE7F), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0, 0x1F), (0x80, 0x10FFFF)]


def synthetic_texts(num_texts, num_characters, seed=0):
    """Sentences of words with frequencies like those of a language, over characters that include the probe's."""
    draw = random.Random(seed)
    characters = sorted(set(PROBE)) + [chr(0x5000 + 7 * n) for n in range(num_characters)]
    words = ["hello", "GPU", " ", "12"] + ["".join(draw.choices(characters, k=draw.randint(1, 3))) for _ in range(1500)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    return ["".join(draw.choices(words, weights, k=12)) + "，好吗？" for _ in range(num_texts)]


def texts_with_traps():
    return [*synthetic_texts(4000, num_characters=100), *TRAPS * 300]


def random_strings(num_strings, seed=0):
    draw = random.Random(seed)

    def piece():
        if draw.random() < 0.3:
            return draw.choice(TRAPS + BLANKS + SIGNS)
        first, last = draw.choice(SCRIPTS)
        points = [draw.randint(first, last) for _ in range(draw.randint(1, 8))]
        return "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)

    return ["".join(piece() for _ in range(draw.randint(0, 8))) for _ in range(num_strings)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts_with_traps(), 1107, directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def other_backend(specials=("[PAD]", "[UNK]", "[BOS]", "[EOS]"), vocab_size=800, **options):
    backend = Tokenizer(models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(specials), show_progress=False, **options)
    backend.train_from_iterator(synthetic_texts(1000, num_characters=100), trainer)
    return backend


def save_other(directory, backend, **settings):
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"pad_token": "[PAD]", "eos_token": "[EOS]"} | settings
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def test_special_then_byte_then_reserved_tokens_have_the_first_ids(tokenizer):
    sentinels = [f"<extra_id_{number}>" for number in range(100)]
    tokens = [*SPECIAL_TOKENS, *BYTE_TOKENS, *sentinels, *ROLE_MARKS, *MODE_TOKENS]
    expected = {token: token_id for token_id, token in enumerate(tokens)}
    vocabulary = tokenizer.backend.get_vocab()
    assert {token: vocabulary[token] for token in expected} == expected
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 1107)


def test_decoding_the_ids_of_any_unicode_text_gives_the_text(tokenizer):
    texts = random_strings(10_000) + TRAPS + BLANKS + SIGNS
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert min(ids, default=7) >= len(SPECIAL_TOKENS)
        assert not any(263 <= token_id < 370 for token_id in ids), "no text reaches a reserved token"


def test_decoding_the_ids_of_a_very_long_run_gives_the_run(tokenizer):
    for text in ("哈" * 300_000, "a" * 300_000, " " * 300_000, "！" * 300_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_merge_joins_two_kinds_of_characters(tokenizer):
    learnt = set(tokenizer.backend.get_vocab()) - {*first_tokens(NUM_SENTINELS)}
    assert "hello" in learnt
    for token in learnt:
        kinds = {"word" if char.isascii() and char.isalpha() else "Han" if char.isalpha() else char for char in token}
        assert len(token) == 1 or kinds == {"word"} or kinds == {"Han"} or kinds <= set("，？/")


def test_encode_adds_nothing_and_equals_encode_batch(tokenizer):
    texts = synthetic_texts(50, num_characters=100, seed=1)
    assert [tokenizer.encode(text) for text in texts] == tokenizer.encode_batch(texts)
    assert all(tokenizer.eos_id not in ids for ids in tokenizer.encode_batch(texts))


def test_decode_leaves_special_tokens_out(tokenizer):
    assert tokenizer.decode([tokenizer.pad_id, *tokenizer.encode("你好"), tokenizer.eos_id, 0, 0]) == "你好"


def test_a_lone_surrogate_is_refused_in_encoding_and_ignored_in_training(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud83d")
    train_tokenizer(["\ud83d" + text for text in synthetic_texts(500, num_characters=100)], 707, tmp_path)
    load_tokenizer(tmp_path)


def test_equal_texts_give_an_equal_tokenizer(directory, tmp_path):
    train_tokenizer(texts_with_traps(), 1107, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_auto_tokenizer_gives_the_same_ids_and_adds_one_eos(directory, tokenizer, tmp_path, beside_a_model):
    copy_tokenizer(directory, tmp_path)
    if beside_a_model:
        T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = random_strings(1000, seed=2) + TRAPS + synthetic_texts(100, num_characters=100, seed=3)
    expected = tokenizer.encode_batch(texts)
    assert hf_tokenizer(texts, add_special_tokens=False)["input_ids"] == expected
    assert hf_tokenizer(texts)["input_ids"] == [[*ids, tokenizer.eos_id] for ids in expected]
    assert hf_tokenizer.batch_decode(expected, skip_special_tokens=True) == texts
    assert (len(hf_tokenizer), hf_tokenizer.pad_token_id, hf_tokenizer.eos_token_id) == (tokenizer.vocab_size, 0, 1)
    assert set(hf_tokenizer("你好")) == {"input_ids", "attention_mask"}


def test_the_fingerprint_stays_the_same_when_transformers_saves_again(directory, tokenizer, tmp_path):
    hf_tokenizer = AutoTokenizer.from_pretrained(directory)
    hf_tokenizer("你好", max_length=4, truncation=True, padding="max_length")
    hf_tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert len(again.encode("你好吗" * 9)) == len(tokenizer.encode("你好吗" * 9)) > 4


def test_the_fingerprint_differs_for_another_tokenizer_of_the_same_size(tokenizer, tmp_path):
    train_tokenizer(synthetic_texts(4000, num_characters=100, seed=5), 1107, tmp_path)
    other = load_tokenizer(tmp_path)
    assert other.vocab_size == tokenizer.vocab_size
    assert other.fingerprint != tokenizer.fingerprint


def test_a_copy_has_the_same_bytes_and_fingerprint(directory, tokenizer, tmp_path):
    copy_tokenizer(directory, tmp_path / "best")
    copy_tokenizer(tmp_path / "best", tmp_path / "best")
    assert (tmp_path / "best/tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert load_tokenizer(tmp_path / "best").fingerprint == tokenizer.fingerprint


def test_a_tokenizer_from_elsewhere_keeps_its_ids(tmp_path):
    backend = other_backend()
    backend.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(save_other(tmp_path, backend, eos_token={"content": "[EOS]"}))
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 3, backend.get_vocab_size())
    ids = tokenizer.encode(PROBE + "[EOS]")
    assert len(ids) > 4 and not {0, 2, 3} & set(ids)
    assert tokenizer.decode([*tokenizer.encode("今天"), 3]) == "今天"


def test_eos_and_pad_may_be_named_in_special_tokens_map(tmp_path):
    save_other(tmp_path, other_backend(("<pad>", "</s>", "[UNK]")), pad_token=None, eos_token=None)
    named = {"pad_token": "<pad>", "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)


def test_an_eos_that_is_an_ordinary_token_is_left_out_of_decoded_text(tmp_path):
    backend = other_backend()
    state = json.loads(backend.to_str()) | {"added_tokens": []}
    tokenizer = load_tokenizer(save_other(tmp_path, Tokenizer.from_str(json.dumps(state))))
    assert tokenizer.decode([*tokenizer.encode("今天"), tokenizer.eos_id]) == "今天"


def test_vocab_size_is_above_the_highest_id_even_if_ids_have_gaps(tmp_path):
    state = json.loads(other_backend().to_str())
    state["model"]["vocab"]["gap"] = 5000
    tokenizer = load_tokenizer(save_other(tmp_path, Tokenizer.from_str(json.dumps(state))))
    assert tokenizer.vocab_size == 5001


def test_a_directory_without_a_tokenizer_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(ValueError, match="scripts/train_tokenizer.py"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "version https://git-lfs.github.com/spec/v1", "{}", '{"model": {"vocab": {}}', '{"model": []}'],
)
def test_a_file_without_a_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path)


def test_an_oversized_file_is_refused_without_reading_it(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ValueError, match="67,108,865 bytes"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_below_300_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 250 tokens"):
        load_tokenizer(save_other(tmp_path, other_backend(vocab_size=250)))


@pytest.mark.parametrize("settings", [{"eos_token": None}, {"pad_token": None}, {"eos_token": "<nowhere>"}])
def test_a_tokenizer_without_eos_or_pad_is_refused(tmp_path, settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is"):
        load_tokenizer(save_other(tmp_path, other_backend(), **settings))


@pytest.mark.parametrize("unk_token", ["[UNK]", None])
def test_a_tokenizer_that_loses_chinese_is_refused(tmp_path, unk_token):
    state = json.loads(other_backend().to_str())
    words = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", *(chr(0x400 + n) for n in range(500))]
    state["model"] |= {"vocab": {word: n for n, word in enumerate(words)}, "merges": [], "unk_token": unk_token}
    with pytest.raises(ValueError, match="loses 100%"):
        load_tokenizer(save_other(tmp_path, Tokenizer.from_str(json.dumps(state))))


def test_a_tokenizer_that_needs_custom_code_is_refused(tmp_path):
    with pytest.raises(ValueError, match="auto_map"):
        load_tokenizer(save_other(tmp_path, other_backend(), auto_map={"AutoTokenizer": ["own.Own", None]}))


def test_loading_imports_neither_transformers_nor_torch(directory):
    code = (
        "import sys; from model.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, directory], cwd=ROOT, check=True)


def test_reserved_tokens_are_found_by_name_and_left_out_of_decoded_text(tokenizer, directory):
    first, mark = tokenizer.backend.token_to_id("<extra_id_0>"), tokenizer.backend.token_to_id("<|assistant|>")
    assert (first, mark) == (263, 365)
    assert tokenizer.decode([first, *tokenizer.encode("你好"), mark]) == "你好"
    stock = AutoTokenizer.from_pretrained(directory)
    assert stock.convert_tokens_to_ids("<extra_id_99>") == tokenizer.backend.token_to_id("<extra_id_99>") == 362
    assert stock("<extra_id_0>[NLU]", add_special_tokens=False).input_ids == tokenizer.encode("<extra_id_0>[NLU]")
    assert stock.decode([first, *tokenizer.encode("你好"), mark], skip_special_tokens=True) == "你好"


def test_a_tokenizer_without_reserved_tokens_stays_valid():
    older = load_tokenizer(ROOT / "tests" / "golden" / "tokenizer")
    assert older.vocab_size == 400 and older.decode(older.encode("今天天气真好")) == "今天天气真好"
    assert older.backend.token_to_id("<extra_id_0>") is None
