"""Generation one token at a time gives what transformers' generate and the packed network give."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from model.generate import engine
from model.generate.engine import Limits, generate
from model.generate.sampling import GREEDY, Sampling
from tests.parts import batch_of, examples_of, make_model
from tests.stock import as_hugging_face

PROMPTS, NEW = 1000, 40  # prompts with each penalty; tokens of an answer, at most


def hf_answers(hf_model, inputs, pad_id, eos_id, **penalties):
    ids = torch.full((len(inputs), max(map(len, inputs))), pad_id)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(inputs):
        ids[row, : len(own)], mask[row, : len(own)] = torch.as_tensor(own), 1
    out = hf_model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **penalties)
    out = out[:, 1:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in out]


def two_best(hf_model, input_ids, decoded, penalties):
    """The two best logits, after the penalties, of transformers' next token after the ids `decoded`."""
    ids = torch.tensor([decoded])
    scores = hf_model(torch.as_tensor(input_ids)[None], decoder_input_ids=ids).logits[:, -1]
    if penalty := penalties.get("repetition_penalty"):
        scores = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    if size := penalties.get("no_repeat_ngram_size"):
        scores = logits_process.NoRepeatNGramLogitsProcessor(size)(ids, scores)
    return scores[0].topk(2)


@torch.no_grad()
def check_answers(hf_model, tokenizer, inputs, ours, penalties):
    """How many answers leave transformers', which they may where its two best logits are within 1e-4; others fail."""
    theirs, ties = hf_answers(hf_model, inputs, tokenizer.pad_id, tokenizer.eos_id, **penalties), 0
    for own, *both in zip(inputs, ours, theirs, strict=True):
        own_ids, their_ids = ([*answer, tokenizer.eos_id] for answer in both)
        if own_ids == their_ids:
            continue
        place = next(i for i, pair in enumerate(zip(own_ids, their_ids, strict=False)) if pair[0] != pair[1])
        best = two_best(hf_model, own, [tokenizer.pad_id, *their_ids[:place]], penalties)
        assert {own_ids[place], their_ids[place]} == set(best.indices.tolist()), (own, both)
        assert best.values[0] - best.values[1] <= 1e-4, (own, both)
        ties += 1
    return ties


@pytest.mark.parametrize(
    "seed, penalties, has_screen",
    [(1, {}, True), (1, {}, False), (2, dict(repetition_penalty=1.3), True), (3, dict(no_repeat_ngram_size=2), True),
     (4, dict(repetition_penalty=0.8, no_repeat_ngram_size=3), True), (5, dict(no_repeat_ngram_size=1), True)],
)  # fmt: skip
def test_promise_1_greedy_answers_are_those_of_transformers(tokenizer, monkeypatch, seed, penalties, has_screen):
    monkeypatch.setattr(engine, "screens", lambda model: has_screen)
    model, draw = make_model(tokenizer.vocab_size, seed), np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.flat.trained[1:]:  # all but the tied embedding, which would answer every token with itself
            p.mul_(4)
    inputs = [draw.integers(7, tokenizer.vocab_size, draw.integers(1, 40)) for _ in range(PROMPTS)]
    limits = Limits(70, 40, NEW, tokenizer.pad_id, tokenizer.eos_id)
    ours = generate(model, inputs, limits, NEW, Sampling(**penalties) if penalties else GREEDY)
    assert check_answers(as_hugging_face(model, tokenizer), tokenizer, inputs, ours, penalties) <= PROMPTS / 50
    assert len(set(map(tuple, ours))) > PROMPTS / 3, "answers that are all alike prove nothing"


def test_the_logits_of_each_step_are_those_of_the_packed_network(model, store, tokenizer):
    ids = [3, 0, 41, 17]
    prompts, responses = zip(*examples_of(store, ids), strict=True)
    hidden, _ = model.hidden(batch_of(store, ids, tokenizer.pad_id))
    expected = (hidden @ model.shared.weight.T).split([len(side) for side in responses])
    cache = model.new_cache(len(ids), max(map(len, prompts)), max(map(len, responses)))
    last = torch.tensor(model.prefill(prompts, cache, range(len(ids)), tokenizer.pad_id))[:, 0]
    for step in range(max(map(len, responses))):
        logits = model.logits(model.decode_one(last, cache))
        for slot, own in enumerate(responses):
            if step < len(own):
                assert (logits[slot] - expected[slot][step]).abs().max() < 1e-4
        last = torch.tensor([own[min(step, len(own) - 1)] for own in responses])


def test_a_slot_that_is_filled_again_forgets_what_it_held(model, tokenizer):
    inputs = [[30, 31, 32, 33], [40, 41]]
    cache = model.new_cache(2, 4, 8)
    model.prefill(inputs, cache, [0, 1], tokenizer.pad_id)
    for token in (50, 51, 52):
        model.decode_one(torch.tensor([token, token]), cache)
    model.prefill([inputs[1]], cache, [0], tokenizer.pad_id)
    alone = model.new_cache(1, 2, 8)
    model.prefill([inputs[1]], alone, [0], tokenizer.pad_id)
    for token in (tokenizer.pad_id, 50):
        again = model.decode_one(torch.tensor([token, 60]), cache)[0]
        assert torch.allclose(again, model.decode_one(torch.tensor([token]), alone)[0], atol=1e-5)
