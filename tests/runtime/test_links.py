"""The speed of a GPU's links, measured where there is one."""

import pytest
import torch

from model.runtime.links import measured_links


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_no_link_is_measured():
    assert measured_links() == {}


@pytest.mark.gpu
def test_a_gpu_has_a_link_to_host_memory_and_one_to_another_gpu():
    found = measured_links()
    assert list(found) == ["host", "peer"][: torch.cuda.device_count()]
    assert all(1e9 < speed < 2e12 for speed in found.values())
