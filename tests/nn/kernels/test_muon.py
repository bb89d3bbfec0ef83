"""Muon's kernels against the plain update: on a CPU in Triton's interpreter, on a GPU as they are."""

from unittest import mock

import pytest
import torch

from model.nn.flat_params import FlatParams
from model.train import adamw_rms, muon
from model.train.orthogonal import orthogonal, orthogonalise_
from tests.nn.kernels.interpreted import interpreted_errors, relative_error

SHAPES = [(140, 140), (270, 130), (130, 270)]  # square, tall, wide; all of more than one tile


def make_muon(shapes, device, generator):
    """Muon over random matrices of these shapes and sizes of numbers, with random gradients and momenta."""
    starts = [10.0 ** -(i % 4) * torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(start.to(device)) for start in starts]
    flat = FlatParams([torch.nn.Parameter(torch.ones(5, device=device))], params, [], torch.float32)
    optimizer = muon.Muon(flat, torch.tensor(0.01, device=device), weight_decay=10.0)
    for x in (flat.gradients, optimizer.momenta):
        x.copy_(torch.randn(x.shape, generator=generator))
    return flat, optimizer


def outcome(shapes, device, kernels, scale=0.5):
    """(change of the weights, momenta) of an update in kernels or in passes."""
    flat, optimizer = make_muon(shapes, device, torch.Generator().manual_seed(0))
    before, momenta = flat.masters.clone(), optimizer.momenta
    is_run = dict(runs_kernels=lambda _: kernels)
    with mock.patch.multiple(muon, **is_run), mock.patch.multiple(adamw_rms, **is_run):
        optimizer.update(optimizer.param_groups[0]["lr"], torch.tensor(scale, device=device))
    return [x.cpu() for x in (flat.masters - before, momenta)]


def update_errors(device, shapes=SHAPES):
    """Relative errors of the change of the weights and of the momenta of an update, against the plain path."""
    outcomes = outcome(shapes, device, True), outcome(shapes, "cpu", False)
    return [relative_error(*pair) for pair in zip(*outcomes, strict=True)]


def is_unchanged(device):
    """True if an update whose scale is not a number leaves weights and momenta as they were."""
    _, fresh = make_muon([(24, 40)], device, torch.Generator().manual_seed(0))
    change, momenta = outcome([(24, 40)], device, True, scale=float("nan"))
    return bool((change == 0).all() and (momenta == fresh.momenta.cpu()).all())


def zeros():
    """What the kernels make of a matrix of zeros: its largest number."""
    batch = torch.randn(2, 20, 70)
    batch[0] = 0
    (direction,) = orthogonalise_([(batch.clone(), 1 / (batch.norm(dim=(1, 2)) + 1e-12), None)])
    return direction[0].abs().max().item()


def matrix_with(values, shape, generator):
    """A matrix with these singular values and random singular vectors."""
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    return left * values @ right


def ill_conditioned(shape):
    """Two matrices: one has singular values of 1/k, one is noise with eight strong rows, multiples of one another."""
    generator, rank = torch.Generator().manual_seed(0), min(shape)
    spiked = torch.randn(shape, generator=generator)
    spiked[:8] += 30 * torch.randn(8, 1, generator=generator) @ torch.randn(1, shape[1], generator=generator)
    return torch.stack([matrix_with(1 / torch.arange(1, rank + 1), shape, generator), spiked])


def largest_value():
    """Of the directions of long ill-conditioned matrices in float16, since the interpreter has no bf16 products."""
    batch = ill_conditioned((128, 320))
    (directions,) = orthogonalise_([(batch.half(), 1 / batch.norm(dim=(1, 2)), None)])
    return torch.linalg.matrix_norm(directions.float(), 2).max().item()


def asymmetry():
    """Of a product of symmetric matrices, as it is stored; they do not commute, so in exact numbers it is not 0."""
    from model.nn.kernels.muon import symmetric_product_  # CPU builds of torch have no Triton

    one, other = (x + x.mT for x in torch.randn(2, 1, 140, 140, generator=torch.Generator().manual_seed(0)))
    product = symmetric_product_(torch.empty_like(one), one, other, None)
    return (product - product.mT).abs().max().item()


def interpreted():
    return [*update_errors("cpu"), is_unchanged("cpu"), zeros(), largest_value(), asymmetry()]


def test_the_interpreted_muon_update_gives_the_same_as_pytorch():
    weights, momenta, unchanged, of_zeros, largest, unsymmetric = interpreted_errors()["tests.nn.kernels.test_muon"]
    assert weights < 1e-4 and momenta < 1e-6
    assert unchanged
    assert of_zeros == 0
    assert unsymmetric == 0
    assert largest < 1.28, "rounding makes the iteration on an ill-conditioned Gram matrix diverge"


def symmetric(lower):
    return lower.tril() + lower.tril(-1).mT


def rounded_gram_(out, x, scales=None):
    x = x.float().mT if x.shape[1] > x.shape[2] else x.float()
    return out.copy_(symmetric(x @ x.mT * (1 if scales is None else scales.square()[:, None, None])))


def rounded_symmetric_product_(out, left, right, addend, alpha=1.0, beta=0.0):
    return out.copy_(symmetric(torch.baddbmm(addend.float(), left.float(), right.float(), alpha=alpha, beta=beta)))


def rounded_product_(out, left, right, addend=None, beta=0.0, scales=None):
    product = left.float() @ right.float() + (0 if addend is None else beta * addend.float())
    return out.copy_(product * (1 if scales is None else scales[:, None, None]))


@pytest.mark.parametrize("shape", [(512, 512), (512, 2048), (1024, 512)])
def test_rounding_as_on_a_gpu_makes_no_direction_of_an_ill_conditioned_matrix_grow(monkeypatch, shape):
    """The products are PyTorch's, with float32 sums, rounded to the dtypes that the kernels store."""
    from model.nn.kernels import muon as kernels

    for function in (rounded_gram_, rounded_symmetric_product_, rounded_product_):
        monkeypatch.setattr(kernels, function.__name__.removeprefix("rounded_"), function)
    batch = ill_conditioned(shape)
    (directions,) = orthogonalise_([(batch.bfloat16(), 1 / batch.norm(dim=(1, 2)), None)])
    assert torch.linalg.matrix_norm(directions.float(), 2).max() < 1.3


@pytest.mark.gpu
def test_the_muon_update_on_a_gpu_gives_the_same_as_pytorch():
    weights, momenta = update_errors("cuda", [*SHAPES, (512, 512), (768, 768), (2048, 512), (512, 2048)])
    assert weights < 0.05, "directions are in bf16"
    assert momenta < 1e-5
    assert is_unchanged("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 512), (1024, 512), (512, 2048)])
def test_the_temporaries_of_an_update_on_a_gpu_take_8_bytes_per_element_of_a_batch(shape):
    batch = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for _ in range(8)]
    other = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = muon.Muon(FlatParams([other], batch, [], torch.float32), torch.tensor(0.01, device="cuda"))
    numbers = optimizer.param_groups[0]["lr"], torch.ones((), device="cuda"), 0.95, 0.0
    optimizer.update_in_kernels(*numbers)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.update_in_kernels(*numbers)
    assert torch.cuda.max_memory_allocated() - before <= 8.02 * optimizer.weights.numel(), "needed_bytes counts 8"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 512), (256, 128), (2048, 512), (512, 2048)])
def test_on_a_gpu_the_singular_values_of_an_ill_conditioned_matrix_are_those_of_the_plain_path(shape):
    generator, rank = torch.Generator().manual_seed(0), min(shape)
    spectra = torch.ones(rank), torch.logspace(0, -4, rank), 1.0 * (torch.arange(rank) < 16)
    others = torch.stack([matrix_with(values, shape, generator) for values in spectra])
    batch = torch.cat([others, ill_conditioned(shape)]).cuda()
    (ours,) = orthogonalise_([(batch.bfloat16(), 1 / batch.norm(dim=(1, 2)), None)])
    ours, plain = (torch.linalg.svdvals(x.float()) for x in (ours, orthogonal(batch)))
    assert (ours - plain).abs().max() < 0.1
    assert (ours - plain).abs().mean() < 0.03
