import os
import signal
import time

import pytest
import torch

from model.runtime import distributed
from model.runtime.distributed import start_ranks
from model.runtime.launch import must_use_cpu
from model.runtime.nccl_check import Verdict, in_words
from tests.ranks import run_ranks

TIMEOUT_S = 10


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_a_sharding_configuration_is_refused_and_the_right_launch_named(name, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ValueError, match=f"ACCELERATE_USE_{name} is set.*--multi_gpu.*--share_state=True"):
        start_ranks()


def test_a_launch_without_a_common_port_is_refused(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(ValueError, match="MASTER_PORT=0.*torchrun --standalone"):
        start_ranks()


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Files by which a kernel shows a driver and a GPU, while torch sees no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "version").touch()
    return dict(devices=str(tmp_path / "nvidia[0-9]*"), driver=str(tmp_path / "version"))


@pytest.mark.parametrize("absent", [None, "nvidia0", "version"])
def test_a_gpu_that_torch_cannot_see_is_refused_with_the_remedy(driver, tmp_path, absent):
    if absent:
        (tmp_path / absent).unlink()
    with pytest.raises(RuntimeError, match="install a CUDA build of torch .*CUDA_VISIBLE_DEVICES= for the CPU"):
        must_use_cpu(**driver)


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")])
def test_the_cpu_is_used_beside_a_gpu_if_asked_for(driver, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert must_use_cpu(**driver)


def test_accelerate_s_variable_asks_for_the_cpu_too(driver, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert must_use_cpu(**driver)


def test_a_machine_without_a_gpu_uses_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert must_use_cpu(str(tmp_path / "nvidia*"), str(tmp_path / "version"))


def test_a_gpu_that_torch_sees_is_used_unless_accelerate_asks_for_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not must_use_cpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert must_use_cpu()


def die_before_joining():
    """Rank 0 is killed before it hosts the launcher's store."""
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    print("comes_at", time.time(), flush=True)
    start_ranks("gloo", TIMEOUT_S)


def test_a_rank_ends_in_time_with_the_reason_if_another_never_joins(tmp_path):
    done = run_ranks(2, die_before_joining, folder=tmp_path, seconds=40)
    assert done.codes == [-9, 1], done.text
    came_at = float(done.text.split("comes_at")[1].split()[0])
    assert (tmp_path / "rank1.txt").stat().st_mtime - came_at < TIMEOUT_S + 2
    assert f"not all processes came within --ddp_timeout_s={TIMEOUT_S}; where each thread" in done.text


def start_on_gpus(verdict, backend):
    """Print what a rank decides for `verdict`."""
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
def test_all_ranks_of_a_machine_use_the_verdict_and_one_prints_it(tmp_path, verdict, backend, expected):
    done = run_ranks(2, start_on_gpus, verdict, backend, folder=tmp_path, env=dict(LOCAL_WORLD_SIZE=2))
    assert done.codes == [0, 0], done.text
    assert done.text.count(expected) == 2
    chosen = in_words(*verdict[:2])
    assert done.text.count(f"preflight: {chosen} is used; delete FILE") == bool(verdict[2])


def test_a_run_that_asks_for_nccl_ends_with_the_attempts_if_nccl_fails(tmp_path):
    verdict = ("gloo", {}, ["NCCL failed: it hangs"], 1.0)
    done = run_ranks(2, start_on_gpus, verdict, "nccl", folder=tmp_path, env=dict(LOCAL_WORLD_SIZE=2))
    assert done.codes == [1, 1]
    assert "leave --backend=nccl out" in done.text and "it hangs" in done.text
