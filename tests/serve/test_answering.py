"""A model is loaded to answer with its own settings; a prompt holds what was said before, or is refused."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from model.data.answer_parts import CALL, THOUGHT
from model.data.conversation import Turn, tidy
from model.data.t5_text import encode_conversation
from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.generate.sampling import Sampling
from model.nn.t5.sizes import T5ModelConfig
from model.serve.answering import TextStream, answer_all, load_chat_model, prompt_ids
from tests.knowing import PAIRS, write_knowing_model
from tests.turns import MIN_SHARE, NUM_TESTED, made_up, shares_right, talk, train


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "best"
    write_knowing_model(folder)
    values = dict(do_sample=True, temperature=0.5, top_p=0.9, no_repeat_ngram_size=4, max_new_tokens=99)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return load_chat_model(folder.parent)


def test_the_settings_are_those_of_the_generation_config(chat):
    assert chat.sampling == Sampling(temperature=0.5, top_k=50, top_p=0.9, no_repeat_ngram_size=4)
    assert chat.max_new_tokens == 99


def test_weights_are_held_once_for_answering(chat):
    assert not len(chat.model.flat.masters) and not any(p.requires_grad for p in chat.model.parameters())


def test_questions_are_answered_together(chat):
    inputs = [prompt_ids(chat, [("user", question)], 64) for question in PAIRS]
    assert answer_all(chat, inputs, Sampling(), 64, slots=2) == list(PAIRS.values())


def test_a_prompt_holds_what_was_said_before_and_loses_its_oldest_turns(chat):
    said = [("system", "好"), ("user", "你好"), ("assistant", "好 " * 30), ("user", "hello")]
    turns = [Turn(role, text.strip()) for role, text in said]
    assert prompt_ids(chat, said, 500) == encode_conversation(turns, chat.tokenizer, 500)
    short = prompt_ids(chat, said, 20)
    assert len(short) <= 20 and short == encode_conversation([turns[0], turns[-1]], chat.tokenizer, 20)


def test_turns_that_are_too_old_to_be_read_change_nothing_in_a_prompt(chat):
    draw = np.random.default_rng(0)
    for most_tokens in (20, 60):
        for roles in (["system"], ["user", "assistant"], ["system", "user", "assistant", "assistant"]):
            texts = ["天" * size for size in draw.integers(0, 40, 200)]
            said = [(str(draw.choice(roles)), text) for text in texts] + [("assistant", "好"), ("user", "天好")]
            turns = tidy(Turn(role, text) for role, text in said)
            cut = [Turn(turn.role, turn.text[-16 * most_tokens :]) for turn in turns]
            assert prompt_ids(chat, said, most_tokens) == encode_conversation(cut, chat.tokenizer, most_tokens)


def test_the_most_that_a_request_may_hold_is_read_within_a_second(chat):
    sides = dict(user="天" * 130, system="天" * 130, assistant="好" * 130)
    for roles in (["system"], ["assistant"], ["user", "assistant"], ["system", "user", "assistant"]):
        turns = [(roles[place % len(roles)], sides[roles[place % len(roles)]]) for place in range(9_999)]
        started = time.process_time()
        assert len(prompt_ids(chat, [*turns, ("user", "好")], 512)) <= 512
        assert time.process_time() - started < 0.5
    with pytest.raises(ValueError, match="the question has 1,309,999 characters"):
        prompt_ids(chat, [("user", sides["user"])] * 10_000, 512)


@pytest.mark.parametrize(
    "text, words", [(" \n", "is empty"), ("字" * 2000, "2,000 characters"), ("字天" * 12, "more than 15 tokens")]
)
def test_a_question_that_cannot_be_read_is_refused_with_the_reason(chat, text, words):
    with pytest.raises(ValueError, match=words):
        prompt_ids(chat, [("user", text)], 16)


def test_text_comes_in_whole_characters_however_the_ids_are_divided(chat):
    valid = chat.tokenizer.encode("龘龘🐱👍好 how")
    stream = TextStream(chat.tokenizer)
    pieces = [stream.add([one]) for one in valid]
    assert "".join(pieces) == "龘龘🐱👍好 how" and not any("\ufffd" in piece for piece in pieces)
    draw = np.random.default_rng(0)
    for _ in range(50):  # mostly bytes that are no characters
        ids = draw.integers(7, 300, 40).tolist()
        cuts = sorted(draw.integers(0, 40, 5))
        whole, divided = TextStream(chat.tokenizer), TextStream(chat.tokenizer)
        parts = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, 40], strict=True)]
        assert whole.add(ids) == "".join(map(divided.add, parts))
        cuts = sorted(draw.integers(0, len(valid), 5))
        parts = [valid[start:end] for start, end in zip([0, *cuts], [*cuts, len(valid)], strict=True)]
        assert "".join(map(TextStream(chat.tokenizer).add, parts)) == chat.tokenizer.decode(valid)


def test_an_answer_that_is_cut_amid_a_character_keeps_all_before_it():
    def decode(ids):  # each token ends with a part of the next character
        return "".join("今天气"[one] for one in ids) + "\ufffd" * bool(ids)

    stream = TextStream(SimpleNamespace(decode=decode))
    assert [stream.add([place], is_last=place == 2) for place in range(3)] == ["", "", "今天气"]


@pytest.mark.parametrize("special", [True, False])
def test_the_marks_of_thoughts_and_calls_come_as_text_special_or_not(chat, tmp_path, special):
    backend = Tokenizer.from_file(str(chat.directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in (*THOUGHT, *CALL)])
    copy_tokenizer(chat.directory, tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = '<think>\n好 a\n</think>\n\n你好\n<tool_call>\n{"name": "f"}\n</tool_call>'
    ids = [*tokenizer.parse(text), tokenizer.eos_id]
    stream = TextStream(tokenizer)
    assert "".join(stream.add([one]) for one in ids) == tokenizer.decode(ids) == text


def test_a_network_with_so_many_places_is_not_given_more(chat, monkeypatch):
    assert chat.prompt_tokens(2048, 30) == 2048
    monkeypatch.setattr(T5ModelConfig, "max_tokens", 40)
    assert (chat.prompt_tokens(2048, 30), chat.prompt_tokens(8, 30)) == (10, 8)
    with pytest.raises(ValueError, match="max_new_tokens=40: this model has 40 places"):
        chat.prompt_tokens(2048, 40)
    assert chat.limits(1, 10, 30).new_tokens == 30
    with pytest.raises(ValueError, match="reads 10 tokens .* lower --max_prompt_tokens or --max_new_tokens"):
        chat.limits(1, 11, 30)


def test_conversations_of_three_turns_use_the_earlier_turns(tmp_path):
    chat = load_chat_model(train(tmp_path, num_dialogues=800, epochs=3), "cpu")
    tested = made_up(NUM_TESTED, 2, True)
    share, alone = shares_right(chat, tested, talk(chat, tested))
    assert share >= MIN_SHARE
    assert alone <= 0.25  # the last question by itself does not say the answer
