"""Questions as people see them: without the marks of any format."""

import pytest

from model.data.conversation import Turn
from model.data.shown_questions import shown_questions
from model.data.t5_text import encode_conversation
from model.data.turn_template import turn_template
from tests.data.chat_templates import LLAMA_MARKS, MARKS, TEMPLATES
from tests.data.qwen_tokenizer import make_qwen_tokenizer

TALK = [
    Turn("system", "你是医生"),
    Turn("user", "今天天气怎么样"),
    Turn("assistant", "很好。"),
    Turn("user", "user\n明天"),
]
SAID = [turn.text for turn in TALK]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_question_of_a_decoder_is_shown_without_what_its_template_writes(name, tmp_path):
    marks = dict(special=LLAMA_MARKS, end="<|eot_id|>") if name == "llama3" else dict(marks=MARKS)
    tokenizer = make_qwen_tokenizer(tmp_path, TEMPLATES[name], **marks)
    ids = turn_template(tokenizer).encode_question(TALK, 999)
    assert shown_questions(tokenizer, [ids]) == ["\n".join(SAID)]


def test_a_question_of_a_t5_is_shown_without_its_marks_and_a_single_one_as_it_is(tokenizer):
    rows = [encode_conversation(turns, tokenizer, 999) for turns in (TALK, [Turn("user", "user\n明天")])]
    assert shown_questions(tokenizer, rows) == ["\n".join(SAID), SAID[-1]]
