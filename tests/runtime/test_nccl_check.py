import json
import os
import time

import pytest
import torch

from model.runtime import distributed
from model.runtime import nccl_check as module
from model.runtime.nccl_check import IMPORT_SECONDS, REMEDIES, Verdict, find_backend, in_words, preflight, try_backend
from tests.ranks import run_ranks

WORKS = Verdict("nccl", {}, [], 0.1)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("NCCL_CUMEM_HOST_ENABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def test_children_that_fail_or_die_are_followed_by_the_remedies_in_their_order(monkeypatch, capfd):
    monkeypatch.setenv("CHAT_FAULT", "preflight:1:1:nccl,preflight:0:2:kill")
    verdict = find_backend(2, "gloo")
    assert (verdict.backend, verdict.env) == ("gloo", REMEDIES[2])
    first, second = verdict.failures
    assert first.startswith("Gloo failed: rank 1 ended with code 1: RuntimeError: NCCL error")
    assert second.startswith("Gloo NCCL_CUMEM_HOST_ENABLE=0 failed: rank 0 ended with code -9")
    said = capfd.readouterr().err
    assert f"preflight: {first}\n" in said and f"preflight: {second}\n" in said


def test_children_that_hang_are_left_when_their_time_is_up(monkeypatch):
    monkeypatch.setenv("CHAT_FAULT", "preflight:all:1:hang")
    started = time.monotonic()
    assert try_backend("gloo", 2, seconds=1) == "no answer within 1 s"
    assert time.monotonic() - started < IMPORT_SECONDS


@pytest.mark.gpu
def test_nccl_answers_between_all_gpus_in_a_few_seconds():
    verdict = find_backend(torch.cuda.device_count())
    print(verdict)
    assert (verdict.backend, verdict.env, verdict.failures) == ("nccl", {}, [])
    assert verdict.seconds < 30


@pytest.mark.gpu
def test_nccl_answers_with_each_remedy_too(monkeypatch):
    last = torch.cuda.device_count() - 1
    monkeypatch.setenv("CHAT_FAULT", f"preflight:0:1:nccl,preflight:{last}:2:hang")
    verdict = find_backend(last + 1, seconds=10)
    print(verdict)
    assert (verdict.backend, verdict.env, len(verdict.failures)) == ("nccl", REMEDIES[2], 2)


def failing(tried):
    def instead(backend, world_size, env, attempt, seconds):
        tried.append(env)
        return "it hangs"

    return instead


def test_gloo_is_last_and_a_remedy_in_force_is_not_tried_twice(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "try_backend", failing(tried))
    verdict = find_backend(2)
    assert (verdict.backend, verdict.env, len(verdict.failures)) == ("gloo", {}, 3)
    assert tried == list(REMEDIES)
    tried.clear()
    monkeypatch.setenv("NCCL_CUMEM_HOST_ENABLE", "0")
    assert len(find_backend(2).failures) == 2
    assert tried == [{}, {"NCCL_SHM_DISABLE": "1"}]


def test_what_was_found_is_remembered_until_the_machine_or_the_variables_change(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(module, "find_backend", lambda num_gpus: found.append(num_gpus) or WORKS)

    def ask(num_gpus=2, stopped=False):
        return preflight(num_gpus, lambda: stopped, tmp_path)

    assert ask()[0] == ask()[0] == WORKS
    assert found == [2]
    ask(3)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _, path = ask()
    assert found == [2, 3, 2]
    path.write_text('{"backend": "ncc')
    assert ask()[0] == WORKS and json.loads(path.read_text())["backend"] == "nccl"
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with pytest.raises(KeyboardInterrupt):
        ask(stopped=True)
    assert ask()[0] == WORKS and len(found) == 6, "what a stop cut short must not be remembered"


def start_on_gpus(verdict, backend):
    """What a rank makes of `verdict`, in writing."""
    distributed.preflight = lambda num_gpus, stop: (Verdict(*verdict), "FILE")
    fails = distributed._nccl_fails(backend)
    print(f"gloo {fails}, shm {os.environ.get('NCCL_SHM_DISABLE')}")


@pytest.mark.parametrize(
    ("verdict", "backend", "expected"),
    [
        (("nccl", {}, [], 1.0), "auto", "gloo False, shm None\n"),
        (("nccl", {"NCCL_SHM_DISABLE": "1"}, ["NCCL failed: x"], 1.0), "nccl", "gloo False, shm 1\n"),
        (("gloo", {}, ["NCCL failed: x"], 1.0), "auto", "gloo True, shm None\n"),
    ],
)
def test_all_ranks_of_a_machine_take_the_winner_and_one_says_so(tmp_path, verdict, backend, expected):
    done = run_ranks(2, start_on_gpus, verdict, backend, folder=tmp_path, env=dict(LOCAL_WORLD_SIZE=2))
    assert done.codes == [0, 0], done.text
    assert done.text.count(expected) == 2
    chosen = in_words(*verdict[:2])
    assert done.text.count(f"preflight: {chosen} is used; delete FILE") == bool(verdict[2])


def test_nccl_that_was_asked_for_and_fails_ends_the_run_with_what_was_tried(tmp_path):
    verdict = ("gloo", {}, ["NCCL failed: it hangs"], 1.0)
    done = run_ranks(2, start_on_gpus, verdict, "nccl", folder=tmp_path, env=dict(LOCAL_WORLD_SIZE=2))
    assert done.codes == [1, 1]
    assert "leave --backend=nccl out" in done.text and "it hangs" in done.text
