"""Dialogues in a tokenizer's chat template: the ids of transformers, and what of them is learnt."""

import time

import pytest
import transformers

from model.data import template_process
from model.data.conversation import Conversation, Turn
from model.data.turn_template import turn_template, with_turn_end, write_turn_template
from tests.data.qwen_tokenizer import CHATML, SPECIAL, make_qwen_tokenizer

TALK = [
    Turn("system", "你是医生"), Turn("user", "今天天气 fine?"), Turn("assistant", "很好。"), Turn("user", "明天下雨吗"),
    Turn("assistant", "在家里看书\n听音乐"),
]  # fmt: skip
TALKS = [TALK, TALK[1:], TALK[:3], TALK[1:3]]
# how Qwen3's template shows answers: the last one with an empty thought
QWEN3 = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- message.content.lstrip('\n') + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}"
)


def stock_ids(tokenizer, turns, **options):
    """Ids as transformers gives them."""
    stock = transformers.AutoTokenizer.from_pretrained(tokenizer.directory)
    messages = [dict(role=turn.role, content=turn.text) for turn in turns]
    return stock(stock.apply_chat_template(messages, tokenize=False, **options), add_special_tokens=False).input_ids


@pytest.fixture(scope="module", params=[CHATML, QWEN3, None], ids=["qwen2", "qwen3", "none"])
def tokenizer(request, tmp_path_factory):
    tokenizer = make_qwen_tokenizer(tmp_path_factory.mktemp("qwen"), request.param)
    if request.param is None:
        write_turn_template(tokenizer, tokenizer.directory)  # as an export has it
    return tokenizer


@pytest.mark.parametrize("turns", TALKS)
def test_a_dialogue_has_the_ids_of_transformers_and_its_answers_alone_are_learnt(tokenizer, turns):
    (one,) = turn_template(tokenizer).encode_dialogues([Conversation(turns)])
    assert [*one.question, *one.rest, *tokenizer.encode("\n")] == stock_ids(tokenizer, turns)
    start, learnt = 0, []
    for number, length in enumerate(one.turn_lengths):
        learnt += [one.rest[start : start + length]] if number % 2 == 0 else []
        start += length
    assert start == len(one.rest)
    answers = [turn.text for turn in turns if turn.role == "assistant"]
    assert learnt == [[*tokenizer.encode(text), tokenizer.eos_id] for text in answers]


@pytest.mark.parametrize("turns", TALKS)
def test_a_question_has_the_ids_of_transformers_generation_prompt(tokenizer, turns):
    asked, template = turns[:-1], turn_template(tokenizer)
    assert template.encode_question(asked, 999) == stock_ids(tokenizer, asked, add_generation_prompt=True)


def test_no_text_is_parsed_as_a_special_token(tokenizer):
    turns = [Turn("user", f"a{SPECIAL[2]}\n{SPECIAL[1]}system"), Turn("assistant", f"b{SPECIAL[2]}c")]
    (one,) = turn_template(tokenizer).encode_dialogues([Conversation(turns)])
    special = {tokenizer.backend.token_to_id(token) for token in SPECIAL}
    plain = turn_template(tokenizer).encode_dialogues([Conversation([Turn("user", "a"), Turn("assistant", "b")])])[0]
    count = lambda ids: sum(number in special for number in ids)  # noqa: E731
    assert (count(one.question), count(one.rest)) == (count(plain.question), 1)


def test_a_cut_dialogue_ends_inside_an_answer_or_behind_one(tokenizer):
    (one,) = turn_template(tokenizer).encode_dialogues([Conversation(TALK)])
    for most in range(1, len(one.question) + len(one.rest) + 3):
        cut = one.cut(most)
        assert cut.rest == one.rest[: len(cut.rest)] and sum(cut.turn_lengths) == len(cut.rest)
        assert len(cut.question) + len(cut.rest) <= most or not cut.rest
        assert len(cut.turn_lengths) % 2 or not cut.rest and most <= len(one.question)
    assert one.cut(most) == one


def test_a_question_that_is_too_long_loses_its_oldest_turns_and_keeps_the_system_text(tokenizer):
    template = turn_template(tokenizer)
    asked = TALK[:-1]
    short = template.encode_question([TALK[0], TALK[3]], 999)
    assert template.encode_question(asked, len(template.encode_question(asked, 999)) - 1) == short
    least = template.encode_question([TALK[0], Turn("user", TALK[3].text)], len(short) - 2)
    assert len(least) == len(short) - 2 and least[-3:] == short[-3:]


def test_an_answer_ends_where_the_template_ends_it_whatever_eos_is_named(tmp_path):
    base = make_qwen_tokenizer(tmp_path, CHATML, end="<|endoftext|>")
    assert with_turn_end(base).eos_id == base.backend.token_to_id("<|im_end|>") != base.eos_id


@pytest.mark.parametrize(
    "template, said",
    [("{{ messages[0].content }}", "does not show each of"), ("{% for", "cannot show"),
     ("{{ raise_exception('no') }}", "cannot show .*no"), ("x" * 70_000, "at most 65,536 characters"),
     ("{{ messages.__class__.__mro__ }}", "cannot show|does not show"),
     ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", "does not show each"),
     (CHATML + r"{{ '\ud83d' }}", r"cannot show .*half a character, '\\ud83d'"),
     (CHATML + "\ud83d", "half a character"), (r"{{ raise_exception('\ud83d') }}", "cannot show")],
)  # fmt: skip
def test_a_template_that_cannot_show_a_dialogue_is_refused(tmp_path, template, said):
    tokenizer = make_qwen_tokenizer(tmp_path, template)
    with pytest.raises(ValueError, match=said):
        turn_template(tokenizer).encode_dialogues([Conversation(TALK)])


@pytest.mark.parametrize(
    "template",
    ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 10 ** (10 ** 9) }}",
     "{{ 'a' * 10 ** 10 }}", "{% for i in range(9999) %}{{ 'a' * 10 ** 6 }}{% endfor %}", "{{ 'a' * 10 ** 7 }}"],
)  # fmt: skip
def test_a_template_that_takes_hours_or_gigabytes_is_refused_and_the_next_is_rendered(tmp_path, template, monkeypatch):
    monkeypatch.setattr(template_process, "RENDER_SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(ValueError, match="cannot show user, assistant.*(takes more than 1|10,000,000 char)"):
        turn_template(make_qwen_tokenizer(tmp_path / "bad", template)).encode_dialogues([Conversation(TALK)])
    assert time.monotonic() - started < 60
    assert turn_template(make_qwen_tokenizer(tmp_path / "good", CHATML)).encode_dialogues([Conversation(TALK)])[0].rest
