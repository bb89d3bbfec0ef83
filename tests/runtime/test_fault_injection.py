import errno
from itertools import product

import pytest
import torch

from model.runtime import fault_injection
from model.runtime.fault_injection import ERRORS, KINDS, SITES, fire, parse_faults


def plant(monkeypatch, text):
    monkeypatch.setattr(fault_injection, "_faults", parse_faults(text))


@pytest.mark.parametrize("site, kind", [pair for pair in product(SITES, KINDS) if pair[1] != "nan"] + [("loss", "nan")])
def test_every_site_and_kind_can_be_named(site, kind):
    (fault,) = parse_faults(f"{site}:last:12:{kind}")
    assert (fault.site, fault.rank, fault.step, fault.kind, fault.count) == (site, "last", 12, kind, 1)


def test_several_faults_are_separated_by_commas_and_count_their_firings():
    faults = parse_faults("forward:0:1:oom:3,save:all:2:eio,")
    assert [(fault.site, fault.count) for fault in faults] == [("forward", 3), ("save", 1)]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    "text",
    ["forward", "forward:0:1", "forward:0:1:oom:1:1", "nowhere:0:1:oom", "forward:0:1:sneeze", "forward:0:one:oom"]
    + ["forward:0:-1:oom", "forward:0::oom", "forward:0:1:oom:", "forward:0:1:oom:x", "forward:0:1:oom;save:0:1:eio"]
    + ["forward:first:1:oom", "forward::1:oom", "forward:-1:1:oom", "forward:0:1:nan"],
)
def test_a_malformed_fault_is_refused(text):
    with pytest.raises(ValueError, match="CHAT_FAULT=.*site:rank:step:kind"):
        parse_faults(text)


def test_a_fault_fires_at_its_site_and_step_as_often_as_its_count(monkeypatch):
    plant(monkeypatch, "forward:0:3:oom:2")
    for site, step in (("forward", 2), ("forward", 4), ("backward", 3)):
        assert not fire(site, step)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            fire("forward", 3)
    assert not fire("forward", 3)


@pytest.mark.parametrize(
    "planned, rank, fires",
    [("0", "0", True), ("0", "1", False), ("1", "1", True), ("all", "2", True), ("last", "2", True)]
    + [("last", "1", False), ("12", "1", False)],
)
def test_a_fault_fires_only_on_its_rank(monkeypatch, planned, rank, fires):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "3")
    plant(monkeypatch, f"loss:{planned}:1:nan")
    assert fire("loss", 1) is fires


def test_a_single_process_is_rank_0_and_the_last(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for rank in ("0", "last", "all"):
        plant(monkeypatch, f"loss:{rank}:1:nan")
        assert fire("loss", 1) is True
        assert fire("loss", 1) is False


@pytest.mark.parametrize("kind", ERRORS)
def test_an_injected_error_has_the_type_and_errno_of_the_real_one(monkeypatch, kind):
    plant(monkeypatch, f"save:0:1:{kind}")
    with pytest.raises((RuntimeError, OSError), match="injected|you tried to allocate") as raised:
        fire("save", 1)
    codes = dict(enospc=errno.ENOSPC, eio=errno.EIO)
    assert getattr(raised.value, "errno", None) == codes.get(kind)


def test_nothing_fires_when_no_fault_is_planned(monkeypatch):
    plant(monkeypatch, "")
    assert not any(fire(site, step) for site in SITES for step in range(3))
