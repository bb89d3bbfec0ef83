"""Out of memory at every site of a run, on the CPU. All names, ranks and worlds: python -m bench.faults."""

import functools

import pytest

from bench.faults import RANKS, SITES, calm_run, faulty_run
from tests.tiny import furnish


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def calm(home):
    return functools.cache(functools.partial(calm_run, home))


@pytest.mark.parametrize("world, kinds", ((2, ("oom", "cublas", "cpu")), (4, ("nccl", "cudnn", "oom"))))
def test_promise_4_out_of_memory_at_every_site_on_any_rank_changes_no_bit(home, calm, world, kinds):
    for rank, kind in zip(RANKS, kinds, strict=True):
        record = faulty_run(home, world, rank, kind, *calm(world))
        assert not record["wrong"], record
        assert len(record["sites"]) == len(SITES) - (rank == "last"), record
