import errno
import re
from types import SimpleNamespace

import pytest
import torch

from model.commands import setup
from model.runtime.device_memory import (
    CONTEXT_BYTES,
    check_allocator,
    check_memory_safety,
    cleanup_gpu_memory,
    is_out_of_memory,
    limit_memory,
    memory_cap,
    monitor_gpu_memory,
    non_torch_bytes,
)
from model.runtime.fault_injection import ERRORS
from tests.tiny import start, wait_for
from train_low_mem import main

GIB = 2**30


@pytest.mark.parametrize("kind", ["oom", "cublas", "cudnn", "nccl", "cpu"])
def test_every_form_of_out_of_memory_is_recognised(kind):
    assert is_out_of_memory(ERRORS[kind]())


def test_a_real_failed_allocation_is_recognised():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60)
    assert is_out_of_memory(failure.value)
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA out of memory. Tried to allocate more than 1EB memory."),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_failures_are_not_taken_for_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_memory_functions_work_without_a_gpu():
    assert monitor_gpu_memory() == {}
    assert cleanup_gpu_memory() == 0
    assert check_memory_safety(1e6)
    assert (limit_memory(torch.device("cpu"), 4, 0), non_torch_bytes(torch.device("cpu"), 0)) == (None, 0)


def test_memory_that_another_process_took_later_is_not_counted_as_ours(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    for free, non_torch in ((17.5, 0.5), (7, CONTEXT_BYTES / GIB), (19, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (int(free * GIB), 21 * GIB))
        assert non_torch_bytes(torch.device("cuda"), other_process=GIB) == non_torch * GIB


def test_too_little_free_memory_gives_a_warning_with_the_planned_peak(caplog):
    assert check_memory_safety(2.0, free_bytes=3 * GIB)
    assert not check_memory_safety(2.0, free_bytes=GIB, planned_bytes=int(0.5 * GIB))
    assert "1.00 GiB of GPU memory are free, below 2.0; the plan's peak is 0.50 GiB" in caplog.text


def prepare_with_little_free(words):
    """`main` on a card that has 1.25 GiB free whenever it is asked."""
    setup.free_bytes = lambda: int(1.25 * GIB)
    return main(words)


def test_a_run_warns_at_each_stage_with_too_little_free_memory(home):
    processes = start(home, 1, function=prepare_with_little_free, output_dir="gates", epochs=1)
    done = wait_for(processes, home)
    warnings = re.findall(r"stage (\w+): 1.25 GiB of GPU memory are free, below (.*); the plan's peak is", done.text)
    assert warnings == [("start", "3.0"), ("model", "2.5"), ("optimizer", "2.0"), ("ready", "1.5")], done.text


def test_a_limit_above_the_memory_of_the_gpu_is_capped_at_it(monkeypatch):
    card, gib = torch.device("cuda:0"), 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * gib))
    assert [memory_cap(card, limit) for limit in (0.0, 6.0, 12.0)] == [8 * gib, 6 * gib, 8 * gib]


def test_an_allocator_without_pools_is_refused():
    check_allocator("native")
    with pytest.raises(ValueError, match="cudaMallocAsync, which has no pools.*PYTORCH_ALLOC_CONF"):
        check_allocator("cudaMallocAsync")
