"""Triton kernels of Muon's update: momentum, symmetric and general products of matrices in batches, the weights.

A product that is symmetric is computed in the tiles on and below its diagonal and mirrored when it is stored. Sums are
in float32 whatever the dtype of the matrices, and no two programs write to the same address, so results are
bit-identical in every run.

Letters: B matrices; M rows and N columns of a product per tile, K terms of its sums at a time.
"""

import torch
import triton
import triton.language as tl

TILE = 4096  # numbers per program of the passes over flat tensors
NORM_FLOOR = 1e-12  # leaves a matrix of zeros at zero
# 3 stages of two bf16 tiles take 96 KiB; an RTX 30 or 40 has 99 KiB of shared memory per block.
SYMMETRIC_TILES = dict(M=128, N=128, K=64, num_warps=8, num_stages=3)
PRODUCT_TILES = dict(M=128, N=128, K=64, num_warps=8, num_stages=3)


@triton.jit
def momentum_and_squares(
    WEIGHTS, GRADIENTS, MOMENTA, DIRECTIONS, SUMS, SCALE, size, momentum, TILE: tl.constexpr
):  # fmt: skip
    """One tile of MOMENTA, updated, and of DIRECTIONS, the momentum that Nesterov's step sees.

    SUMS (2, B, tiles) = the tile's sums of the squares of DIRECTIONS and of WEIGHTS. A matrix has `size` numbers.
    """
    matrix, num_programs = tl.program_id(1), tl.num_programs(0) * tl.num_programs(1)
    inside = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_real, offsets = inside < size, matrix * size + inside
    gradient = tl.load(GRADIENTS + offsets, mask=is_real, other=0.0) * tl.load(SCALE)
    total = tl.load(MOMENTA + offsets, mask=is_real, other=0.0) * momentum + gradient
    direction = gradient + momentum * total
    weight = tl.load(WEIGHTS + offsets, mask=is_real, other=0.0)
    tl.store(MOMENTA + offsets, total, mask=is_real)
    tl.store(DIRECTIONS + offsets, direction.to(DIRECTIONS.dtype.element_ty), mask=is_real)
    SUMS += matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(SUMS, tl.sum(direction * direction))
    tl.store(SUMS + num_programs, tl.sum(weight * weight))


@triton.jit
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
def subtract_directions(WEIGHTS, DIRECTIONS, FACTORS, RATE, size, weight_decay, TILE: tl.constexpr):
    """WEIGHTS = (1 - rate * weight_decay) * WEIGHTS - factor * DIRECTIONS, for one tile of one matrix."""
    matrix = tl.program_id(1)
    inside = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_real, offsets = inside < size, matrix * size + inside
    weight = tl.load(WEIGHTS + offsets, mask=is_real, other=0.0) * (1 - tl.load(RATE) * weight_decay)
    direction = tl.load(DIRECTIONS + offsets, mask=is_real, other=0.0).to(tl.float32)
    tl.store(WEIGHTS + offsets, weight - tl.load(FACTORS + matrix) * direction, mask=is_real)


@triton.jit
def _load_operand(X, rows, num_rows, stride_row, terms, num_terms, stride_term):
    """A tile (rows, terms) of a matrix; zeros outside it."""
    is_real = (rows < num_rows)[:, None] & (terms < num_terms)[None, :]
    return tl.load(X + rows[:, None] * stride_row + terms[None, :] * stride_term, mask=is_real, other=0.0)


@triton.jit
def _triangle_tile(tile):
    """(row, column) of a tile, counted row by row on and below the diagonal."""
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)  # where the square root is rounded up
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    return row, tile - row * (row + 1) // 2


@triton.jit(do_not_specialize=["power"])
def matrix_products(
    LEFT, RIGHT, ADDEND, OUT, SCALES, num_rows, num_columns, num_terms,
    stride_left_row, stride_left_term, stride_right_column, stride_right_term, alpha, beta, power,
    SYMMETRIC: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile of OUT = SCALES^power * (alpha * LEFT @ RIGHT + beta * ADDEND), each (B, ., .) without gaps.

    `power` is 0, 1 or 2; SCALES (B,) is not read if it is 0, nor ADDEND if `beta` is 0. With SYMMETRIC a tile below the
    diagonal is also stored above it. The numbers are arguments at run time, so that four kernels serve all products.
    """
    matrix = tl.program_id(1)
    if SYMMETRIC:
        row, column = _triangle_tile(tl.program_id(0))
    else:
        row, column = tl.program_id(0) // tl.cdiv(num_columns, N), tl.program_id(0) % tl.cdiv(num_columns, N)
    rows, columns, terms = row * M + tl.arange(0, M), column * N + tl.arange(0, N), tl.arange(0, K)
    LEFT += matrix * num_rows * num_terms
    RIGHT += matrix * num_columns * num_terms
    sums = tl.zeros([M, N], tl.float32)
    for first in range(0, num_terms, K):
        left = _load_operand(LEFT, rows, num_rows, stride_left_row, first + terms, num_terms, stride_left_term)
        right = _load_operand(
            RIGHT, columns, num_columns, stride_right_column, first + terms, num_terms, stride_right_term
        )
        sums = tl.dot(left, tl.trans(right), sums)
    sums *= alpha
    places = matrix * num_rows * num_columns + rows[:, None] * num_columns + columns[None, :]
    is_real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    if beta != 0.0:
        sums += beta * tl.load(ADDEND + places, mask=is_real, other=0.0).to(tl.float32)
    if power > 0:
        scale = tl.load(SCALES + matrix)
        sums *= tl.where(power == 2, scale * scale, scale)
    out = sums.to(OUT.dtype.element_ty)
    tl.store(OUT + places, out, mask=is_real)
    if SYMMETRIC:
        if row != column:
            mirrored = matrix * num_rows * num_columns + columns[:, None] * num_columns + rows[None, :]
            tl.store(OUT + mirrored, tl.trans(out), mask=tl.trans(is_real))


def nesterov_directions(weights_BMN, gradients_BMN, momenta_BMN, rate, scale, numbers):
    """(directions (B, M, N), inverse norms (B,), factors (B,)); the momenta are updated in place.

    Directions are in bf16 on a GPU and not yet divided by their norms. `numbers`: the momentum, the RMS of a step at
    rate 1, and the least RMS of a matrix that a step is proportional to. `rate` and `scale`, a factor of the gradients,
    are tensors on the device: no value is read on the host.
    """
    momentum, step_rms, rms_floor = numbers
    num_matrices, size = len(weights_BMN), weights_BMN[0].numel()
    grid = (triton.cdiv(size, TILE), num_matrices)
    directions = torch.empty_like(weights_BMN, dtype=torch.bfloat16 if weights_BMN.is_cuda else None)
    sums, results = weights_BMN.new_empty(2, grid[1], grid[0]), weights_BMN.new_empty(2, num_matrices)
    momentum_and_squares[grid](
        weights_BMN, gradients_BMN, momenta_BMN, directions, sums, scale, size, momentum, TILE=TILE, num_warps=8
    )
    numbers = (size, grid[0], sums[0].numel(), step_rms, rms_floor, NORM_FLOOR)
    norms_and_factors[(num_matrices,)](sums, *results, rate, *numbers, TILE=1024)
    return directions, *results


def subtract_directions_(weights_BMN, directions_BMN, factors, rate, weight_decay):
    """Decay the weights in place by `rate` times `weight_decay`; subtract each matrix's factor times its direction."""
    size = weights_BMN[0].numel()
    grid = (triton.cdiv(size, TILE), len(weights_BMN))
    subtract_directions[grid](weights_BMN, directions_BMN, factors, rate, size, weight_decay, TILE=TILE, num_warps=8)


def gram_(out, x_BMN, scales=None):
    """out (B, S, S) = the Gram matrices of x along its shorter side S, times the squares of `scales` (B,)."""
    x = x_BMN.mT if x_BMN.shape[1] > x_BMN.shape[2] else x_BMN
    return _launch(out, x, x.mT, None, 1.0, 0.0, scales, power=2, symmetric=True)


def symmetric_product_(out, left, right, addend, alpha=1.0, beta=0.0):
    """out = alpha * left @ right + beta * addend, of symmetric matrices (B, S, S) whose product is symmetric."""
    return _launch(out, left, right.mT, addend, alpha, beta, None, power=0, symmetric=True)


def product_(out, left, right, addend=None, beta=0.0, scales=None):
    """out = scales * (left @ right + beta * addend), in batches."""
    return _launch(out, left, right, addend, 1.0, beta, scales, power=1, symmetric=False)


def _launch(out, left, right, addend, alpha, beta, scales, power, symmetric):
    (num_matrices, num_rows, num_terms), num_columns = left.shape, right.shape[2]
    tiles = SYMMETRIC_TILES if symmetric else PRODUCT_TILES
    down, across = triton.cdiv(num_rows, tiles["M"]), triton.cdiv(num_columns, tiles["N"])
    grid = (down * (down + 1) // 2 if symmetric else down * across, num_matrices)
    if scales is None:
        scales, power = out.new_empty(1, dtype=torch.float32), 0
    matrix_products[grid](
        left, right, out if addend is None else addend, out, scales, num_rows, num_columns, num_terms,
        *left.stride()[1:], right.stride(2), right.stride(1), alpha, beta, power, SYMMETRIC=symmetric, **tiles,
    )  # fmt: skip
    return out
