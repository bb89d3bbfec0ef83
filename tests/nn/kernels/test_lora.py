"""Products with adapters in kernels against PyTorch's: on a CPU in Triton's interpreter, on a GPU as they are."""

import pytest
import torch

from tests.nn.kernels.interpreted import interpreted_errors, relative_error

CASES = [  # rows, inputs, outputs of a weight, weights, those with adapters, rank
    (70, 24, 40, 3, (0, 1, 2), 4),
    (130, 136, 16, 3, (0, 2), 5),
    (65, 16, 130, 1, (0,), 70),
]


def adapter_errors(device, dtype, rows, num_in, num_out, num_weights, places, rank):
    """Relative errors of the merged matrix, of s grad B, and of the gradients of A and B, against float64."""
    from model.nn.kernels.lora import add_gradients, merged

    places, num_adapters = (
        slice(places[0], places[-1] + 1, places[1] - places[0] if len(places) > 1 else 1),
        len(places),
    )
    x, matrix, grad, A, B = (
        torch.randn(*shape, device=device).to(dtype)
        for shape in (
            (rows, num_in), (num_weights * num_out, num_in), (rows, num_weights * num_out),
            (num_adapters, rank, num_in), (num_adapters, num_out, rank),
        )
    )  # fmt: skip
    gradients = [torch.ones(factor.shape, device=device) for factor in (A, B)]
    up = add_gradients(x, grad, (A, B), gradients, places, 1.5)
    ours = merged(matrix, A, B, places, 1.5, False), up.view(rows, num_adapters, rank).transpose(0, 1), *gradients
    x, exact, grad, A, B = (t.double() for t in (x, matrix.clone(), grad, A, B))
    exact.view(num_weights, num_out, num_in)[places] += 1.5 * (B @ A)
    grad = grad.view(rows, num_weights, num_out).transpose(0, 1)[places]
    up = 1.5 * (grad @ B)
    expected = exact, up, up.mT @ x + 1, 1.5 * (grad.mT @ (x @ A.mT)) + 1
    in_place = merged(matrix, A.to(dtype), B.to(dtype), places, 1.5, True)
    assert in_place is matrix
    return [relative_error(*pair) for pair in zip((*ours, in_place), (*expected, exact), strict=True)]


def small_share(device, dtype):
    """What a merged bf16 matrix keeps of an adapter that adds about 1/50 of the matrix's last bit, as a share.

    The input is along A, as that of a trained adapter is.
    """
    from model.nn.kernels.lora import merged

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 512, generator=generator).bfloat16()
    A, B = torch.ones(1, 1, 512), torch.full((1, 64, 1), 1e-4)
    ours = merged(matrix.to(device), A.to(device, dtype), B.to(device, dtype), slice(0, 1, 1), 1.0, False).cpu()
    return ((ours.double() - matrix.double()).sum() / (B[0] @ A[0]).double().sum()).item()


def interpreted():
    return [
        *(error for case in CASES for error in adapter_errors("cpu", torch.float32, *case)),
        abs(1 - small_share("cpu", torch.float32)),
    ]


def test_the_interpreted_products_with_adapters_give_the_same_as_pytorch():
    *errors, lost = interpreted_errors()["tests.nn.kernels.test_lora"]
    assert len(errors) == 5 * len(CASES)
    assert max(errors) < 1e-5
    assert lost < 0.05, "rounding to the nearest loses an adapter that has just begun to learn"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (6912, 768, 3072, 1, (0,), 16), (1536, 768, 768, 3, (0, 1, 2), 16)])
def test_products_with_adapters_in_bf16_are_within_one_percent_of_float64(case):
    assert max(adapter_errors("cuda", torch.bfloat16, *case)) < 1e-2
    assert abs(1 - small_share("cuda", torch.bfloat16)) < 0.05
