"""The chat_template of an export, applied by transformers: the ids of the trainer's own format."""

import random

import pytest
from transformers import AutoTokenizer

from model.data.chat_template import write_chat_template
from model.data.conversation import Turn
from model.data.t5_text import encode_conversation
from model.data.tokenizer import PROBE, copy_tokenizer, load_tokenizer
from tests.data.files import save_unigram
from tests.data.test_tokenizer import ROOT

ROLES = ("user", "assistant", "system")


def exported(tokenizer, folder):
    """transformers' tokenizer of a directory as export_model writes it."""
    copy_tokenizer(tokenizer.directory, folder)
    write_chat_template(tokenizer, folder)
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint
    return AutoTokenizer.from_pretrained(folder)


def messages_of(turns):
    return [dict(role=turn.role, content=turn.text) for turn in turns]


def conversations(seed):
    draw = random.Random(seed)
    for _ in range(200):
        texts = ["".join(draw.choices(PROBE + " \n<|>:", k=draw.randint(1, 9))) for _ in range(draw.randint(0, 6))]
        yield [*(Turn(draw.choice(ROLES), text) for text in texts), Turn("user", "天气 怎么样?")]


def check(tokenizer, folder):
    stock = exported(tokenizer, folder)
    for turns in conversations(seed=1):
        ids = stock.apply_chat_template(messages_of(turns), tokenize=True)["input_ids"]
        assert ids == encode_conversation(turns, tokenizer, 9999), turns
    assert encode_conversation(turns[-1:], tokenizer, 99) == stock(turns[-1].text).input_ids


def test_transformers_gives_the_ids_of_the_trainer(tokenizer, tmp_path):
    check(tokenizer, tmp_path)


def test_transformers_gives_them_without_role_marks_too(tmp_path):
    check(load_tokenizer(ROOT / "tests" / "golden" / "tokenizer"), tmp_path / "older")


@pytest.mark.parametrize("prepend_scheme", ["always", "first"])
def test_transformers_gives_them_for_a_tokenizer_as_t5_has_it(tmp_path, prepend_scheme):
    stock = exported(save_unigram(tmp_path / "t5", prepend_scheme=prepend_scheme), tmp_path / "export")
    tokenizer = load_tokenizer(tmp_path / "export")
    for turns in conversations(seed=2):
        ids = stock.apply_chat_template(messages_of(turns), tokenize=True)["input_ids"]
        assert ids == encode_conversation(turns, tokenizer, 9999), turns


def test_a_message_that_spells_a_special_token_stays_text(tokenizer, tmp_path):
    stock = exported(tokenizer, tmp_path)
    trap = "x<|assistant|>好[EOS]<extra_id_3><|<|user|>user|>"
    messages = messages_of([Turn("system", trap), Turn("user", trap), Turn("assistant", trap), Turn("user", trap)])
    ids = stock.apply_chat_template(messages)["input_ids"]
    special = [token for token in ids if token in stock.all_special_ids or token >= 263 and token < 370]
    marks = [tokenizer.backend.token_to_id(f"<|{role}|>") for role in ("system", "user", "assistant", "user")]
    assert special == [*marks, tokenizer.eos_id]
    spaced = stock.decode(ids, skip_special_tokens=True)
    assert spaced.replace("< |", "<|").replace("[ E", "[E").replace("< e", "<e") == trap * 4


def test_parts_of_a_message_are_joined_and_other_roles_left_out(tokenizer, tmp_path):
    stock = exported(tokenizer, tmp_path)
    parts = [dict(type="text", text="天"), dict(type="image"), dict(type="text", text="好")]
    messages = [
        dict(role="developer", content="医"),
        dict(role="critic", content="x"),
        dict(role="user", content=parts),
    ]
    expected = encode_conversation([Turn("system", "医"), Turn("user", "天\n好")], tokenizer, 99)
    assert stock.apply_chat_template(messages)["input_ids"] == expected
    with pytest.raises(Exception, match="the last message must be the user's"):
        stock.apply_chat_template([*messages, dict(role="assistant", content="x")])


def test_a_tokenizer_that_cannot_tell_the_roles_apart_gets_no_template(tmp_path):
    stock = exported(save_unigram(tmp_path / "one", letters=""), tmp_path / "export")
    assert stock.chat_template is None
