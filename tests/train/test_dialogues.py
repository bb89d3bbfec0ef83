"""The objective for networks that read whole dialogues: rows to examples, and which tokens are learnt."""

import json

import numpy as np
import pytest
import torch

from model.data.conversation import Conversation, Turn
from model.data.token_store import Source, open_store
from model.data.turn_template import TurnTemplate, turn_template
from model.formats.weights import export_model
from model.generate.sampling import GREEDY
from model.nn.decoder.family import DECODER
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.serve.answering import answer_all, load_chat_model, prompt_ids
from model.train.examples import Examples
from model.train.objectives.dialogues import Dialogues
from model.train.objectives.pairs import Pairs
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.parts import gradients_of

SAID = [("天气好吗", "很好"), ("明天呢", "下雨"), ("怎么办", "在家看书")]
ROWS = [
    dict(messages=[dict(role="system", content="你是医生")] + [
        dict(role=role, content=text) for pair in SAID for role, text in zip(("user", "assistant"), pair, strict=True)
    ]),
    dict(prompt="你好", response="你好！"),
    dict(prompt="还有呢", response="没有", history=[["你好", "你好！"]]),
    dict(prompt="问题", response=""),
    dict(prompt="太长" * 60, response="是"),
    dict(prompt="请问", response="读书听音乐" * 30),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


def examples_of(tokenizer, folder, max_tokens=100, **options):
    objective = Dialogues(turn_template(tokenizer).text, max_tokens, **options)
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    store = open_store(Source((path,), objective, tokenizer, max_tokens), folder / "tokens")
    return Examples(store, objective, DECODER, tokenizer.pad_id)


def learnt_texts(examples, tokenizer, row):
    sequences = examples.sequences([row], 1)
    ids, is_target = sequences.columns[1], sequences.is_target
    edges = np.flatnonzero(np.diff(is_target.astype(int))) + 1
    parts = zip(np.split(ids, edges), np.split(is_target, edges), strict=True)
    return [
        tokenizer.backend.decode(part.tolist(), skip_special_tokens=False) for part, is_learnt in parts if is_learnt[0]
    ]


def test_a_dialogue_is_one_example_whose_answers_are_learnt(tokenizer, tmp_path):
    examples = examples_of(tokenizer, tmp_path)
    learnt = [learnt_texts(examples, tokenizer, row) for row in range(len(examples))]
    assert learnt[0] == [answer + "<|im_end|>" for _, answer in SAID]
    assert learnt[1] == ["你好！<|im_end|>", "没有<|im_end|>"], "rows that follow from one another are one dialogue"
    assert len(learnt) == 3 and "读书听音乐".startswith(learnt[2][0][:3]), "the last one is cut"
    lengths = examples.lengths(np.arange(3), 1)
    assert lengths[2].sum() == 100 and (lengths.sum(axis=1) <= 100).all()
    assert examples.store.meta["empty"] == 2
    weights = examples.weights(np.arange(3), 1)[0][0]
    assert weights == sum(examples.sequences([row], 1).is_target.sum() for row in range(3))


def test_each_answer_is_learnt_once_and_what_must_not_be_learnt_is_context(tokenizer, tmp_path):
    user, assistant = dict(role="user", content="天气"), dict(role="assistant", content="很好")
    rows = [
        [assistant, user, dict(role="assistant", content="下雨")],
        [user, assistant, dict(role="assistant", content="下雨"), user, assistant],
        [user, assistant | dict(weight=0), user, dict(role="assistant", content="下雨")],
        [user, assistant | dict(content=None, tool_calls=[dict(name="f")]), dict(role="tool", content="1"), assistant],
        [user, assistant, dict(role="system", content="你是医生"), user, assistant],
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(dict(messages=row)) + "\n" for row in rows))
    objective = Dialogues(turn_template(tokenizer).text, 100)
    store = open_store(Source((path,), objective, tokenizer, 100), tmp_path / "tokens")
    examples = Examples(store, objective, DECODER, tokenizer.pad_id)
    learnt = [[text.removesuffix("<|im_end|>") for text in learnt_texts(examples, tokenizer, row)] for row in range(5)]
    assert learnt == [["下雨"], ["很好", "下雨", "很好"], ["下雨"], ["很好"], ["很好", "很好"]]
    first, rest = (tokenizer.backend.decode(ids.tolist()) for ids in store.tokens(np.array([4]))[:2])
    assert "医生" not in first and rest.index("很好") < rest.index("医生"), "a system text stands where it was said"
    assert "calls of tools (1 time)" in store.meta["ignored"]


def test_a_template_that_shows_system_texts_only_first_has_them_there_and_it_is_counted(tokenizer, tmp_path):
    is_amid = "messages[1:] | selectattr('role', 'equalto', 'system') | list"
    strict = f"{{% if {is_amid} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    template = TurnTemplate(tokenizer, strict + turn_template(tokenizer).text)
    said = [("user", "天气"), ("assistant", "很好"), ("system", "医生"), ("user", "明天"), ("assistant", "下雨")]
    turns = [Turn(*turn) for turn in said]
    moved, first = template.encode_dialogues([Conversation(turns), Conversation([turns[2], *turns[:2], *turns[3:]])])
    assert (moved.systems_moved, first.systems_moved) == (1, 0) and moved.question == first.question


def test_with_single_turn_each_question_is_a_dialogue(tokenizer, tmp_path):
    examples = examples_of(tokenizer, tmp_path, single_turn=True)
    assert [learnt_texts(examples, tokenizer, row) for row in range(5)] == [
        [text + "<|im_end|>"] for text in ("很好", "下雨", "在家看书", "你好！", "没有")
    ]


def test_the_gradient_is_the_same_packed_and_one_by_one(tokenizer, tmp_path):
    examples = examples_of(tokenizer, tmp_path)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model = DecoderModel(DecoderModelConfig(**sizes, vocab_size=tokenizer.vocab_size)).initialise(0)
    for ids in ([0, 1, 2], [0], [1], [2]):
        examples.objective.losses(model, examples.batch(np.array(ids), 1), 16)[0].backward()
        if len(ids) == 3:
            together = gradients_of(model)
            model.zero_grad()
    for name, gradient in gradients_of(model).items():
        assert (gradient - together[name]).norm() <= 1e-5 * together[name].norm(), name


def test_pairs_with_nothing_before_them_are_counted(tokenizer, tmp_path):
    together, alone = (
        examples_of(tokenizer, tmp_path / str(single_turn), single_turn=single_turn) for single_turn in (False, True)
    )
    for examples, expected in ((together, 1), (alone, len(alone))):  # of the whole dialogues, one is a single pair
        assert examples.store.meta["single_pairs"] == expected
    path = tmp_path / "False" / "rows.jsonl"
    store = open_store(Source((path,), Pairs(), tokenizer, 1000), tmp_path / "tokens")
    assert (store.meta["single_pairs"], store.meta["rows"]) == (3, 7)


def test_the_bounds_of_lengths_hold_and_respect_the_most_tokens(tokenizer, tmp_path):
    examples = examples_of(tokenizer, tmp_path)
    assert (examples.bounds == examples.lengths(np.arange(3), 1)).all()
    assert examples.objective.length_bounds(np.full((1, 3), 100)).sum() == 101


def test_an_exported_model_talks_in_its_template_in_chat_and_in_transformers(tokenizer, tmp_path):
    import transformers

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = DecoderModelConfig(**sizes, vocab_size=tokenizer.vocab_size, initializer_range=0.3)
    export_model(DecoderModel(config).initialise(0), tokenizer, tmp_path / "best", dict(max_new_tokens=8))
    chat = load_chat_model(tmp_path / "best")
    turns = [("system", "你是医生"), ("user", SAID[0][0]), ("assistant", SAID[0][1]), ("user", SAID[1][0])]
    ids = prompt_ids(chat, turns, 500)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "best")
    messages = [dict(role=role, content=text) for role, text in turns]
    asked = stock.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert asked.input_ids[0].tolist() == ids
    amid = [*turns[1:3], turns[0], turns[3]]
    messages = [dict(role=role, content=text) for role, text in amid]
    shown = stock.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt_ids(chat, amid, 500) == shown, "a system text stands where it was said, as in training"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    out = theirs.generate(**asked, do_sample=False, max_new_tokens=8)[0, len(ids) :]
    assert answer_all(chat, [ids], GREEDY, 8) == [stock.decode(out, skip_special_tokens=True)]
    assert theirs.generation_config.eos_token_id == chat.tokenizer.eos_id == tokenizer.backend.token_to_id("<|im_end|>")
    short = prompt_ids(chat, turns, len(ids) - 1)
    assert short == turn_template(chat.tokenizer).encode_question([Turn(*turns[0]), Turn(*turns[-1])], 999)
    with pytest.raises(ValueError, match="the question has more than"):
        prompt_ids(chat, [("user", "长" * 300)], 100)
    assert torch.isfinite(theirs(**asked).logits).all()
