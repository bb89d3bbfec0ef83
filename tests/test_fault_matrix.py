"""Out of memory at every site of a run, on the CPU. All names, ranks and worlds: python -m bench.faults."""

import functools
import json

import pytest

from bench.faults import RANKS, SITES, calm_run, faulty_run
from tests.tiny import journal, train


@pytest.fixture(scope="module")
def calm(home):
    return functools.cache(functools.partial(calm_run, home))


@pytest.mark.parametrize("world, kinds", ((2, ("real", "cublas", "oom")), (4, ("nccl", "cudnn", "cpu"))))
def test_promise_4_out_of_memory_at_every_site_on_any_rank_changes_no_bit(home, calm, world, kinds):
    for rank, kind in zip(RANKS, kinds, strict=True):
        record = faulty_run(home, world, rank, kind, *calm(world))
        assert not record["wrong"], record
        assert len(record["sites"]) == len(SITES) - (rank == "last"), record


def test_a_step_that_never_fits_ends_the_run_with_a_checkpoint_and_the_reason(home):
    done = train(home, 2, "forward:last:3:oom:1000", output_dir="never")
    assert done.codes == [1, 1], done.text
    assert "out of memory with the smallest plan" in done.text and "--is_keep_training=True" in done.text
    assert (home / "never" / "checkpoints" / "LATEST").read_text() == "step_00000002"
    assert journal(home / "never", "stop")[-1]["reason"] == "failed"


def test_plan_json_tells_what_was_predicted_by_phase_and_what_the_limits_are(home, calm):
    calm_dir, _ = calm(2)
    stored = json.loads((calm_dir / "plan.json").read_text())
    assert set(stored["phases"]) == {"load", "first_step", "step", "evaluation", "generation", "save"}
    assert all(phase["predicted"] > 0 for phase in stored["phases"].values())
    assert stored["micro_batch_tokens"] == 64 and "allocator_limit_bytes" in stored
