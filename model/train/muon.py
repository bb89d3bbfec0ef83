"""Newton-Schulz iteration in Triton kernels, which multiplies half of each symmetric matrix.

A step maps x, of shape (M, N) with M <= N, to (a + b G + c G^2) x with the Gram matrix G = x x^T (M, M): an odd
polynomial of the singular values. Tall matrices use x^T x from the right. Long matrices iterate on G alone, because the
matrix of a step commutes with G: after several steps x is multiplied once.
"""

import torch

A, B, C = 3.4445, -4.7750, 2.0315  # Jordan et al. 2024, github.com/KellerJordan/Muon
NUM_STEPS = 5
LEAST_RATIO = 2  # of the sides of a long matrix; below it, iterating on the Gram matrix costs more than it saves
# Steps on one Gram matrix before x is multiplied and its Gram matrix computed anew. With five, rounding to bf16 makes
# eigenvalues of ill-conditioned Gram matrices negative, and those diverge.
LONG_STEPS = 3, 2


def orthogonalise_(x_BMN, inverse_norms):
    """x (B, M, N) times `inverse_norms` (B,), with all singular values moved near 1; `x` is overwritten.

    Besides `x` it holds at most 6 bytes per element of x in bf16.
    """
    short, long = sorted(x_BMN.shape[1:])
    iterate = _iterate_on_gram if long >= LEAST_RATIO * short else _iterate
    return iterate(x_BMN, inverse_norms)


def _iterate(x, inverse_norms):
    from model.nn.kernels.muon import gram_, symmetric_product_

    out, (gram, polynomial) = torch.empty_like(x), _new_grams(x, 2)
    for step in range(NUM_STEPS):
        scales = None if step else inverse_norms
        gram_(gram, x, scales)
        symmetric_product_(polynomial, gram, gram, gram, alpha=C, beta=B)
        x, out = _multiply_(out, polynomial, x, A, scales), x
    return x


def _iterate_on_gram(x, inverse_norms):
    from model.nn.kernels.muon import gram_

    out, grams = torch.empty_like(x), _new_grams(x, 4)
    for part, num_steps in enumerate(LONG_STEPS):
        scales = None if part else inverse_norms
        gram_(grams[0], x, scales)
        x, out = _multiply_(out, _product_of_steps(grams, num_steps), x, 0.0, scales), x
    return x


def _product_of_steps(grams, num_steps):
    """The product of the matrices a + b G + c G^2 of `num_steps` steps; grams[0] is G of the first step.

    All four of `grams`, (B, M, M) each, are overwritten; the result is one of them.
    """
    from model.nn.kernels.muon import symmetric_product_

    gram, polynomial, product, spare = grams
    for step in range(num_steps):
        symmetric_product_(polynomial, gram, gram, gram, alpha=C, beta=B)  # without a, which bf16 would round with it
        if step:
            product, spare = symmetric_product_(spare, polynomial, product, product, beta=A), product
        else:
            product.copy_(polynomial).diagonal(dim1=1, dim2=2).add_(A)
        if step < num_steps - 1:
            symmetric_product_(spare, polynomial, gram, gram, beta=A)
            symmetric_product_(gram, polynomial, spare, spare, beta=A)
    return product


def _new_grams(x, number):
    short = min(x.shape[1:])
    return [x.new_empty(len(x), short, short) for _ in range(number)]


def _multiply_(out, matrices, x, beta, scales):
    """out = scales * (matrices + beta) x, from the right if x is tall."""
    from model.nn.kernels.muon import product_

    left, right = (x, matrices) if x.shape[1] > x.shape[2] else (matrices, x)
    return product_(out, left, right, x if beta else None, beta, scales)
