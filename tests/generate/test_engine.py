import json

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.generate.engine import generate
from model.nn.weights_io import export_model
from model.train.evaluate import answer_questions
from model.train.objectives.pairs import Pairs
from model.train.optim import make_optimizer
from tests.parts import PLAN, batch_of, evaluation_of, make_config, make_model, open_pairs, write_parquet


def padding_with_eos(tokenizer, directory):
    """A copy of `tokenizer` in `directory` whose pad token is its EOS, as many have it."""
    copy_tokenizer(tokenizer.directory, directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | dict(pad_token="[EOS]")))
    return load_tokenizer(directory)


@pytest.mark.parametrize("pad", ["[PAD]", "[EOS]"])
def test_generation_of_an_over_fitted_pair_stops_at_eos(tmp_path, tokenizer, pad):
    tokenizer = padding_with_eos(tokenizer, tmp_path / "given") if pad == "[EOS]" else tokenizer
    prompt, response = "今天天气怎么样", "今天天气真好"
    store = open_pairs(
        write_parquet(tmp_path / "one.parquet", [(prompt, response)]), tokenizer, 64, tmp_path / "tokens"
    )
    model = over_fit(make_model(tokenizer.vocab_size), store, tokenizer)
    export_model(model, tokenizer, tmp_path / "best")
    stock, stock_tokenizer = (
        kind.from_pretrained(tmp_path / "best") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    out = stock.generate(**stock_tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)[0].tolist()
    assert out == [tokenizer.pad_id, *tokenizer.encode(response), tokenizer.eos_id]
    assert stock_tokenizer.decode(out, skip_special_tokens=True) == response
    (answer,) = answer_questions(evaluation_of(model, store, tokenizer, num_answers=1), PLAN)
    assert (answer.question, answer.answer, answer.reference) == (prompt, response, response)


def test_questions_answered_together_are_answered_as_each_alone(model, store):
    inputs, _ = Pairs().questions(store, list(range(8)))
    together = generate(model, inputs, 1, 1, 8)
    assert together == [generate(model, [own], 1, 1, 8)[0] for own in inputs]


def test_an_answer_ends_at_its_eos_or_at_the_most_tokens(model, store):
    inputs, _ = Pairs().questions(store, list(range(8)))
    whole = generate(model, inputs, 0, -1, 20)
    assert {len(answer) for answer in whole} == {20}
    eos_id = whole[3][5]
    expected = [answer[: answer.index(eos_id)] if eos_id in answer else answer for answer in whole]
    assert generate(model, inputs, 0, eos_id, 20) == expected
    assert generate(model, inputs[:2], 0, -1, 3) == [answer[:3] for answer in whole[:2]]


def over_fit(model, store, tokenizer):
    optimizer = make_optimizer(model, make_config(learn_rate=0.02))
    micro_batch = batch_of(store, [0], tokenizer.pad_id)
    for _ in range(100):
        loss = model(micro_batch) / len(micro_batch.labels)
        model.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    return model
