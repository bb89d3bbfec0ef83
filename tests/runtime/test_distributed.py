import pytest
import torch

from model.runtime.distributed import must_use_cpu, start_ranks


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"])
def test_a_sharding_configuration_is_refused_with_the_launch_that_works(name, monkeypatch):
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=f"{name} is set.*--multi_gpu"):
        start_ranks()


def test_a_launch_that_gives_its_processes_no_port_to_meet_at_is_refused(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(ValueError, match="MASTER_PORT=0.*torchrun --standalone"):
        start_ranks()


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Where a kernel with a driver and two GPUs would show them, to a torch that sees none."""
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
def test_who_asks_for_the_cpu_gets_it_beside_a_gpu(driver, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert must_use_cpu(**driver)


def test_accelerate_s_cpu_request_is_enough_too(driver, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert must_use_cpu(**driver)


def test_a_machine_without_a_gpu_uses_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert must_use_cpu(str(tmp_path / "nvidia*"), str(tmp_path / "version"))


def test_a_gpu_that_torch_sees_is_used_unless_accelerate_was_told_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not must_use_cpu()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert must_use_cpu()
