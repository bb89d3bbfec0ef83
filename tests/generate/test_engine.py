import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from model.data.sequences import Sequences
from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.formats.weights import export_model
from model.generate.engine import Engine, Limits, Request, generate
from model.generate.sampling import Sampling
from model.nn.base import Packing
from model.nn.t5.batch import collate
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


def limits(inputs, slots, new_tokens, eos_id=-1):
    return Limits(slots, max(map(len, inputs)), new_tokens, 0, eos_id)


@pytest.fixture
def inputs(store):
    return Pairs().questions(store, list(range(8)))[0]


@pytest.fixture
def varied(model):
    """`model`, whose answers differ: its tied embedding would answer every token with itself."""
    with torch.no_grad():
        for p in model.flat.trained[1:]:
            p.mul_(4)
    return model


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5),
    Sampling(repetition_penalty=1.3, no_repeat_ngram_size=3),
    Sampling(temperature=1.2, seed=6, no_repeat_ngram_size=2),
]


@pytest.mark.parametrize("slots", [1, 3, 8, 20])
def test_an_answer_does_not_depend_on_what_is_answered_beside_it_nor_on_its_slot(varied, inputs, slots):
    engine = Engine(varied, limits(inputs, slots, 40))
    requests = [Request(own, 40 - 4 * i, SAMPLINGS[i % 4], streams=i % 3 == 0) for i, own in enumerate(inputs)]
    numbers, answers, pieces = [engine.add(request) for request in requests], {}, 0
    while not engine.idle:
        for progress in engine.step():
            answers.setdefault(progress.number, []).extend(progress.ids)
            pieces += not progress.is_finished
    assert pieces > 5, "answers that stream come in pieces"
    for number, request in zip(numbers, requests, strict=True):
        alone = generate(varied, [request.input_ids], limits(inputs, 1, 40), request.max_new_tokens, request.sampling)
        assert answers[number] == alone[0] and len(alone[0]) == request.max_new_tokens


def test_each_token_of_a_long_answer_has_the_logits_of_the_packed_network(model, inputs, monkeypatch):
    """The answer outgrows the parts of the cache that its first tokens use."""
    decode_one, decoded = model.decode_one, []
    monkeypatch.setattr(model, "decode_one", lambda *args: decoded.append(decode_one(*args)) or decoded[-1])
    (answer,) = generate(model, inputs[:1], limits(inputs, 1, 150), 150, Sampling(temperature=2, seed=1))
    columns = np.array(inputs[0], np.int64), np.array(answer)
    with torch.inference_mode():
        batch = collate(Sequences(columns, np.array([[len(column) for column in columns]])), Packing(0))
        packed = model.eval().hidden(batch)[0] @ model.output_weight.T
        logits = model.logits(torch.cat(decoded))
    torch.testing.assert_close(logits, packed, rtol=1e-4, atol=1e-4)


def test_a_cancelled_request_frees_its_slot_and_changes_no_other_answer(varied, inputs):
    engine, kept = Engine(varied, limits(inputs, 2, 40)), {}
    numbers = [engine.add(Request(own, 40)) for own in inputs]
    engine.step()
    for number in (numbers[0], numbers[5]):  # one that runs, one that waits
        engine.cancel(number)
    while not engine.idle:
        kept |= {progress.number: progress.ids for progress in engine.step() if progress.is_finished}
    whole = generate(varied, inputs, limits(inputs, 8, 40), 40)
    assert kept == {number: whole[i] for i, number in enumerate(numbers) if i not in (0, 5)}


def test_a_stream_does_not_wait_until_several_slots_are_free(varied, inputs):
    for streams, num_running in ((True, 16), (False, 15)):
        engine = Engine(varied, limits(inputs, 16, 40))
        for i in range(18):  # one of the first 16 is short, two wait
            engine.add(Request(inputs[i % 8], 8 if i == 3 else 40, streams=streams))
        engine.step()
        assert len(engine.running) == 15
        engine.step()
        assert len(engine.running) == num_running


def test_an_answer_ends_at_its_eos_or_at_the_most_tokens(varied, inputs):
    whole = generate(varied, inputs, limits(inputs, 8, 20), 20)
    assert {len(answer) for answer in whole} == {20}
    eos_id = whole[3][5]
    expected = [answer[: answer.index(eos_id)] if eos_id in answer else answer for answer in whole]
    assert generate(varied, inputs, limits(inputs, 3, 20, eos_id), 20) == expected
    assert generate(varied, inputs[:2], limits(inputs, 2, 20), 3) == [answer[:3] for answer in whole[:2]]


def over_fit(model, store, tokenizer):
    optimizer = make_optimizer(model, make_config(learn_rate=0.02))
    micro_batch = batch_of(store, [0], tokenizer.pad_id)
    for _ in range(100):
        loss = model(micro_batch) / len(micro_batch.labels)
        model.zero_grad()
        loss.backward()
        optimizer.update(0.02, torch.ones(()))
    assert loss < 0.05
    return model
