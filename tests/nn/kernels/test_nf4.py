"""The kernel that takes matrices out of NF4."""

import pytest
import torch

from model.nn.flat_params import linear
from model.nn.quantized import make_packed, merge_packed
from tests.nn.kernels.interpreted import interpreted_errors

CPU = torch.device("cpu")
SHAPES = (96, 64), (256, 192), (300, 192)  # 96, 768 and 900 magnitudes: less than a group, three, three and a half


def matrices(shape, count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 0.02 * (1 + number) for number in range(count)]


def written(all_matrices):
    _, places = make_packed([m.shape for m in all_matrices], CPU)
    for place, matrix in zip(places, all_matrices, strict=True):
        place.write(matrix)
    return places


def interpreted():
    """Differences between the kernel and PyTorch; run by tests/nn/kernels/interpreted.py."""
    wholes = [merge_packed(written(matrices(shape))) for shape in SHAPES]
    return [float((w.read(torch.float32, True) - w.read(torch.float32, False)).abs().max()) for w in wholes]


def test_the_interpreted_kernel_gives_the_numbers_of_pytorch():
    assert max(interpreted_errors()["tests.nn.kernels.test_nf4"]) <= 1e-7


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 11008)])
def test_the_kernel_on_a_gpu_gives_the_numbers_of_pytorch_and_codes_do_not_depend_on_the_device(shape):
    host = merge_packed(written(matrices(shape)))
    flats, places = make_packed([shape] * 3, torch.device("cuda"))
    for place, matrix in zip(places, matrices(shape), strict=True):
        place.write(matrix)
    whole = merge_packed(places)
    assert torch.equal(whole.codes.cpu(), host.codes)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(whole.read(dtype, in_kernel=True), whole.read(dtype, in_kernel=False))


@pytest.mark.gpu
def test_a_product_with_packed_matrices_can_be_recorded():
    weights = [torch.nn.Parameter(torch.zeros(1, device="cuda", dtype=torch.bfloat16).expand(256, 192)) for _ in "qkv"]
    _, places = make_packed([(256, 192)] * 3, torch.device("cuda"))
    for weight, place, matrix in zip(weights, places, matrices((256, 192)), strict=True):
        weight.requires_grad_(False).packed = place
        place.write(matrix)
    x = torch.randn(100, 192, device="cuda", dtype=torch.bfloat16)
    expected, graph = linear(x, *weights), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = linear(x, *weights)
    graph.replay()
    assert torch.equal(recorded, expected)
