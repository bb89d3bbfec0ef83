"""Newton-Schulz iteration in PyTorch, and in Triton kernels, which compute half of each symmetric product.

A step maps x, of shape (M, N) with M <= N, to (a + b G + c G^2) x with the Gram matrix G = x x^T (M, M): an odd
polynomial of the singular values. Tall matrices use x^T x from the right. Long matrices iterate on G alone, because the
matrix of a step commutes with G: after several steps x is multiplied once.
"""

import torch

# a, b, c of each step. Together they map singular values from 0.0025 to 1 into 0.73 to 1.27: the minimax polynomials of
# Amsel et al. 2025 (arXiv 2505.16932, algorithm 1). Intervals end 2, 1, 1 and 1 % later than theirs, because a value
# that rounding lifts above the end grows without bound.
COEFFICIENTS = (
    (8.2424, -23.4253, 16.6938),
    (4.0422, -2.9501, 0.5451),
    (3.5919, -2.6379, 0.5108),
    (2.6319, -1.9219, 0.4332),
)
LEAST_RATIO = 2  # of the sides of a long matrix; below it, iterating on the Gram matrix costs more than it saves
# Steps on one Gram matrix before x is multiplied and its Gram matrix computed anew. After more of them rounding makes
# eigenvalues of ill-conditioned Gram matrices negative, and those grow.
LONG_PARTS = COEFFICIENTS[:2], COEFFICIENTS[2:]


def orthogonalise_(parts):
    """List of each part's x times its inverse norms, with all singular values moved near 1, as in `orthogonal`.

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

    out, (gram,) = torch.empty_like(x), _new_grams([x], 1)
    polynomial = torch.empty_like(gram, dtype=x.dtype)
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
    grams, sizes = _new_grams(xs, 3), [len(x) for x in xs]
    for number, two_steps in enumerate(LONG_PARTS, start=1):
        scales = norms if number == 1 else [None] * len(xs)
        for gram, x, scale in zip(grams[0].split(sizes), xs, scales, strict=True):
            gram_(gram, x, scale)
        products = _product_of_two_steps(*grams, two_steps, xs[0].dtype).split(sizes)
        goals = (
            [target or out for target, out in zip(targets, outs, strict=True)] if number == len(LONG_PARTS) else outs
        )
        pairs = zip(goals, products, xs, scales, strict=True)
        xs, outs = [_multiply_(goal, product, x, 0.0, scale) for goal, product, x, scale in pairs], xs
    return xs


def _product_of_two_steps(gram, first, spare, coefficients, dtype):
    """The product of the matrices a + b G + c G^2 of two steps, (B, M, M) in `dtype`; `gram` is G of the first.

    Overwrites `gram`, `first` and `spare`, all (B, M, M). The result lies where `gram` was, whose numbers have as many
    bytes as those of `dtype`.
    """
    from model.nn.kernels.muon import symmetric_product_

    (a, b, c), (next_a, next_b, next_c) = coefficients
    symmetric_product_(first, gram, gram, gram, alpha=c, beta=b)  # without a, beside which small numbers lose digits
    symmetric_product_(spare, first, gram, gram, beta=a)
    symmetric_product_(gram, first, spare, spare, beta=a)
    first.diagonal(dim1=1, dim2=2).add_(a)
    symmetric_product_(spare, gram, gram, gram, alpha=next_c, beta=next_b)
    return symmetric_product_(gram.view(dtype), spare, first, first, beta=next_a)


def _new_grams(xs, number):
    """`number` tensors for the Gram matrices of all `xs`, in float16 if those are in bf16.

    float16 has three bits more, which keeps eigenvalues from becoming negative, and all numbers here are below 100.
    """
    short, dtype = min(xs[0].shape[1:]), torch.float16 if xs[0].dtype == torch.bfloat16 else xs[0].dtype
    return [xs[0].new_empty(sum(map(len, xs)), short, short, dtype=dtype) for _ in range(number)]


def _multiply_(out, matrices, x, beta, scales):
    """out = scales * (matrices + beta) x, from the right if x is tall; `out` may be a Subtraction."""
    from model.nn.kernels.muon import product_

    left, right = (x, matrices) if x.shape[1] > x.shape[2] else (matrices, x)
    return product_(out, left, right, x if beta else None, beta, scales)


def orthogonal(matrices_BMN):
    """`matrices_BMN` (B, M, N) with all singular values moved near 1; computed in bf16 on a GPU.

    All singular values are divided by the matrix's norm first. Those of at least 0.0025 then end between 0.73 and 1.27;
    smaller ones are multiplied by 315 at most.
    """
    tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if tall else matrices_BMN
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype, memory_format=torch.contiguous_format)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
