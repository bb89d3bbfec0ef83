"""Triton kernel: the update of AdamW with RMS scaling, over flat tensors in one pass."""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

TILE = 4096  # weights of one update program


@triton.jit
def sums_of_squares(X, TILES, SUMS, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """SUMS of the squares of each tile of X."""
    places = tl.multiple_of(tl.load(TILES + 3 * tl.program_id(0) + 1), ALIGNMENT) + tl.arange(0, TILE)
    x = tl.load(X + places, mask=places < tl.load(TILES + 3 * tl.program_id(0) + 2), other=0.0)
    tl.store(SUMS + tl.program_id(0), tl.sum(x * x))


@triton.jit
def adamw_rms(
    WEIGHTS, GRADIENTS, AVERAGES, SQUARES, TILES, TENSORS, SIZES, SUMS, RATE, SCALE,
    beta1, beta2, correction1, root_correction2, epsilon, weight_decay, rms_floor,
    TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One tile of RMSScaledAdamW's update; SUMS: of the squares of the tiles of WEIGHTS."""
    tensor = tl.load(TILES + 3 * tl.program_id(0))
    total, last_tile = 0.0, tl.load(TENSORS + tensor + 1)
    for first_tile in range(tl.load(TENSORS + tensor), last_tile, 1024):
        tiles = first_tile + tl.arange(0, 1024)
        total += tl.sum(tl.load(SUMS + tiles, mask=tiles < last_tile, other=0.0))
    rate = tl.load(RATE)
    step = rate * tl.maximum(tl.sqrt(total / tl.load(SIZES + tensor)), rms_floor) / correction1
    places = tl.multiple_of(tl.load(TILES + 3 * tl.program_id(0) + 1), ALIGNMENT) + tl.arange(0, TILE)
    real = places < tl.load(TILES + 3 * tl.program_id(0) + 2)
    scale = tl.load(SCALE)
    gradient = tl.load(GRADIENTS + places, mask=real, other=0.0) * scale
    average = tl.load(AVERAGES + places, mask=real, other=0.0)
    average += (gradient - average) * (1 - beta1)
    square = tl.load(SQUARES + places, mask=real, other=0.0) * beta2 + gradient * gradient * (1 - beta2)
    update = average / (tl.sqrt(square) / root_correction2 + epsilon)
    weight = tl.load(WEIGHTS + places, mask=real, other=0.0)
    tl.store(WEIGHTS + places, weight * (1 - rate * weight_decay) - step * update, mask=real)
    tl.store(AVERAGES + places, average, mask=real)
    tl.store(SQUARES + places, square, mask=real)


@dataclass(frozen=True)
class UpdateTiles:
    """Neighbouring tensors cut into tiles, none of which belongs to two."""

    tiles: torch.Tensor  # (tiles, 3) int32: tensor, first place, last place + 1
    tensors: torch.Tensor  # (tensors + 1,) int32: the first tile of each
    sizes: torch.Tensor  # (tensors,) float32: numbers in each, without its padding
    alignment: int  # divides all first places: 16 where loads and stores can be wide


def update_tiles(padded_sizes, sizes, device):
    """UpdateTiles of tensors that take `padded_sizes` numbers each and hold `sizes`."""
    ends = np.cumsum(padded_sizes).tolist()
    tiles = [
        (tensor, first, min(first + TILE, end))
        for tensor, (size, end) in enumerate(zip(padded_sizes, ends, strict=True))
        for first in range(end - size, end, TILE)
    ]
    first_tiles = np.searchsorted([tile[0] for tile in tiles], np.arange(len(sizes) + 1))
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (tiles, first_tiles.tolist())]
    alignment = 16 if all(first % 16 == 0 for _, first, _ in tiles) else 1
    return UpdateTiles(*tensors, torch.tensor(sizes, dtype=torch.float32, device=device), alignment)


def update_adamw_rms(
    weights, gradients, averages, squares, tiles, rate, scale,
    beta1, beta2, correction1, correction2, epsilon, weight_decay, rms_floor,
):  # fmt: skip
    """RMSScaledAdamW's update of flat tensors in place; `rate` and `scale` (of the gradients) are on the device."""
    grid, options = (len(tiles.tiles),), dict(TILE=TILE, ALIGNMENT=tiles.alignment, num_warps=8)
    sums = torch.empty(len(tiles.tiles), device=weights.device)
    sums_of_squares[grid](weights, tiles.tiles, sums, **options)
    adamw_rms[grid](
        weights, gradients, averages, squares, tiles.tiles, tiles.tensors, tiles.sizes, sums, rate, scale,
        beta1, beta2, correction1, correction2**0.5, epsilon, weight_decay, rms_floor, **options,
    )  # fmt: skip
