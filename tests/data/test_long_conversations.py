"""A conversation that is too long loses its oldest turns, one by one in effect and all at once in time."""

import random
import time
from itertools import chain

import pytest

from model.data.conversation import Conversation, Turn
from model.data.t5_text import encode_conversation, marks_of
from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.data.turn_template import turn_template
from tests.data.qwen_tokenizer import CHATML, make_qwen_tokenizer
from tests.data.test_turn_template import QWEN3

# it shows what is said before the last question without thoughts, and greets at every eighth turn: not a sum of turns
UNEVEN = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if loop.revindex0 < 2 %}{{ 'think ' * 9 }}"
    "{%- endif %}{%- if loop.index % 8 == 0 %}{{ 'hello ' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def talk(draw, most_turns=24):
    """A conversation as people have them: a system text or none, then turns that alternate, the user's last."""
    texts = ["".join(draw.choices(PROBE, k=draw.choice((1, 3, 9, 30)))) for _ in range(draw.randrange(most_turns))]
    roles = ("user", "assistant")
    said = [Turn(roles[place % 2], text) for place, text in enumerate(reversed(texts), 1)][::-1]
    return [Turn("system", "医生")] * draw.randrange(2) + said + [Turn("user", "天气" * draw.randrange(1, 4))]


def dropped_one_by_one(turns, encode, max_tokens):
    """Ids of the longest end of the conversation that fits, its oldest question going first with its answer."""
    system, said = [t for t in turns if t.role == "system"], [t for t in turns if t.role != "system"]
    while len(ids := encode([*system, *said])) > max_tokens and len(said) > 1:
        said = said[2 if said[1].role == "assistant" and len(said) > 2 else 1 :]
    return ids if len(ids) <= max_tokens else None


@pytest.mark.parametrize("template", [CHATML, QWEN3, UNEVEN, None], ids=["qwen2", "qwen3", "uneven", "none"])
def test_a_template_s_conversation_is_cut_as_if_its_oldest_turns_were_dropped_one_by_one(tmp_path, template):
    chat, draw, num_cut = turn_template(make_qwen_tokenizer(tmp_path, template)), random.Random(0), 0
    for _ in range(60):
        turns, most = talk(draw), draw.randrange(30, 250)
        expected = dropped_one_by_one(turns, lambda turns: chat.encode_question(turns, 10**6), most)
        if expected is not None:
            ids = chat.encode_question(turns, most)
            assert ids == expected, (turns, most)
            num_cut += ids != chat.encode_question(turns, 10**6)
    assert num_cut > 10


STRICT = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{%- endif %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize("num_turns", [7, 8, 9])
def test_a_dialogue_of_too_many_turns_is_learnt_from_a_question_on(tmp_path, monkeypatch, num_turns):
    monkeypatch.setattr("model.data.turn_template.MAX_TURNS", 4)
    chat = turn_template(make_qwen_tokenizer(tmp_path, STRICT))
    said = [Turn(("user", "assistant")[place % 2], str(place)) for place in range(num_turns)]
    newest = said[-4:] if num_turns % 2 == 0 else said[-3:]
    long, short = chat.encode_dialogues([Conversation(said), Conversation(newest)])
    assert long == short and long


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marks")
    train_tokenizer([PROBE] * 3, 500, folder)
    return load_tokenizer(folder)


def test_a_conversation_in_marks_keeps_the_newest_turns_that_fit(marks):
    openers, draw = marks_of(marks).openers, random.Random(1)
    for _ in range(100):
        turns, most = talk(draw, 150), draw.randrange(20, 400)
        texts = marks.encode_batch([turn.text for turn in turns])
        ids = [[*openers[turn.role], *text] for turn, text in zip(turns, texts, strict=True)]
        num_system = int(turns[0].role == "system")
        while sum(map(len, ids)) > most - 1 and len(ids) > num_system:
            del ids[num_system]
        if len(ids) > 1:
            assert encode_conversation(turns, marks, most) == [*chain(*ids), marks.eos_id]


def test_ten_thousand_turns_are_read_within_a_second(tmp_path, marks):
    qwen = turn_template(make_qwen_tokenizer(tmp_path))
    turns = [Turn(("user", "assistant")[place % 2], "天") for place in range(10_001)]
    for encode in (qwen.encode_question, lambda turns, most: encode_conversation(turns, marks, most)):
        encode(turns[:1], 1024)  # starts the process that renders
        started = time.monotonic()
        ids = encode(turns, 1024)
        assert time.monotonic() - started < 1 and 1000 < len(ids) <= 1024
