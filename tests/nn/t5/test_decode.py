"""Generation one token at a time gives what transformers' generate and the packed network give, recorded or not."""

import numpy as np
import pytest
import torch

from model.generate.engine import DecodingGraphs, Engine, Limits, Request, generate
from model.generate.sampling import GREEDY, Sampling
from tests.parts import batch_of, examples_of, make_model
from tests.stock import as_hugging_face, guards_of

PROMPTS, NEW = 1000, 40  # prompts with each penalty; tokens of an answer, at most


def hf_answers(hf_model, inputs, pad_id, eos_id, **penalties):
    ids = torch.full((len(inputs), max(map(len, inputs))), pad_id)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(inputs):
        ids[row, : len(own)], mask[row, : len(own)] = torch.as_tensor(own), 1
    guards = guards_of(penalties, prompt_tokens=1)  # the first id of a T5's decoder
    out = hf_model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, logits_processor=guards)
    out = out[:, 1:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in out]


def two_best(hf_model, input_ids, decoded, penalties):
    """The two best logits, after the penalties, of transformers' next token after the ids `decoded`."""
    ids = torch.tensor([decoded])
    scores = hf_model(torch.as_tensor(input_ids)[None], decoder_input_ids=ids).logits[:, -1]
    for guard in guards_of(penalties, prompt_tokens=1):
        scores = guard(ids, scores)
    return scores[0].topk(2)


@torch.no_grad()
def count_ties(hf_model, tokenizer, inputs, ours, theirs, penalties):
    """The number of our answers that differ from theirs, first where transformers' two best logits are within 1e-4.

    Fails at an answer that differs elsewhere.
    """
    ties = 0
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
    "seed, penalties",
    [(1, {}), (2, dict(repetition_penalty=1.3)), (3, dict(no_repeat_ngram_size=2)),
     (4, dict(repetition_penalty=0.8, no_repeat_ngram_size=3)), (5, dict(no_repeat_ngram_size=1))],
)  # fmt: skip
def test_promise_1_greedy_answers_are_those_of_transformers(tokenizer, seed, penalties):
    model, draw = make_model(tokenizer.vocab_size, seed), np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.flat.trained[1:]:  # all but the tied embedding, which would answer every token with itself
            p.mul_(4)
    inputs = [draw.integers(7, tokenizer.vocab_size, draw.integers(1, 40)) for _ in range(PROMPTS)]
    limits = Limits(70, 40, NEW, tokenizer.pad_id, tokenizer.eos_id)
    ours = generate(model, inputs, limits, NEW, Sampling(**penalties) if penalties else GREEDY)
    hf_model = as_hugging_face(model, tokenizer)
    theirs = hf_answers(hf_model, inputs, tokenizer.pad_id, tokenizer.eos_id, **penalties)
    assert count_ties(hf_model, tokenizer, inputs, ours, theirs, penalties) <= PROMPTS / 50
    assert len(set(map(tuple, ours))) > PROMPTS / 3, "answers that are all alike prove nothing"


def test_the_logits_of_each_step_are_those_of_the_packed_network(model, store, tokenizer):
    ids = [3, 0, 41, 17]
    prompts, responses = zip(*examples_of(store, ids), strict=True)
    hidden, _ = model.hidden(batch_of(store, ids, tokenizer.pad_id))
    expected = (hidden @ model.shared.weight.T).split([len(side) for side in responses])
    cache = model.new_cache(len(ids), max(map(len, prompts)), max(map(len, responses)))
    last = torch.tensor(model.prefill(prompts, cache, range(len(ids)), tokenizer.pad_id))
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


class Unrecorded(DecodingGraphs):
    """Calls the work each time, where others replay a CUDA graph of it."""

    def run(self, key, work):
        self.graphs[key] = None
        self.capturer.run(work)


def model_and_inputs(tokenizer, **options):
    """A model whose answers rounding changes only at ties; 20 long prompts and 180 of 1 to 140 tokens, ascending."""
    model, draw = make_model(tokenizer.vocab_size, **options), np.random.default_rng(0)
    with torch.no_grad():
        for name, p in model.named_parameters():  # neither q nor k: large scores would multiply errors
            if name.endswith(("v.weight", "o.weight", "wi.weight", "wo.weight")):
                p.mul_(4)
        model.shared.weight[tokenizer.eos_id].mul_(2)  # some answers end by themselves
    lengths = [*range(140, 120, -1), *(1 + 139 * i // 179 for i in range(180))]
    return model, [draw.integers(7, tokenizer.vocab_size, length) for length in lengths]


def long_answers(model, tokenizer, inputs, penalties, graphs=None):
    """(answers of at most 30 to 150 tokens, the Engine): 20 are generated together, then 180 in its 40 slots."""
    engine = Engine(model.eval(), Limits(40, 140, 150, tokenizer.pad_id, tokenizer.eos_id))
    engine.graphs, answers = graphs or engine.graphs, [[] for _ in inputs]
    requests = [Request(own, 150 - 20 * (i % 7), Sampling(**penalties)) for i, own in enumerate(inputs)]
    for part in (requests[:20], requests[20:]):
        for request in part:
            engine.add(request)
        for _ in range(200):  # more steps than it needs
            for progress in engine.step():
                answers[progress.number] = progress.ids
        assert engine.idle
    assert any(len(answer) < request.max_new_tokens for answer, request in zip(answers, requests, strict=True))
    assert len(set(map(tuple, answers))) > len(inputs) / 3, "answers that are all alike prove nothing"
    return answers, engine


def check_captured(engine, *expected):
    """Each size was recorded; those of slots, of input tokens and of new tokens are the sets `expected`."""
    sizes = zip(*(size for size, _ in engine.graphs.graphs), strict=True)
    assert tuple(map(set, sizes)) == expected and all(engine.graphs.graphs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("penalties", [{}, dict(no_repeat_ngram_size=2)])
def test_recorded_decoding_gives_the_answers_of_the_cpu(tokenizer, penalties):
    model, inputs = model_and_inputs(tokenizer)
    hf_model, (theirs, _) = as_hugging_face(model, tokenizer), long_answers(model, tokenizer, inputs, penalties)
    ours, engine = long_answers(model.to("cuda"), tokenizer, inputs, penalties)
    check_captured(engine, {32, 40}, {32, 128, 140}, {32, 128, 150})
    assert count_ties(hf_model, tokenizer, inputs, ours, theirs, penalties) <= len(inputs) / 50


@pytest.mark.gpu
def test_recorded_decoding_in_bf16_gives_the_answers_of_the_same_steps_unrecorded(tokenizer):
    model, inputs = model_and_inputs(tokenizer, compute_dtype=torch.bfloat16)
    model.to("cuda")
    recorded, engine = long_answers(model, tokenizer, inputs, {})
    check_captured(engine, {32, 40}, {140}, {150})  # the kernel reads only what is there
    assert long_answers(model, tokenizer, inputs, {}, Unrecorded())[0] == recorded
