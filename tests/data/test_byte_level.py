"""The byte-level kind: transformers reads it as Qwen's, and gives its ids of texts and conversations."""

import json
import unicodedata

import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from model.data.byte_level import CLOSER, OPENER, PAD, SHOWN_MARKS
from model.data.control_tokens import control_ids
from model.data.conversation import Turn
from model.data.tokenizer import load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.data.turn_template import turn_template, with_turn_end, write_turn_template
from tests.data.test_tokenizer import BLANKS, SIGNS, random_strings, synthetic_texts

ODD = [
    "１２３ 4567 3.14 ½ Ⅷ 四", "don't I'LL we've", "naïve nai\u0308ve Å A\u030a", "x  = 1\n\n\tif y:\r\n    z",
    "  lead", "trail  ",
    "👍🏽👨‍👩‍👧🇨🇳", "ｶﾞ か\u3099 각", "السلام عليكم", "नमस्ते", "ไทย", "𠀀𪚥", "a\u0300\u0301\u0302", *BLANKS, *SIGNS,
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    directory = tmp_path_factory.mktemp("byte_level")
    train_tokenizer(synthetic_texts(2000, num_characters=100) + ODD, 900, directory, "byte_level")
    write_turn_template(load_tokenizer(directory), directory)
    return load_tokenizer(directory)


def test_transformers_reads_it_as_qwens_and_gives_equal_ids_of_1000_odd_texts(byte_level):
    theirs = AutoTokenizer.from_pretrained(byte_level.directory)
    assert isinstance(theirs, Qwen2Tokenizer) and len(theirs) == byte_level.vocab_size == 900
    assert (theirs.eos_token, theirs.pad_token) == (CLOSER, PAD) and theirs.bos_token is None
    texts = [*ODD, *random_strings(1000 - len(ODD))]
    texts = [text for text in texts if not any(mark in text for mark in (PAD, OPENER, CLOSER, *SHOWN_MARKS))]
    ours = byte_level.encode_batch(texts)
    assert len(texts) > 950 and [theirs(text).input_ids for text in texts] == ours
    assert [theirs.decode(ids) for ids in ours] == list(map(byte_level.decode, ours))


def test_a_text_is_decoded_as_it_was_in_composed_form(byte_level):
    for text in [*ODD, *random_strings(200, seed=1)]:
        assert byte_level.decode(byte_level.encode(text)) == unicodedata.normalize("NFC", text)


def test_its_marks_are_one_token_each_and_no_text_gives_one(byte_level):
    marks = {byte_level.backend.token_to_id(mark): mark for mark in (PAD, OPENER, CLOSER, *SHOWN_MARKS)}
    assert sorted(marks) == list(range(891, 900)) and control_ids(byte_level.backend) == set(marks)
    for number, mark in marks.items():
        assert byte_level.parse(mark) == [number] and byte_level.decode(byte_level.encode(mark)) == mark
        assert number not in byte_level.encode(mark)
    assert byte_level.decode(list(marks)) == "".join(SHOWN_MARKS), "special ones are left out"


def test_a_conversation_is_that_of_transformers_template(byte_level):
    theirs = AutoTokenizer.from_pretrained(byte_level.directory)
    said = [("system", "简短"), ("user", "1+1?"), ("assistant", "2"), ("user", "为什么")]
    messages = [dict(role=role, content=text) for role, text in said]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert turn_template(byte_level).encode_question([Turn(*turn) for turn in said], 500) == ids
    assert theirs.decode(ids).endswith("为什么<|im_end|>\n<|im_start|>assistant\n")
    assert with_turn_end(byte_level).eos_id == byte_level.backend.token_to_id(CLOSER)


def test_equal_texts_give_an_equal_tokenizer(byte_level, tmp_path):
    train_tokenizer(synthetic_texts(2000, num_characters=100) + ODD, 900, tmp_path, "byte_level")
    files = [json.loads((path / "tokenizer.json").read_text()) for path in (byte_level.directory, tmp_path)]
    assert files[0] == files[1]
