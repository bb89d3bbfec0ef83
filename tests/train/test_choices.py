"""The likeliest choice is the one that transformers finds likeliest, whatever is packed together."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from model.data.choice_encoding import AskedChoices
from model.formats.weights import export_model
from model.generate.scoring import ScoreRequest, score_all, score_tokens
from model.memory.plan import NothingFits
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.distributed import Ranks
from model.train import choices
from model.train.choices import likeliest_choices

ALONE = Ranks(0, 1, 0, torch.device("cpu"), "none", None)
DECODER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
T5 = dict(d_model=16, d_ff=32, num_heads=2, d_kv=8, num_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="module", params=["decoder", "t5"])
def network(request, tokenizer, tmp_path_factory):
    """(network, its first id, function from context and targets to transformers' log-probabilities of the targets)."""
    vocab = dict(vocab_size=tokenizer.vocab_size)
    if request.param == "decoder":
        model, kind = DecoderModel(DecoderModelConfig(**DECODER, **vocab)), AutoModelForCausalLM
    else:
        model, kind = TextToTextModel(T5ModelConfig(**T5, **vocab)), AutoModelForSeq2SeqLM
    model.initialise(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    folder = tmp_path_factory.mktemp("network")
    export_model(model, tokenizer, folder)
    theirs = kind.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probs(context, targets):
        if request.param == "decoder":
            logits = theirs(torch.tensor([[*context, *targets]])).logits[0, len(context) - 1 : -1]
        else:
            logits = theirs(input_ids=torch.tensor([context]), labels=torch.tensor([targets])).logits[0]
        return logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]

    return model, tokenizer.pad_id, log_probs


def drawn(count, prefixes=1):
    draw = random.Random(0)
    contexts = [[draw.randrange(10, 300) for _ in range(draw.randrange(1, 40))] for _ in range(count)]
    prefix = [[17] * (place % 2 * prefixes) for place in range(count)]
    candidates = [draw.sample(range(10, 300), 4) for _ in range(count)]
    return AskedChoices([np.array(c) for c in contexts], prefix, np.array(candidates), Counter())


def test_the_likeliest_choice_is_transformers_in_passes_of_any_size(network):
    model, first_id, log_probs = network
    asked = drawn(40)
    expected = [
        max(range(4), key=lambda k: log_probs(context.tolist(), [*prefix, ids[k]]).sum())
        for context, prefix, ids in zip(asked.contexts, asked.prefixes, asked.candidates.tolist(), strict=True)
    ]
    assert len(set(expected)) == 4
    for tokens in (8, 100, 10_000):
        assert likeliest_choices(ALONE, model, first_id, asked, tokens).tolist() == expected


def test_scores_of_tokens_are_transformers_log_probabilities(network):
    model, first_id, log_probs = network
    draw = random.Random(1)
    requests = [
        ScoreRequest(*([draw.randrange(10, 300) for _ in range(size)] for size in sizes), top=top)
        for *sizes, top in ((3, 5, 1), (20, 1, 3), (1, 9, 2))
    ]
    with torch.inference_mode():
        for request, scores in zip(requests, score_tokens(model.eval(), first_id, requests), strict=True):
            assert scores.log_probs == pytest.approx(log_probs(request.context, request.targets).numpy(), abs=1e-4)
            assert scores.top_ids.shape == scores.top_log_probs.shape == (len(request.targets), request.top)
            likeliest = ScoreRequest(request.context, [int(scores.top_ids[0, 0])])
            (again,) = score_tokens(model, first_id, [likeliest])
            assert again.is_greedy and again.log_probs[0] == pytest.approx(scores.top_log_probs[0, 0], abs=1e-4)


def test_passes_are_halved_when_memory_runs_out(network, monkeypatch):
    model, first_id, _ = network
    asked, score, sizes = drawn(40), choices.score_next, []
    calm = likeliest_choices(ALONE, model, first_id, asked, 10_000).tolist()

    def limited(model, first_id, contexts, prefixes, candidates):
        sizes.append(len(contexts))
        if len(contexts) > most:
            raise torch.OutOfMemoryError("out of memory")
        return score(model, first_id, contexts, prefixes, candidates)

    monkeypatch.setattr(choices, "score_next", limited)
    monkeypatch.setattr("model.memory.oom_policy.release_memory", lambda: None)  # collecting garbage takes long
    most = 8
    assert likeliest_choices(ALONE, model, first_id, asked, 10_000).tolist() == calm and max(sizes) > most
    most = 0
    with pytest.raises(NothingFits):
        likeliest_choices(ALONE, model, first_id, asked, 10_000)


def test_texts_are_scored_in_halves_when_memory_runs_out(network, monkeypatch):
    model, first_id, _ = network
    requests = [ScoreRequest([5, 6, place + 10], [7, 8]) for place in range(9)]
    calm = [scores.log_probs for scores in score_all(model.eval(), first_id, requests, 1000)]
    sizes = []

    def limited(model, first_id, requests):
        sizes.append(len(requests))
        if len(requests) > most:
            raise torch.OutOfMemoryError("out of memory")
        return score_tokens(model, first_id, requests)

    monkeypatch.setattr("model.generate.scoring.score_tokens", limited)
    monkeypatch.setattr("model.generate.scoring.release_memory", lambda: None)
    most = 2
    again = [scores.log_probs for scores in score_all(model, first_id, requests, 1000)]
    assert np.allclose(calm, again, atol=1e-5) and max(sizes) == 9
    most = 0
    with pytest.raises(RuntimeError, match="one text of 5 tokens"):
        score_all(model, first_id, requests, 1000)
