import json
import time

import pytest
import torch

from model.runtime import nccl_check as module
from model.runtime.nccl_check import IMPORT_SECONDS, REMEDIES, Verdict, find_backend, preflight, try_backend

WORKS = Verdict("nccl", {}, [], 0.1)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("NCCL_CUMEM_HOST_ENABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def test_after_children_that_fail_or_die_the_remedies_are_tried_in_order(monkeypatch, capfd):
    monkeypatch.setenv("CHAT_FAULT", "preflight:1:1:nccl,preflight:0:2:kill")
    verdict = find_backend(2, "gloo")
    assert (verdict.backend, verdict.env) == ("gloo", REMEDIES[2])
    first, second = verdict.failures
    assert first.startswith("Gloo failed: rank 1 ended with code 1: RuntimeError: NCCL error")
    assert second.startswith("Gloo NCCL_CUMEM_HOST_ENABLE=0 failed: rank 0 ended with code -9")
    said = capfd.readouterr().err
    assert f"preflight: {first}\n" in said and f"preflight: {second}\n" in said


def test_children_that_hang_are_killed_when_their_time_is_over(monkeypatch):
    monkeypatch.setenv("CHAT_FAULT", "preflight:all:1:hang")
    started = time.monotonic()
    assert try_backend("gloo", 2, seconds=1) == "no answer within 1 s"
    assert time.monotonic() - started < IMPORT_SECONDS


@pytest.mark.gpu
def test_nccl_works_between_all_gpus_within_seconds():
    verdict = find_backend(torch.cuda.device_count())
    print(verdict)
    assert (verdict.backend, verdict.env, verdict.failures) == ("nccl", {}, [])
    assert verdict.seconds < 30


@pytest.mark.gpu
def test_nccl_works_with_each_remedy_too(monkeypatch):
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


def test_gloo_is_last_and_a_remedy_already_set_is_not_tried_twice(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "try_backend", failing(tried))
    verdict = find_backend(2)
    assert (verdict.backend, verdict.env, len(verdict.failures)) == ("gloo", {}, 3)
    assert tried == list(REMEDIES)
    tried.clear()
    monkeypatch.setenv("NCCL_CUMEM_HOST_ENABLE", "0")
    assert len(find_backend(2).failures) == 2
    assert tried == [{}, {"NCCL_SHM_DISABLE": "1"}]


def test_a_verdict_is_stored_until_the_number_of_gpus_or_the_variables_change(monkeypatch, tmp_path):
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
    assert ask()[0] == WORKS and len(found) == 6, "a check that a stop interrupted must not be stored"
