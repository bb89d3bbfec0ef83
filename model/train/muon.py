"""Newton-Schulz iteration in Triton kernels, which compute half of each symmetric product.

A step maps x, of shape (M, N) with M <= N, to (a + b G + c G^2) x with the Gram matrix G = x x^T (M, M): an odd
polynomial of the singular values. Tall matrices use x^T x from the right. Long matrices iterate on G alone, because the
matrix of a step commutes with G: after several steps x is multiplied once.
"""

import torch

COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5  # a, b, c of each step: Jordan et al. 2024, as optim.orthogonal
LEAST_RATIO = 2  # of the sides of a long matrix; below it, iterating on the Gram matrix costs more than it saves
# Steps on one Gram matrix before x is multiplied and its Gram matrix computed anew. With five, rounding to bf16 makes
# eigenvalues of ill-conditioned Gram matrices negative, and those diverge.
LONG_PARTS = COEFFICIENTS[:3], COEFFICIENTS[3:]


def orthogonalise_(x_BMN, inverse_norms, target=None):
    """x (B, M, N) times `inverse_norms` (B,), with all singular values moved near 1; `x` is overwritten.

    With a `target`, a Subtraction, the last product goes there, and what it makes of the weights is returned. Besides
    `x` at most three tensors of the size of x are held.
    """
    short, long = sorted(x_BMN.shape[1:])
    iterate = _iterate_on_gram if long >= LEAST_RATIO * short else _iterate
    return iterate(x_BMN, inverse_norms, target)


def _iterate(x, inverse_norms, target):
    from model.nn.kernels.muon import gram_, symmetric_product_

    out, (gram, polynomial) = torch.empty_like(x), _new_grams(x, 2)
    for step, (a, b, c) in enumerate(COEFFICIENTS, start=1):
        scales = inverse_norms if step == 1 else None
        gram_(gram, x, scales)
        symmetric_product_(polynomial, gram, gram, gram, alpha=c, beta=b)
        is_last = step == len(COEFFICIENTS)
        x, out = _multiply_(target if target and is_last else out, polynomial, x, a, scales), x
    return x


def _iterate_on_gram(x, inverse_norms, target):
    from model.nn.kernels.muon import gram_

    out, grams = torch.empty_like(x), _new_grams(x, 4)
    for part, coefficients in enumerate(LONG_PARTS, start=1):
        scales = inverse_norms if part == 1 else None
        gram_(grams[0], x, scales)
        product, is_last = _product_of_steps(grams, coefficients), part == len(LONG_PARTS)
        x, out = _multiply_(target if target and is_last else out, product, x, 0.0, scales), x
    return x


def _product_of_steps(grams, coefficients):
    """The product of the matrices a + b G + c G^2 of some steps, where grams[0] is G of the first step.

    All four of `grams`, (B, M, M) each, are overwritten; the result is one of them.
    """
    from model.nn.kernels.muon import symmetric_product_

    gram, polynomial, product, spare = grams
    for step, (a, b, c) in enumerate(coefficients, start=1):
        symmetric_product_(polynomial, gram, gram, gram, alpha=c, beta=b)  # without a, which bf16 would round with it
        if step == 1:
            product.copy_(polynomial).diagonal(dim1=1, dim2=2).add_(a)
        else:
            product, spare = symmetric_product_(spare, polynomial, product, product, beta=a), product
        if step < len(coefficients):
            symmetric_product_(spare, polynomial, gram, gram, beta=a)
            symmetric_product_(gram, polynomial, spare, spare, beta=a)
    return product


def _new_grams(x, number):
    short = min(x.shape[1:])
    return [x.new_empty(len(x), short, short) for _ in range(number)]


def _multiply_(out, matrices, x, beta, scales):
    """out = scales * (matrices + beta) x, from the right if x is tall; `out` may be a Subtraction."""
    from model.nn.kernels.muon import product_

    left, right = (x, matrices) if x.shape[1] > x.shape[2] else (matrices, x)
    return product_(out, left, right, x if beta else None, beta, scales)
