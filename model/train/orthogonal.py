"""Newton-Schulz iteration in PyTorch, and in Triton kernels, which compute half of each symmetric product.

A step maps x, of shape (M, N) with M <= N, to (a + b G + c G^2) x with the Gram matrix G = x x^T (M, M): an odd
polynomial of the singular values. Tall matrices use x^T x from the right. Long matrices iterate on G alone, because the
matrix of a step commutes with G: after several steps x is multiplied once.
"""

import torch

COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5  # a, b, c of each step: Jordan et al. 2024, as `orthogonal`
LEAST_RATIO = 2  # of the sides of a long matrix; below it, iterating on the Gram matrix costs more than it saves
# Steps on one Gram matrix before x is multiplied and its Gram matrix computed anew. With five, rounding to bf16 makes
# eigenvalues of ill-conditioned Gram matrices negative, and those diverge.
LONG_PARTS = COEFFICIENTS[:3], COEFFICIENTS[3:]


def orthogonalise_(parts):
    """List of each part's x times its inverse norms, with all singular values moved near 1.

    `parts` are (x (B, M, N), inverse norms (B,), target): one, or several that are long and have one shorter side. x is
    overwritten. A target that is a Subtraction takes the last product, and its weights are returned; else it is None.
    Besides each x at most three tensors of its size are held.
    """
    if is_long(*parts[0][0].shape[1:]):
        return _iterate_on_gram(parts)
    return [_iterate(*part) for part in parts]


def is_long(rows, columns):
    """True if iterating on the Gram matrix takes fewer operations than on the matrix."""
    return max(rows, columns) >= LEAST_RATIO * min(rows, columns)


def _iterate(x, inverse_norms, target):
    from model.nn.kernels.muon import gram_, symmetric_product_

    out, (gram, polynomial) = torch.empty_like(x), _new_grams([x], 2)
    for step, (a, b, c) in enumerate(COEFFICIENTS, start=1):
        scales = inverse_norms if step == 1 else None
        gram_(gram, x, scales)
        symmetric_product_(polynomial, gram, gram, gram, alpha=c, beta=b)
        is_last = step == len(COEFFICIENTS)
        x, out = _multiply_(target if target and is_last else out, polynomial, x, a, scales), x
    return x


def _iterate_on_gram(parts):
    from model.nn.kernels.muon import gram_

    (xs, norms, targets), outs = zip(*parts, strict=True), [torch.empty_like(x) for x, *_ in parts]
    grams, sizes = _new_grams(xs, 4), [len(x) for x in xs]
    for number, coefficients in enumerate(LONG_PARTS, start=1):
        scales = norms if number == 1 else [None] * len(xs)
        for gram, x, scale in zip(grams[0].split(sizes), xs, scales, strict=True):
            gram_(gram, x, scale)
        products = _product_of_steps(grams, coefficients).split(sizes)
        goals = (
            [target or out for target, out in zip(targets, outs, strict=True)] if number == len(LONG_PARTS) else outs
        )
        pairs = zip(goals, products, xs, scales, strict=True)
        xs, outs = [_multiply_(goal, product, x, 0.0, scale) for goal, product, x, scale in pairs], xs
    return xs


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


def _new_grams(xs, number):
    short = min(xs[0].shape[1:])
    return [xs[0].new_empty(sum(map(len, xs)), short, short) for _ in range(number)]


def _multiply_(out, matrices, x, beta, scales):
    """out = scales * (matrices + beta) x, from the right if x is tall; `out` may be a Subtraction."""
    from model.nn.kernels.muon import product_

    left, right = (x, matrices) if x.shape[1] > x.shape[2] else (matrices, x)
    return product_(out, left, right, x if beta else None, beta, scales)


def orthogonal(matrices_BMN):
    """`matrices_BMN` (B, M, N) with all singular values moved near 1; computed in bf16 on a GPU.

    Five steps of the Newton-Schulz iteration with the coefficients of Jordan et al. 2024.
    """
    tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if tall else matrices_BMN
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype, memory_format=torch.contiguous_format)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x
