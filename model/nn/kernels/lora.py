"""Triton kernels: matrices with their adapters added, and the gradients of adapters, each in few passes over memory.

The shapes are those of model/nn/adapted_product.py: G adapters of one shape on evenly spaced weights of a product. Sums
over tokens are cut into parts, because a product of so few columns has too few tiles for a GPU; they are added in a
fixed order, so results are bit-identical in every run.
"""

import torch
import triton
import triton.language as tl

MERGE_TILE = dict(OUTS=64, INS=128)  # of a matrix
PROJECT_TILE = dict(ROWS=64, K=128)  # tokens, and columns that are summed
GRADIENT_TILE = dict(ROWS=64, COLUMNS=128)  # tokens that are summed, and columns
MOST_RANKS = 64  # of an adapter, in a tile
PROGRAMS = 264  # two for each multiprocessor of an H200
GOLDEN = tl.constexpr(0x9E3779B1)  # 2^32 divided by the golden ratio
NUMBERS = 1024  # of a program that adds parts


@triton.jit(do_not_specialize=["first", "step"])
def add_adapters(
    W, A, B, OUT, num_out, num_in, rank, first, step, scale,
    OUTS: tl.constexpr, INS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """OUT = W + scale * B A for the matrices `first`, `first` + `step`, …; one program per tile.

    In bf16 a number is rounded up or down by a fixed threshold of its own (a dither), so that over many numbers the
    adapter counts in full. Rounded to the nearest, one that adds less than half of W's last bit would add nothing.
    """
    adapter = tl.program_id(2)
    outs, ins = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.program_id(1) * INS + tl.arange(0, INS)
    is_out, is_in = (outs < num_out)[:, None], (ins < num_in)[None, :]
    total = tl.zeros([OUTS, INS], tl.float32)
    for first_rank in range(0, rank, RANKS):
        ranks = first_rank + tl.arange(0, RANKS)
        b_rows, a_rows = (adapter * num_out + outs)[:, None], (adapter * rank + ranks)[:, None]
        b = tl.load(B + b_rows * rank + ranks[None, :], mask=is_out & (ranks < rank)[None, :], other=0.0)
        a = tl.load(A + a_rows * num_in + ins[None, :], mask=(ranks < rank)[:, None] & is_in, other=0.0)
        total = tl.dot(b, a, total)
    offsets = ((first + adapter * step) * num_out + outs)[:, None].to(tl.int64) * num_in + ins[None, :]
    total = tl.load(W + offsets, mask=is_out & is_in, other=0.0).to(tl.float32) + total * scale
    if OUT.dtype.element_ty == tl.bfloat16:
        dither = (offsets.to(tl.uint32) * GOLDEN) >> 16  # evenly spread whatever the order of offsets
        total = ((total.to(tl.uint32, bitcast=True) + dither) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(OUT + offsets, total.to(OUT.dtype.element_ty), mask=is_out & is_in)


@triton.jit
def _rows_times(
    X, stride, M, stride_k, stride_r, rows, num_rows, ranks, rank, width,
    ROWS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """X's rows, (ROWS, width), times M (width, RANKS)."""
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for first in range(0, width, K):
        columns = first + tl.arange(0, K)
        is_real = (rows < num_rows)[:, None] & (columns < width)[None, :]
        x = tl.load(X + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=is_real, other=0.0)
        is_real = (columns < width)[:, None] & (ranks < rank)[None, :]
        m = tl.load(M + columns[:, None] * stride_k + ranks[None, :] * stride_r, mask=is_real, other=0.0)
        total = tl.dot(x, m, total)
    return total


@triton.jit(do_not_specialize=["num_rows", "first", "step", "num_adapters"])
def project(
    X, GRAD, A, B, OUT, num_rows, num_in, num_out, stride_grad, rank, first, step, num_adapters, scale,
    ROWS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """OUT (2, num_rows, G * rank) = scale * X A^T, and scale * GRAD B by adapter; each for one tile of tokens."""
    adapter, kind = tl.program_id(1), tl.program_id(2) % 2
    rows, ranks = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2) // 2 * RANKS + tl.arange(0, RANKS)
    if kind == 0:
        A += adapter * rank * num_in
        total = _rows_times(X, num_in, A, 1, num_in, rows, num_rows, ranks, rank, num_in, ROWS, K, RANKS)
    else:
        GRAD += (first + adapter * step) * num_out
        B += adapter * num_out * rank
        total = _rows_times(GRAD, stride_grad, B, rank, 1, rows, num_rows, ranks, rank, num_out, ROWS, K, RANKS)
    columns = num_adapters * rank
    offsets = (kind * num_rows + rows)[:, None].to(tl.int64) * columns + (adapter * rank + ranks)[None, :]
    is_real = (rows < num_rows)[:, None] & (ranks < rank)[None, :]
    tl.store(OUT + offsets, (total * scale).to(OUT.dtype.element_ty), mask=is_real)


@triton.jit
def _columns_times(
    X, stride, Y, stride_y, columns, width, ranks, rank, first_row, last_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """X^T Y, (COLUMNS, RANKS), of rows from `first_row` to `last_row`."""
    total = tl.zeros([COLUMNS, RANKS], tl.float32)
    for first in range(first_row, last_row, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row, places = (rows < last_row)[:, None], rows[:, None].to(tl.int64)
        x = tl.load(X + places * stride + columns[None, :], mask=is_row & (columns < width)[None, :], other=0.0)
        y = tl.load(Y + places * stride_y + ranks[None, :], mask=is_row & (ranks < rank)[None, :], other=0.0)
        total = tl.dot(tl.trans(x), y, total)
    return total


@triton.jit(do_not_specialize=["num_rows", "first", "step", "num_adapters", "rows_of_part"])
def gradient_parts(
    X, GRAD, PROJECTED, PARTS, num_rows, num_in, num_out, stride_grad, rank, first, step, num_adapters, rows_of_part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """PARTS (parts, G * rank * num_in + G * num_out * rank) = the gradients of A, then those of B, of a part's tokens.

    PROJECTED is what `project` gives.
    """
    tiles_in = tl.cdiv(num_in, COLUMNS)
    adapter = tl.program_id(1) % num_adapters
    ranks = tl.program_id(1) // num_adapters * RANKS + tl.arange(0, RANKS)
    width, first_row = num_adapters * rank, tl.program_id(2) * rows_of_part
    last_row = tl.minimum(first_row + rows_of_part, num_rows)
    PARTS += tl.program_id(2) * (width * (num_in + num_out))
    PROJECTED += adapter * rank
    if tl.program_id(0) < tiles_in:
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        UP = PROJECTED + num_rows.to(tl.int64) * width
        total = _columns_times(
            X, num_in, UP, width, columns, num_in, ranks, rank, first_row, last_row, ROWS, COLUMNS, RANKS
        )
        offsets = (adapter * rank + ranks)[None, :] * num_in + columns[:, None]
        tl.store(PARTS + offsets, total, mask=(columns < num_in)[:, None] & (ranks < rank)[None, :])
    else:
        columns = (tl.program_id(0) - tiles_in) * COLUMNS + tl.arange(0, COLUMNS)
        GRAD += (first + adapter * step) * num_out
        total = _columns_times(
            GRAD, stride_grad, PROJECTED, width, columns, num_out, ranks, rank, first_row, last_row, ROWS, COLUMNS,
            RANKS,
        )  # fmt: skip
        offsets = width * num_in + (adapter * num_out + columns)[:, None] * rank + ranks[None, :]
        tl.store(PARTS + offsets, total, mask=(columns < num_out)[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def add_parts(PARTS, A, B, num_parts, numbers_of_A, numbers, NUMBERS: tl.constexpr):
    """A and B += the sums of PARTS (num_parts, numbers), whose first columns are A's."""
    offsets = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    sums = tl.zeros([NUMBERS], tl.float32)
    for part in range(num_parts):
        sums += tl.load(PARTS + part * numbers + offsets, mask=offsets < numbers, other=0.0)
    is_A, is_B = offsets < numbers_of_A, (offsets >= numbers_of_A) & (offsets < numbers)
    tl.store(A + offsets, tl.load(A + offsets, mask=is_A, other=0.0) + sums, mask=is_A)
    offsets -= numbers_of_A
    tl.store(B + offsets, tl.load(B + offsets, mask=is_B, other=0.0) + sums, mask=is_B)


def merged(matrix, A, B, places, scale, in_place):
    """`matrix` (weights * O, I) with scale * B A added to the weights at `places`; a copy unless `in_place`.

    A is (G, R, I) and B (G, O, R).
    """
    (num_adapters, num_out, rank), num_in = B.shape, A.shape[2]
    is_whole = num_adapters * num_out == len(matrix)
    out = matrix if in_place else torch.empty_like(matrix) if is_whole else matrix.clone()
    grid = triton.cdiv(num_out, MERGE_TILE["OUTS"]), triton.cdiv(num_in, MERGE_TILE["INS"]), num_adapters
    add_adapters[grid](
        matrix if is_whole else out, A, B, out, num_out, num_in, rank, *_spacing(places), scale, RANKS=_ranks(rank),
        **MERGE_TILE,
    )  # fmt: skip
    return out


def add_gradients(x, grad, factors, gradients, places, scale):
    """Add the gradients of adapters to `gradients`; returns scale * grad B (N, G R).

    `factors` and `gradients` are (A (G, R, I), B (G, O, R)); x is (N, I), and the columns of `grad` are those of all
    weights. A part sums as many tokens as give each multiprocessor two tiles.
    """
    (A, B), (num_adapters, num_out, rank) = factors, factors[1].shape
    num_rows, num_in = x.shape
    projected = torch.empty(2, num_rows, num_adapters * rank, dtype=x.dtype, device=x.device)
    sizes = num_rows, num_in, num_out, grad.stride(0), rank, *_spacing(places), num_adapters
    rank_tiles = triton.cdiv(rank, _ranks(rank))
    project[triton.cdiv(num_rows, PROJECT_TILE["ROWS"]), num_adapters, 2 * rank_tiles](
        x, grad, A, B, projected, *sizes, scale, RANKS=_ranks(rank), **PROJECT_TILE
    )
    tiles = sum(triton.cdiv(width, GRADIENT_TILE["COLUMNS"]) for width in (num_in, num_out))
    rows = GRADIENT_TILE["ROWS"]
    wanted = triton.cdiv(PROGRAMS, tiles * num_adapters * rank_tiles)
    rows_of_part = rows * triton.cdiv(triton.cdiv(num_rows, rows), wanted)
    parts = torch.empty(triton.cdiv(num_rows, rows_of_part), A.numel() + B.numel(), device=x.device)
    gradient_parts[tiles, num_adapters * rank_tiles, len(parts)](
        x, grad, projected, parts, *sizes, rows_of_part, RANKS=_ranks(rank), **GRADIENT_TILE
    )
    add_parts[(triton.cdiv(parts.shape[1], NUMBERS),)](
        parts, *gradients, len(parts), A.numel(), parts.shape[1], NUMBERS
    )
    return projected[1]


def _spacing(places):
    """(first place, distance between two)."""
    return places.start, places.step


def _ranks(rank):
    """Ranks of a tile; the products of a GPU take at least 16."""
    return min(max(triton.next_power_of_2(rank), 16), MOST_RANKS)
