"""Stochastic rounding to bf16: in PyTorch, in Triton's interpreter and on a GPU the same bits."""

import pytest
import torch

from model.nn.rounding import random_bits, round_to
from tests.nn.kernels.interpreted import interpreted_errors

KEY = torch.tensor([-7, 12345], dtype=torch.int32)


def rounded(values, position=0, key=KEY):
    out = torch.empty(len(values), dtype=torch.bfloat16, device=values.device)
    round_to(out, values, position, key.to(values.device))
    return out.float()


def unlike_pytorch(device):
    """Number of values that the kernel rounds in another way than PyTorch."""
    from model.nn.kernels.rounding import round_to_bf16  # CPU builds of torch have no Triton

    values, wrong = torch.randn(5000, generator=torch.manual_seed(0)), 0
    for position, count in ((0, 5000), (13, 4000), (2**31 + 5, 3), (8, 2048)):
        out = torch.empty(count, dtype=torch.bfloat16, device=device)
        round_to_bf16(out, values[:count].to(device), position, KEY.to(device))
        wrong += int((out.float().cpu() != rounded(values[:count], position)).sum())
    return wrong


def interpreted():
    return [unlike_pytorch("cpu")]


def test_the_interpreted_kernel_rounds_as_pytorch():
    assert interpreted_errors()["tests.nn.kernels.test_rounding"] == [0]


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_rounds_as_pytorch():
    assert unlike_pytorch("cuda") == 0


def test_numbers_are_rounded_to_a_neighbour_and_keep_their_mean_and_those_of_bf16_stay():
    values = torch.full((200_000,), 1 + 2**-7 * 0.3)  # 0.3 of the way between two numbers of bf16
    found = rounded(values)
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert abs((found > 1).float().mean() - 0.3) < 0.005
    assert torch.equal(rounded(-values), -found)
    kept = torch.tensor([0.0, -1.5, float("inf"), 2.0**-120, 3e38]).bfloat16().float()
    assert torch.equal(rounded(kept), kept)


def test_a_number_is_rounded_alike_wherever_the_part_begins_that_it_is_updated_in():
    values = torch.randn(300_000)
    whole = rounded(values, 5)
    for start, stop in ((0, 7), (7, 70_001), (70_001, 300_000)):
        assert torch.equal(rounded(values[start:stop], 5 + start), whole[start:stop])
    assert len(random_bits(3, 2, KEY)) == 2
    assert not torch.equal(rounded(values, 5, KEY + 1), whole)
