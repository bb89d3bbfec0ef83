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
    tried, references, asked = try_ways(evaluation, [[GREEDY], [Sampling(temperature=5.0)]], 4, 60)
    answers = answer_questions(evaluation, PLAN)
    figures = measures(answers)
    assert asked == 6 and [one.sampling.temperature for one in tried] == [0, 5]
    assert tried[0].loops == max(figures["loops"], figures["loops_chars"])
    assert (tried[0].ended, tried[0].exact_match) == (figures["ended"], figures["exact_match"])
    assert 2 <= references.median_tokens <= 64 and 0 <= references.ended <= 1
    assert tried[1].chrf != tried[0].chrf


def test_as_much_is_tried_as_the_time_allows_and_nothing_is_begun_that_would_take_longer(evaluation, monkeypatch):
    monkeypatch.setattr(decoding_trial, "ROUND", 3)
    assert try_ways(evaluation, ways_to_try(), 4, 0) is None
    now, answer = [0], decoding_trial.answer_requests

    def slow(model, requests, *rest):
        now[0] += len(requests)
        return answer(model, requests, *rest)

    def tried_in(seconds):
        now[0] = 0
        tried, _, asked = try_ways(evaluation, [[GREEDY], [Sampling(temperature=5.0)]], 4, seconds)
        return len(tried), asked, now[0]

    monkeypatch.setattr(decoding_trial, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(decoding_trial, "answer_requests", slow)
    tried = {seconds: tried_in(seconds) for seconds in (3, 5, 6, 11, 12)}  # (ways, questions, seconds taken)
    assert tried == {3: (1, 3, 3), 5: (1, 3, 3), 6: (2, 3, 6), 11: (2, 3, 6), 12: (2, 6, 12)}


def test_where_memory_runs_out_fewer_answers_are_generated_together(evaluation, monkeypatch):
    sizes, answer = [], decoding_trial.answer_requests

    def short_of_memory(model, requests, limits, is_over):
        sizes.append(limits.slots)
        if limits.slots > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return answer(model, requests, limits, is_over)

    monkeypatch.setattr(decoding_trial, "answer_requests", short_of_memory)
    most = 2
    assert try_ways(evaluation, [[GREEDY]], 6, 60)[2] > 3 and sizes == [6, 3, 1]
    most = 0
    assert try_ways(evaluation, [[GREEDY]], 4, 60) is None


def test_a_stop_ends_the_trial(evaluation, monkeypatch):
    monkeypatch.setattr(decoding_trial, "stop_asked", lambda: True)
    assert try_ways(evaluation, [[GREEDY]], 4, 60) is None
