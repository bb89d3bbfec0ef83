"""The decoder's thread: what it does when memory runs out or a library fails, with real requests and a tiny network."""

import asyncio
import logging

import pytest
import torch

from model.generate.engine import Engine, Limits, Request
from model.serve import decoding_thread
from model.serve.decoding_thread import DecodingThread
from tests.tenants.causal import CausalConfig, CausalModel

LIMITS = Limits(slots=4, input_tokens=8, new_tokens=12, first_id=0, eos_id=-1)
INPUTS = [[5, 6, 7, 8], [9], [11, 12], [3, 4, 5], [20, 21]]


class Failing(CausalModel):
    """Raises the errors of `failures`, one at each call of `decode_one` that has one."""

    failures, num_calls = {}, 0

    def decode_one(self, ids, cache):
        self.num_calls += 1
        if error := self.failures.get(self.num_calls):
            raise error
        return super().decode_one(ids, cache)


@pytest.fixture
def model():
    made = Failing(CausalConfig(vocab_size=60)).initialise(0)
    with torch.no_grad():
        made.embedding.weight.mul_(8)
    return made


def answers(model, inputs=INPUTS):
    """For each input the ids of its answer, or the error that its stream gave, from a thread of its own."""

    async def ids_of(thread, ids):
        try:
            parts = [progress.ids async for progress in thread.submit(Request(ids, 12, streams=True))]
            return [token for part in parts for token in part]
        except RuntimeError as error:
            return error

    async def ask():
        thread = DecodingThread(model, LIMITS, max_waiting=9)
        thread.start()
        try:
            given = await asyncio.wait_for(asyncio.gather(*(ids_of(thread, ids) for ids in inputs)), 30)
            return given, thread.num_open
        finally:
            thread.stop()
            assert not thread.is_alive(), "a daemon thread in torch at the interpreter's end aborts the process"

    return asyncio.run(ask())


def test_answers_go_on_where_they_were_when_memory_runs_out(model):
    calm, still_open = answers(model)
    assert still_open == 0 and all(len(ids) == 12 for ids in calm)
    model.num_calls, model.failures = 0, {10: torch.OutOfMemoryError("out of memory")}
    assert answers(model) == (calm, 0)


def test_only_the_requests_under_way_fail_with_a_library(model, caplog):
    model.failures = {3: IndexError("a bug")}
    given, still_open = answers(model)
    assert {str(error) for error in given} == {decoding_thread.FAILED} and still_open == 0
    model.failures = {}
    assert "a bug" in caplog.text and all(len(ids) == 12 for ids in answers(model)[0])


def test_slots_are_halved_until_their_cache_fits(model, monkeypatch):
    def engine(model, limits):
        if limits.slots > 1:
            raise torch.OutOfMemoryError("out of memory")
        return Engine(model, limits)

    calm, _ = answers(model)
    monkeypatch.setattr(decoding_thread, "Engine", engine)
    assert answers(model) == (calm, 0)


def test_nobody_waits_for_a_decoder_that_has_ended(model, monkeypatch, caplog):
    def engine(model, limits):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(decoding_thread, "Engine", engine)
    with caplog.at_level(logging.ERROR):
        given, _ = answers(model)
    assert {str(error) for error in given} == {decoding_thread.ENDED}
    assert "out of memory for one answer" in caplog.text


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_step_wakes_the_event_loop_once_for_all_streams(model, monkeypatch, launches_ahead):
    calm, _ = answers(model)
    calls, wake = [], asyncio.BaseEventLoop.call_soon_threadsafe
    monkeypatch.setattr(
        asyncio.BaseEventLoop, "call_soon_threadsafe", lambda loop, *args: calls.append(args) or wake(loop, *args)
    )
    monkeypatch.setattr(decoding_thread, "launches_ahead", lambda model: launches_ahead)
    model.num_calls, model.failures = 0, {10: torch.OutOfMemoryError("out of memory")}
    assert answers(model) == (calm, 0), "nothing is lost where a step fails while results wait"
    given = [args for args in calls if args[0] is decoding_thread._put_now]
    assert max(len(items) for _, items in given) == 4 and all(items for _, items in given)
