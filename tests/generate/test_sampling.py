"""What may be chosen is what transformers' processors leave, and how often it is chosen is its probability."""

import pytest
import torch
from transformers.generation import logits_process as stock

from model.generate.sampling import Mode, Sampling, SlotSettings, choose, filtered, likeliest_of, mode_of, uniform

VOCABULARY = 50


def settings_of(samplings):
    settings = SlotSettings(len(samplings), torch.device("cpu"))
    settings.put(torch.arange(len(samplings)), samplings)
    return settings


def stock_probabilities(logits, sampling):
    steps = [stock.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        steps.append(stock.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(stock.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(stock.MinPLogitsWarper(sampling.min_p))
    for step in steps:
        logits = step(None, logits)
    return logits.softmax(dim=1)


SAMPLINGS = [
    Sampling(temperature=0.7), Sampling(temperature=1.5, top_k=5), Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.2), Sampling(temperature=2.0, top_k=12, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.0, top_p=1e-6), Sampling(temperature=0.5, top_k=1000),
]  # fmt: skip


def test_the_filtered_probabilities_are_those_of_transformers():
    logits = torch.randn(len(SAMPLINGS), VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    settings, mode = settings_of(SAMPLINGS), mode_of(SAMPLINGS, VOCABULARY)
    probabilities, tokens = filtered(logits / settings.temperature[:, None], settings, mode.candidates)
    ours = torch.zeros_like(logits).scatter_(1, tokens, probabilities)
    expected = torch.cat([stock_probabilities(row[None], s) for row, s in zip(logits, SAMPLINGS, strict=True)])
    torch.testing.assert_close(ours / ours.sum(dim=1, keepdim=True), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=6, top_p=0.95)])
def test_tokens_are_drawn_as_often_as_their_probability_says(sampling):
    draws, logits = 20_000, torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    many = settings_of([sampling]).first(1)
    for name, value in vars(many).items():
        setattr(many, name, value.expand(draws).clone())
    many.seed = torch.arange(draws)
    history = torch.zeros(draws, 2, dtype=torch.int64)
    chosen = choose(logits.expand(draws, -1), history, history[:, 0], many, mode_of([sampling], 12))
    frequency = chosen.bincount(minlength=12) / draws
    expected = stock_probabilities(logits, sampling)[0]
    assert ((frequency - expected).abs() < 5 * (expected / draws).sqrt() + 1e-9).all()


def test_seeds_positions_and_tokens_give_independent_uniform_numbers():
    axis = torch.arange(70)
    numbers = uniform(axis[:, None, None], axis[None, :, None], axis[None, None, :].expand(70, 70, 70))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.005 and abs(numbers.var() - 1 / 12) < 0.002
    for other in (numbers[1:], numbers[:, 1:], numbers[:, :, 1:]):
        same = numbers[: other.shape[0], : other.shape[1], : other.shape[2]]
        assert abs(((same - 0.5) * (other - 0.5)).mean() * 12) < 0.02, "neighbours are correlated"


def test_a_greedy_slot_beside_a_sampling_one_stays_greedy():
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3)]
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(2))
    history = torch.zeros(2, 4, dtype=torch.int64)
    args = settings_of(samplings), mode_of(samplings, VOCABULARY)
    chosen = {int(choose(logits, history, torch.full((2,), count), *args)[0]) for count in range(4)}
    assert chosen == {int(logits[0].argmax())}


@pytest.mark.parametrize("width", [3, 255, 256, 257, 511, 512, 29_298])
def test_the_likeliest_token_is_the_first_of_equal_ones(width):
    logits = torch.randint(12, (50, width + 14), generator=torch.Generator().manual_seed(width))[:, :width].float()
    assert likeliest_of(logits).equal(logits.argmax(dim=1))


def test_a_mode_does_the_least_work_that_serves_all():
    assert mode_of([Sampling()] * 3, VOCABULARY) == Mode()
    assert mode_of([Sampling(), Sampling(temperature=1.0, top_k=20)], 10_000) == Mode(is_drawn=True, candidates=32)
    assert mode_of([Sampling(temperature=1.0, top_p=0.5)], VOCABULARY).candidates == VOCABULARY
    assert mode_of([Sampling(top_k=5, repetition_penalty=2)], VOCABULARY) == Mode(is_penalised=True)
    assert mode_of([Sampling(no_repeat_ngram_size=n) for n in (0, 4)], VOCABULARY) == Mode(longest_ngram=4)


@pytest.mark.parametrize(
    "options",
    [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=-1), dict(top_p=0), dict(top_p=1.1),
     dict(min_p=1), dict(repetition_penalty=0), dict(no_repeat_ngram_size=17), dict(seed=-1), dict(seed=2**63)],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        Sampling(**options)
