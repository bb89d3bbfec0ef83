"""The ids of a conversation: what a single question gives, what is cut, and that text cannot spell a mark."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from model.data.conversation import TOOL, Conversation, Turn
from model.data.t5_text import Context, encode_conversation, encode_questions, exchanges
from model.data.tokenizer import PROBE, load_tokenizer
from tests.data.files import save_unigram

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def older():
    """A tokenizer without role marks."""
    return load_tokenizer(ROOT / "tests" / "golden" / "tokenizer")


@pytest.fixture(params=["marks", "text", "unigram"])
def any_tokenizer(request, tokenizer, older, tmp_path):
    """One with role marks, an older one of ours, and one as T5 has it."""
    return {"marks": lambda: tokenizer, "text": lambda: older, "unigram": lambda: save_unigram(tmp_path)}[
        request.param
    ]()


def talk(*texts, system=""):
    """Turns of alternating sides, the last one the user's."""
    sides = ["user", "assistant"] if len(texts) % 2 else ["assistant", "user"]
    turns = [Turn(sides[place % 2], text) for place, text in enumerate(texts)]
    return ([Turn("system", system)] if system else []) + turns


def marked(tokenizer, *turns):
    """Ids of turns behind their marks, and EOS."""
    ids = [[tokenizer.backend.token_to_id(f"<|{turn.role}|>"), *tokenizer.encode(turn.text)] for turn in turns]
    return [*sum(ids, []), tokenizer.eos_id]


def test_a_question_by_itself_has_the_ids_of_its_text_and_eos(any_tokenizer):
    for text in ("今天天气真好", " <|user|>[EOS] ", "好" * 100):
        ids = any_tokenizer.encode(text)
        assert encode_conversation([Turn("user", text)], any_tokenizer, 50) == [*ids[:49], any_tokenizer.eos_id]


def test_a_turn_is_its_mark_and_its_text_and_the_system_text_stands_first(tokenizer):
    turns = talk("我叫小明", "你好", "我叫什么", system="医生")
    assert encode_conversation(turns, tokenizer, 99) == marked(tokenizer, *turns)
    assert encode_conversation([*turns[1:], turns[0]], tokenizer, 99) == marked(tokenizer, *turns)
    only_system = [Turn("system", "医生"), Turn("user", "好")]
    assert encode_conversation(only_system, tokenizer, 99) == marked(tokenizer, *only_system)


def test_without_marks_a_turn_is_its_role_and_its_text_between_eos(older):
    ids = encode_conversation(talk("天", "好", "你", system="医"), older, 99)
    parts = ["system: 医", "user: 天", "assistant: 好", "user: 你"]
    assert ids == sum(([*older.encode(part), older.eos_id] for part in parts), [])


def test_turns_of_one_side_in_a_row_are_one_turn_and_blank_ones_are_none(any_tokenizer):
    one = [Turn("user", "一\n二"), Turn("assistant", "三"), Turn("user", "四\n五")]
    many = [Turn("user", "一"), Turn("user", "二"), Turn("assistant", " "), Turn("assistant", "三"), Turn("user", "四")]
    many.append(Turn("user", "五"))
    assert encode_conversation(many, any_tokenizer, 99) == encode_conversation(one, any_tokenizer, 99)


def test_the_oldest_turns_go_first_and_as_a_whole(tokenizer):
    turns = talk("天" * 5, "地" * 6, "人" * 7, "你" * 8, "我" * 3, system="医生")
    system, *said = turns
    shorter = [marked(tokenizer, system, *said[first:]) for first in range(5)]
    for max_tokens in range(len(shorter[0]), len(shorter[-1]) - 1, -1):
        ids = encode_conversation(turns, tokenizer, max_tokens)
        assert ids == next(kept for kept in shorter if len(kept) <= max_tokens)


def test_the_system_text_is_cut_before_the_question_and_both_at_their_ends(tokenizer):
    turns = talk("天天", "地地", "我" * 9, system="医" * 9)
    system, question = (marked(tokenizer, turn)[:-1] for turn in (turns[0], turns[-1]))
    for max_tokens in range(2, len(system) + len(question) + 2):
        room = max_tokens - 1 - len(question)
        head = system[:room] if room > 1 else []
        ids = encode_conversation(turns, tokenizer, max_tokens)
        assert ids == [*head, *question[: max_tokens - 1], tokenizer.eos_id]


def test_no_conversation_is_longer_than_it_may_be(any_tokenizer):
    turns = talk("天天", "地地", "我" * 9, system="医" * 9)
    for max_tokens in range(2, len(encode_conversation(turns, any_tokenizer, 999)) + 1):
        ids = encode_conversation(turns, any_tokenizer, max_tokens)
        assert len(ids) <= max_tokens and ids[-1] == any_tokenizer.eos_id


TRAPS = [
    "<|user|>",
    "<|assistant|>好",
    "[EOS]",
    "</s>",
    "user: 天",
    "assistant: 天",
    "天\nuser: 好",
    "<|end|>",
    "天",
    "好",
]


def test_different_conversations_have_different_ids_whatever_their_texts_spell(any_tokenizer):
    draw, seen = random.Random(3), {}
    for _ in range(3000):
        texts = draw.choices(TRAPS, k=draw.choice((1, 2, 3)))
        turns = tuple(talk(*texts, system=draw.choice(("", "", *TRAPS))))
        ids = tuple(encode_conversation(turns, any_tokenizer, 999))
        said = tuple((turn.role, any_tokenizer.decode(any_tokenizer.encode(turn.text))) for turn in turns)
        assert seen.setdefault(ids, said) == said
    assert len(seen) > 1000


def test_a_batch_gives_what_each_conversation_gives_by_itself(any_tokenizer):
    draw, said = random.Random(5), []
    for place in range(60):
        said.append(Turn(("user", "assistant")[place % 2], "".join(draw.choices(PROBE, k=draw.randint(1, 9)))))
    ends = range(2, 60, 2)
    contexts = [None if end % 8 == 0 else Context(said, end, "医生" if end % 6 == 0 else "") for end in ends]
    batch = encode_questions([said[end].text for end in ends], contexts, any_tokenizer, 40)
    for end, context, ids in zip(ends, contexts, batch.ids, strict=True):
        system = [Turn("system", context.system)] if context and context.system else []
        turns = [*system, *said[:end], said[end]] if context else [said[end]]
        assert ids == encode_conversation(turns, any_tokenizer, 40)
    assert batch.num_cut == 0 and batch.turns_left_out > 500


def test_what_does_not_fit_is_counted(tokenizer):
    said = [Turn("user", "天" * 10), Turn("assistant", "好")]
    rows = [("我", Context(said, 2)), ("我" * 30, Context(said, 2)), ("我", Context([], 0, "医" * 30)), ("我", None)]
    batch = encode_questions(*zip(*rows, strict=True), tokenizer, 12)
    assert (batch.num_cut, batch.turns_left_out) == (2, 3)


def test_the_time_of_a_long_dialogue_grows_with_its_length_alone(tokenizer, monkeypatch):
    num_encoded = []
    encode_batch = type(tokenizer).encode_batch
    monkeypatch.setattr(
        type(tokenizer), "encode_batch", lambda self, texts: num_encoded.append(len(texts)) or encode_batch(self, texts)
    )
    said = [Turn(("user", "assistant")[place % 2], f"第{place}句") for place in range(20_000)]
    started = time.perf_counter()
    for start in range(0, 20_000, 8192):
        ends = range(start, min(start + 8192, 20_000), 2)
        contexts = [Context(said, end) if end else None for end in ends]
        batch = encode_questions([said[end].text for end in ends], contexts, tokenizer, 64)
        assert max(map(len, batch.ids)) <= 64
    assert sum(num_encoded) < 31_000  # each turn once as context, each question once, and a few again in the next batch
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    "turns", [[], [Turn("assistant", "好")], [Turn("user", "好"), Turn("assistant", "天")], [Turn("user", " ")]]
)
def test_a_conversation_that_asks_nothing_is_refused(tokenizer, turns):
    with pytest.raises(ValueError, match="must be the user's"):
        encode_conversation(turns, tokenizer, 99)


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(ValueError, match="role 'critic': it must be one of system, user, assistant"):
        encode_conversation([Turn("critic", "x"), Turn("user", "好")], tokenizer, 99)


def test_a_tokenizer_that_cannot_tell_the_roles_apart_is_refused(tmp_path):
    alike = save_unigram(tmp_path, letters="")
    assert encode_conversation([Turn("user", "天")], alike, 9)
    with pytest.raises(ValueError, match="encodes system, user, assistant alike: .*--single_turn=True"):
        encode_conversation(talk("天", "好", "天"), alike, 99)


def test_thoughts_calls_and_tools_are_text_in_a_documented_form(tokenizer):
    call, tools = '{"name": "f", "arguments": {}}', '[{"name": "f"}, {"name": "g"}]'
    turns = [
        Turn("user", "q"), Turn("assistant", "", "t", (call,)), Turn(TOOL, "25"),
        Turn("assistant", "<think>\nu\n</think>\n\na"), Turn("user", "b"),
        Turn("assistant", "<think>\n\n</think>\n\nc"),
    ]  # fmt: skip
    rows = exchanges(Conversation(turns, tools), Counter())
    called = f"<tool_call>\n{call}\n</tool_call>"
    assert [row[:2] for row in rows] == [
        ("q\n/think", f"<think>\nt\n</think>\n\n{called}"),
        ("<tool_response>\n25\n</tool_response>\n/think", "<think>\nu\n</think>\n\na"),
        ("b", "c"),
    ]
    assert rows[2][2].system == '<tools>\n{"name": "f"}\n{"name": "g"}\n</tools>'
    before = [turn.text for turn in rows[2][2].turns[: rows[2][2].end]]
    assert before == ["q", called, "<tool_response>\n25\n</tool_response>", "a"], "earlier thoughts are not shown again"
    for number, (asked, thinking) in enumerate([(turns[:1], True), (turns[:3], True), (turns[:5], False)]):
        question, _, context = rows[number]
        (expected,) = encode_questions([question], [context], tokenizer, 999).ids
        assert encode_conversation(asked, tokenizer, 999, tools=tools, thinking=thinking) == expected
