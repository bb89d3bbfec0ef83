"""Triton kernels of Muon's update: momentum, symmetric and general products of matrices in batches, the weights.

A product that is symmetric is computed in the tiles on and below its diagonal, and what is below the diagonal is
mirrored when it is stored: symmetric to the bit, because an iteration on products that rounding left unsymmetric
diverges on tall ill-conditioned matrices. Sums are in float32 whatever the dtype of the matrices, and no two programs
write to the same address, so results are bit-identical in every run.

Letters: B matrices; M rows and N columns of a product per tile, K terms of its sums at a time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 4096  # numbers per program of the passes over flat tensors
NORM_FLOOR = 1e-12  # leaves a matrix of zeros at zero
# 3 stages of two bf16 tiles take 96 KiB; an RTX 30 or 40 has 99 KiB of shared memory per block.
# With 128 registers a thread two programs share a multiprocessor; without the limit the symmetric product takes 152.
SYMMETRIC_TILES = dict(M=128, N=128, K=64, num_warps=8, num_stages=3, maxnreg=128)
PRODUCT_TILES = dict(M=128, N=128, K=64, num_warps=8, num_stages=3, maxnreg=128)


@triton.jit
def momentum_and_squares(
    WEIGHTS, GRADIENTS, MOMENTA, DIRECTIONS, SUMS, SCALE, size, momentum, TILE: tl.constexpr
):  # fmt: skip
    """One tile of MOMENTA, updated if SCALE is above 0, and of DIRECTIONS, the momentum that Nesterov's step sees.

    SUMS (2, B, tiles) = the tile's sums of the squares of DIRECTIONS and of WEIGHTS. A matrix has `size` numbers.
    """
    matrix, num_programs = tl.program_id(1), tl.num_programs(0) * tl.num_programs(1)
    inside = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_real, offsets = inside < size, matrix * size + inside
    scale = tl.load(SCALE)
    gradient = tl.load(GRADIENTS + offsets, mask=is_real, other=0.0) * scale
    total = tl.load(MOMENTA + offsets, mask=is_real, other=0.0) * momentum + gradient
    direction = gradient + momentum * total
    weight = tl.load(WEIGHTS + offsets, mask=is_real, other=0.0)
    tl.store(MOMENTA + offsets, total, mask=inside < tl.where(scale > 0, size, 0))
    tl.store(DIRECTIONS + offsets, direction.to(DIRECTIONS.dtype.element_ty), mask=is_real)
    SUMS += matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(SUMS, tl.sum(direction * direction))
    tl.store(SUMS + num_programs, tl.sum(weight * weight))


@triton.jit(do_not_specialize=["num_tiles", "num_sums"])
def norms_and_factors(
    SUMS, INVERSE_NORMS, FACTORS, RATE, size, num_tiles, num_sums, step_rms, rms_floor, norm_floor, TILE: tl.constexpr
):  # fmt: skip
    """INVERSE_NORMS (B,) of the directions; FACTORS (B,) = rate * step_rms * max(rms_floor, RMS of the weights)."""
    matrix, squares, weight_squares = tl.program_id(0), 0.0, 0.0
    for first in range(0, num_tiles, TILE):
        tiles = first + tl.arange(0, TILE)
        offsets, is_real = matrix * num_tiles + tiles, tiles < num_tiles
        squares += tl.sum(tl.load(SUMS + offsets, mask=is_real, other=0.0))
        weight_squares += tl.sum(tl.load(SUMS + num_sums + offsets, mask=is_real, other=0.0))
    tl.store(INVERSE_NORMS + matrix, 1.0 / (tl.sqrt(squares) + norm_floor))
    rms = tl.maximum(tl.sqrt(weight_squares / size), rms_floor)
    tl.store(FACTORS + matrix, tl.load(RATE) * step_rms * rms)


@triton.jit
def _triangle_tile(tile):
    """(row, column) of a tile, counted row by row on and below the diagonal."""
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)  # where the square root is rounded up
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    return row, tile - row * (row + 1) // 2


@triton.jit
def _load_tile(POINTERS, row_is_real, term_is_real, IS_EVEN: tl.constexpr):
    """A tile (rows, terms) of a matrix; zeros outside it."""
    if IS_EVEN:
        return tl.load(POINTERS)
    return tl.load(POINTERS, mask=row_is_real[:, None] & term_is_real[None, :], other=0.0)


@triton.jit
def _sums_of_tile(
    LEFT, RIGHT, rows, columns, num_rows, num_columns, num_terms,
    stride_left_row, stride_left_term, stride_right_column, stride_right_term,
    IS_EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile (rows, columns) of LEFT @ RIGHT in float32."""
    terms, sums = tl.arange(0, K), tl.zeros([M, N], tl.float32)
    LEFT += rows[:, None] * stride_left_row + terms[None, :] * stride_left_term
    RIGHT += columns[:, None] * stride_right_column + terms[None, :] * stride_right_term
    for first in range(0, num_terms, K):
        left = _load_tile(LEFT, rows < num_rows, first + terms < num_terms, IS_EVEN)
        right = _load_tile(RIGHT, columns < num_columns, first + terms < num_terms, IS_EVEN)
        sums = tl.dot(left, tl.trans(right), sums)
        LEFT += K * stride_left_term
        RIGHT += K * stride_right_term
    return sums


@triton.jit
def _product_of_tile(
    LEFT, RIGHT, ADDEND, SCALES, rows, columns, num_rows, num_columns, num_terms,
    stride_left_row, stride_left_term, stride_right_column, stride_right_term, alpha, beta, power,
    IS_EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """(a tile of SCALES^power * (alpha * LEFT @ RIGHT + beta * ADDEND) in float32, its places in memory, which exist).

    What a factor of 0 multiplies is not read.
    """
    matrix = tl.program_id(1)
    sums = alpha * _sums_of_tile(
        LEFT + matrix * num_rows * num_terms, RIGHT + matrix * num_columns * num_terms, rows, columns,
        num_rows, num_columns, num_terms, stride_left_row, stride_left_term, stride_right_column, stride_right_term,
        IS_EVEN, M, N, K,
    )  # fmt: skip
    places = matrix * num_rows * num_columns + rows[:, None] * num_columns + columns[None, :]
    is_real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    if beta != 0.0:
        sums += beta * tl.load(ADDEND + places, mask=is_real, other=0.0).to(tl.float32)
    if power > 0:
        scale = tl.load(SCALES + matrix)
        sums *= tl.where(power == 2, scale * scale, scale)
    return sums, places, is_real


@triton.jit(do_not_specialize=["power"])
def matrix_products(
    LEFT, RIGHT, ADDEND, OUT, SCALES, num_rows, num_columns, num_terms,
    stride_left_row, stride_left_term, stride_right_column, stride_right_term, alpha, beta, power,
    SYMMETRIC: tl.constexpr, IS_EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile of OUT = SCALES^power * (alpha * LEFT @ RIGHT + beta * ADDEND), each (B, ., .) without gaps.

    `power` is 0, 1 or 2; SCALES (B,) is not read if it is 0, nor ADDEND if `beta` is 0. With SYMMETRIC what is below
    the diagonal is also stored above it. With IS_EVEN the tiles divide all sizes. The numbers are arguments at run
    time, so that six kernels serve all products.
    """
    if SYMMETRIC:
        row, column = _triangle_tile(tl.program_id(0))
    else:
        row, column = tl.program_id(0) // tl.cdiv(num_columns, N), tl.program_id(0) % tl.cdiv(num_columns, N)
    rows, columns = row * M + tl.arange(0, M), column * N + tl.arange(0, N)
    sums, places, is_real = _product_of_tile(
        LEFT, RIGHT, ADDEND, SCALES, rows, columns, num_rows, num_columns, num_terms, stride_left_row,
        stride_left_term, stride_right_column, stride_right_term, alpha, beta, power, IS_EVEN, M, N, K,
    )  # fmt: skip
    out = sums.to(OUT.dtype.element_ty)
    if SYMMETRIC:
        if row == column:  # not with a mask in each store, which would then write one number at a time
            out = tl.where(rows[:, None] >= columns[None, :], out, tl.trans(out))
        else:
            mirrored = tl.program_id(1) * num_rows * num_columns + columns[:, None] * num_columns + rows[None, :]
            tl.store(OUT + mirrored, tl.trans(out), mask=tl.trans(is_real))
    tl.store(OUT + places, out, mask=is_real)


@triton.jit(do_not_specialize=["power"])
def subtract_products(
    LEFT, RIGHT, ADDEND, WEIGHTS, SCALES, FACTORS, SCALE, num_rows, num_columns, num_terms,
    stride_left_row, stride_left_term, stride_right_column, stride_right_term, beta, power, decay,
    IS_EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile of WEIGHTS = (1 - FACTORS * decay) * WEIGHTS - FACTORS * (a product as in matrix_products).

    Nothing is written unless SCALE is above 0.
    """
    row, column = tl.program_id(0) // tl.cdiv(num_columns, N), tl.program_id(0) % tl.cdiv(num_columns, N)
    rows, columns = row * M + tl.arange(0, M), column * N + tl.arange(0, N)
    sums, places, is_real = _product_of_tile(
        LEFT, RIGHT, ADDEND, SCALES, rows, columns, num_rows, num_columns, num_terms, stride_left_row,
        stride_left_term, stride_right_column, stride_right_term, 1.0, beta, power, IS_EVEN, M, N, K,
    )  # fmt: skip
    factor = tl.load(FACTORS + tl.program_id(1))
    weights = tl.load(WEIGHTS + places, mask=is_real, other=0.0) * (1 - factor * decay)
    is_written = is_real & (rows < tl.where(tl.load(SCALE) > 0, num_rows, 0))[:, None]
    tl.store(WEIGHTS + places, weights - factor * sums, mask=is_written)


@dataclass(frozen=True)
class Subtraction:
    """What is subtracted from weights (B, M, N): their matrix's factor times a product and `decay` times the weight.

    `factors` (B,) and `scale` are on the device; a `scale` that is not above 0 leaves the weights unchanged.
    """

    weights: torch.Tensor
    factors: torch.Tensor
    scale: torch.Tensor
    decay: float


def nesterov_directions(weights_BMN, gradients_BMN, momenta_BMN, rate, scale, numbers):
    """(directions (B, M, N), inverse norms (B,), factors (B,)); the momenta (B, M, N) are updated in place.

    Directions are in bf16 on a GPU and not yet divided by their norms. `numbers`: the momentum, the RMS of a step at
    rate 1, and the least RMS of a matrix that a step is proportional to. `rate` and `scale`, a factor of the gradients,
    are tensors on the device: no value is read on the host. A `scale` that is not above 0 leaves the momenta unchanged.
    """
    momentum, step_rms, rms_floor = numbers
    num_matrices, size = len(weights_BMN), weights_BMN[0].numel()
    grid = (triton.cdiv(size, TILE), num_matrices)
    directions = torch.empty_like(weights_BMN, dtype=torch.bfloat16 if weights_BMN.is_cuda else None)
    sums, *results = (weights_BMN.new_empty(sizes) for sizes in ((2, *grid[::-1]), num_matrices, num_matrices))
    momentum_and_squares[grid](
        weights_BMN, gradients_BMN, momenta_BMN, directions, sums, scale, size, momentum, TILE=TILE, num_warps=8
    )
    numbers = (size, grid[0], sums[0].numel(), step_rms, rms_floor, NORM_FLOOR)
    norms_and_factors[(num_matrices,)](sums, *results, rate, *numbers, TILE=1024)
    return directions, *results


def gram_(out, x_BMN, scales=None):
    """out (B, S, S) = the Gram matrices of x along its shorter side S, times the squares of `scales` (B,).

    `out` may have another dtype than x, here and in the two products below.
    """
    x = x_BMN.mT if x_BMN.shape[1] > x_BMN.shape[2] else x_BMN
    return _launch(out, x, x.mT, None, 1.0, 0.0, scales, power=2, symmetric=True)


def symmetric_product_(out, left, right, addend, alpha=1.0, beta=0.0):
    """out = alpha * left @ right + beta * addend, of symmetric matrices (B, S, S) whose product is symmetric."""
    return _launch(out, left, right.mT, addend, alpha, beta, None, power=0, symmetric=True)


def product_(out, left, right, addend=None, beta=0.0, scales=None):
    """out = scales * (left @ right + beta * addend), in batches; an `out` that is a Subtraction changes its weights."""
    if isinstance(out, Subtraction):
        return _subtract(out, left, right, addend, beta, scales)
    return _launch(out, left, right, addend, 1.0, beta, scales, power=1, symmetric=False)


def _launch(out, left, right, addend, alpha, beta, scales, power, symmetric):
    tiles = SYMMETRIC_TILES if symmetric else PRODUCT_TILES
    addend, scales, power = out if addend is None else addend, *_scales_or_none(scales, power, out)
    matrix_products[_grid(left, right, tiles, symmetric)](
        left, right, addend, out, scales, *_sizes_and_strides(left, right), alpha, beta, power, SYMMETRIC=symmetric,
        IS_EVEN=_is_even(left, right, tiles), **tiles,
    )  # fmt: skip
    return out


def _subtract(target, left, right, addend, beta, scales):
    addend, scales, power = left if addend is None else addend, *_scales_or_none(scales, 1, target.factors)
    subtract_products[_grid(left, right, PRODUCT_TILES, symmetric=False)](
        left, right, addend, target.weights, scales, target.factors, target.scale,
        *_sizes_and_strides(left, right), beta, power, target.decay,
        IS_EVEN=_is_even(left, right, PRODUCT_TILES), **PRODUCT_TILES,
    )  # fmt: skip
    return target.weights


def _scales_or_none(scales, power, like):
    """(SCALES, power) as the kernels take them: without `scales` a stand-in of their dtype, which is not read."""
    return (like.new_empty(1, dtype=torch.float32), 0) if scales is None else (scales, power)


def _grid(left, right, tiles, symmetric):
    down, across = triton.cdiv(left.shape[1], tiles["M"]), triton.cdiv(right.shape[2], tiles["N"])
    return down * (down + 1) // 2 if symmetric else down * across, len(left)


def _is_even(left, right, tiles):
    """True if the tiles divide all sizes of the product: then nothing needs a mask."""
    return all(n % tiles[x] == 0 for n, x in ((left.shape[1], "M"), (right.shape[2], "N"), (left.shape[2], "K")))


def _sizes_and_strides(left, right):
    sizes = left.shape[1], right.shape[2], left.shape[2]
    return *sizes, *left.stride()[1:], right.stride(2), right.stride(1)
