"""Orthogonalisation by Newton-Schulz steps: which singular values it gives."""

import torch

from model.train.orthogonal import COEFFICIENTS, orthogonal


def test_orthogonal_keeps_the_singular_vectors_and_moves_the_singular_values_near_1():
    torch.manual_seed(0)
    for shape in ((24, 8), (8, 24), (16, 16)):
        batch = torch.randn(3, *shape)
        orthogonalised = orthogonal(batch)
        for one, other in zip(batch, orthogonalised, strict=True):
            left, _, right = torch.linalg.svd(one, full_matrices=False)
            values = torch.diag(left.T @ other @ right.T)
            assert 0.5 < values.min() and values.max() < 1.5
            torch.testing.assert_close(left @ torch.diag(values) @ right, other, rtol=0, atol=1e-4)


def test_orthogonal_moves_all_singular_values_from_a_400th_of_the_norm_on_to_between_0_73_and_1_27():
    values = torch.linspace(0.05, 1, 2000, dtype=torch.float64).square()
    batch = torch.stack([values, (1 - values.square()).sqrt()], dim=1).diag_embed()  # each of norm 1
    moved = orthogonal(batch)[:, 0, 0]
    assert 0.73 < moved.min() and moved.max() < 1.27
    above = torch.linspace(1, 1.02, 100, dtype=torch.float64)  # where rounding takes a value of 1
    for a, b, c in COEFFICIENTS:
        above = above * (a + b * above**2 + c * above**4)
    assert 0.73 < above.min() and above.max() < 1.27
