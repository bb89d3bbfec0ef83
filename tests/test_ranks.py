import pytest

from model.ranks import start_ranks


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"])
def test_a_sharding_configuration_is_refused_with_the_launch_that_works(name, monkeypatch):
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=f"{name} is set.*--multi_gpu"):
        start_ranks()
