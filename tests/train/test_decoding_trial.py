"""Ways of decoding are tried within time and memory."""

from types import SimpleNamespace

import pytest
import torch

from model.generate.answer_quality import measures
from model.generate.decoding_choice import ways_to_try
from model.generate.sampling import GREEDY, Sampling
from model.train import decoding_trial
from model.train.decoding_trial import try_ways
from model.train.evaluate import answer_questions
from tests.parts import PLAN, evaluation_of


@pytest.fixture
def evaluation(model, store, tokenizer):
    return evaluation_of(model, store, tokenizer, num_answers=6, max_new_tokens=8)


def test_each_way_is_measured_on_the_questions_of_evaluations(evaluation, monkeypatch):
    monkeypatch.setattr(decoding_trial, "ROUND", 3)
    tried, references, asked = try_ways(evaluation, [GREEDY, Sampling(temperature=5.0)], 4, 60)
    answers = answer_questions(evaluation, PLAN)
    figures = measures(answers)
    assert asked == 6 and [one.sampling.temperature for one in tried] == [0, 5]
    assert tried[0].loops == max(figures["loops"], figures["loops_chars"])
    assert (tried[0].ended, tried[0].exact_match) == (figures["ended"], figures["exact_match"])
    assert 2 <= references.median_tokens <= 64 and 0 <= references.ended <= 1
    assert tried[1].chrf != tried[0].chrf


def test_without_time_for_a_round_nothing_is_tried_and_with_some_only_the_first(evaluation, monkeypatch):
    monkeypatch.setattr(decoding_trial, "ROUND", 3)
    assert try_ways(evaluation, ways_to_try(), 4, 0) is None
    now, answer = [0], decoding_trial.answer_requests

    def slow(*args):
        now[0] += 11
        return answer(*args)

    monkeypatch.setattr(decoding_trial, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(decoding_trial, "answer_requests", slow)
    assert try_ways(evaluation, [GREEDY], 4, 20)[2] == 3, "half of the time is over after the first round"


def test_where_memory_runs_out_fewer_answers_are_generated_together(evaluation, monkeypatch):
    sizes, answer = [], decoding_trial.answer_requests

    def short_of_memory(model, requests, limits, is_over):
        sizes.append(limits.slots)
        if limits.slots > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answer(model, requests, limits, is_over)

    monkeypatch.setattr(decoding_trial, "answer_requests", short_of_memory)
    most = 2
    assert try_ways(evaluation, [GREEDY], 6, 60)[2] > 3 and sizes == [6, 3, 1]
    most = 0
    assert try_ways(evaluation, [GREEDY], 4, 60) is None


def test_a_stop_ends_the_trial(evaluation, monkeypatch):
    monkeypatch.setattr(decoding_trial, "stop_asked", lambda: True)
    assert try_ways(evaluation, [GREEDY], 4, 60) is None
