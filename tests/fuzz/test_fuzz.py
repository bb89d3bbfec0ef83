"""Promise 9: files of strangers give a reason or a correct result; and proof that the judge detects each failure."""

import os
import signal
import tempfile
import time

import pytest

from tests.fuzz import judge as module
from tests.fuzz.judge import GOOD, fuzz, judge
from tests.fuzz.targets import TARGETS

INPUTS = 20


@pytest.fixture(autouse=True)
def own_alarm():
    before = {timer: signal.getsignal(timer) for timer in (signal.SIGALRM, signal.SIGPROF)}
    yield
    for timer, handler in before.items():
        signal.signal(timer, handler)


@pytest.fixture(autouse=True, scope="module")
def own_folder(tmp_path_factory):
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("fuzz"))
    yield
    tempfile.tempdir = before


@pytest.mark.parametrize("name", TARGETS)
def test_a_mutated_input_is_refused_with_a_reason_or_read_correctly(name):
    outcomes = [judge(name, number, seed=7) for number in range(INPUTS)]
    assert [outcome for outcome in outcomes if outcome[0] not in GOOD] == []
    assert {outcome for outcome, _ in outcomes} == set(GOOD), "all inputs had one outcome: they test too little"


def ends_badly(kind):
    def target(draw, folder):
        if kind == "wrong":
            assert draw.random() > 1
        elif kind == "traceback":
            dict()["no such key"]
        elif kind == "wait":
            time.sleep(60)
        elif kind == "loop":
            while True:
                pass
        elif draw.random() < 0.5:
            os.kill(os.getpid(), signal.SIGKILL)

    return target


@pytest.mark.parametrize(
    "kind, found, limit",
    [
        ("wrong", "wrong", ""),
        ("traceback", "traceback", ""),
        ("loop", "hang", "INPUT_SECONDS"),
        ("wait", "hang", "WAIT_SECONDS"),
    ],
)
def test_the_harness_detects(kind, found, limit, monkeypatch):
    monkeypatch.setitem(TARGETS, "bad", ends_badly(kind))
    if limit:
        monkeypatch.setattr(module, limit, 0.2)
    assert judge("bad", 0)[0] == found


def test_a_value_error_raised_in_a_library_counts_as_a_traceback(monkeypatch):
    monkeypatch.setitem(TARGETS, "bad", lambda draw, folder: int("x"))
    assert judge("bad", 0)[0] == "traceback"


def test_a_crash_of_the_worker_is_recorded_and_the_other_inputs_are_judged(monkeypatch):
    monkeypatch.setitem(TARGETS, "bad", ends_badly("crash"))
    found = fuzz("bad", 12)
    assert [number for number, *_ in found] == list(range(12))
    assert {outcome for _, outcome, _ in found} == {"crash", "correct"}
