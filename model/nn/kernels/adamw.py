"""Triton kernel: the update of AdamW with RMS scaling, over flat tensors in one pass."""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

TILE = 4096  # weights per program


@triton.jit
def _places(TILES, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """(offsets (TILE,) of this program's tile in the flat tensor, where it ends)."""
    TILES += 3 * tl.program_id(0)
    first, end = tl.multiple_of(tl.load(TILES + 1), ALIGNMENT), tl.multiple_of(tl.load(TILES + 2), ALIGNMENT)
    return first + tl.arange(0, TILE), end


@triton.jit
def sums_of_squares(X, TILES, SUMS, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """SUMS (tiles,) = the sum of the squares of each tile of X. One program per tile."""
    offsets, end = _places(TILES, TILE, ALIGNMENT)
    x = tl.load(X + offsets, mask=offsets < end, other=0.0)
    tl.store(SUMS + tl.program_id(0), tl.sum(x * x))


@triton.jit(do_not_specialize=["first_decayed"])
def adamw_rms(
    WEIGHTS, GRADIENTS, AVERAGES, SQUARES, TILES, TENSORS, SIZES, SUMS, RATE, SCALE, CORRECTIONS,
    first_decayed, beta1, beta2, epsilon, weight_decay, rms_floor,
    TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """RMSScaledAdamW's update of one tile. SUMS (tiles,) holds the sum of squares of each tile of WEIGHTS.

    CORRECTIONS (2,) = what AVERAGES and the root of SQUARES are divided by. Tensors below number `first_decayed` do not
    decay. Nothing is written unless SCALE is above 0.
    """
    tensor = tl.load(TILES + 3 * tl.program_id(0))
    total, last_tile = 0.0, tl.load(TENSORS + tensor + 1)
    for first_tile in range(tl.load(TENSORS + tensor), last_tile, 1024):
        tiles = first_tile + tl.arange(0, 1024)
        total += tl.sum(tl.load(SUMS + tiles, mask=tiles < last_tile, other=0.0))
    rate = tl.load(RATE) * tl.maximum(tl.sqrt(total / tl.load(SIZES + tensor)), rms_floor)
    correction1, root_correction2 = tl.load(CORRECTIONS), tl.load(CORRECTIONS + 1)
    kept = 1 - rate * tl.where(tensor < first_decayed, 0.0, weight_decay)
    offsets, end = _places(TILES, TILE, ALIGNMENT)
    is_real, scale = offsets < end, tl.load(SCALE)
    gradient = tl.load(GRADIENTS + offsets, mask=is_real, other=0.0) * scale
    average = tl.load(AVERAGES + offsets, mask=is_real, other=0.0)
    average += (gradient - average) * (1 - beta1)
    square = tl.load(SQUARES + offsets, mask=is_real, other=0.0) * beta2 + gradient * gradient * (1 - beta2)
    update = average / (tl.sqrt(square) / root_correction2 + epsilon)
    weight = tl.load(WEIGHTS + offsets, mask=is_real, other=0.0)
    is_written = offsets < tl.where(scale > 0, end, 0)
    tl.store(WEIGHTS + offsets, weight * kept - rate / correction1 * update, mask=is_written)
    tl.store(AVERAGES + offsets, average, mask=is_written)
    tl.store(SQUARES + offsets, square, mask=is_written)


@dataclass(frozen=True)
class UpdateTiles:
    """Tensors that lie next to each other in one flat tensor, cut into tiles; no tile spans two tensors."""

    tiles: torch.Tensor  # (tiles, 3) int32: index of the tensor, first offset, last offset + 1
    tensors: torch.Tensor  # (tensors + 1,) int32: first tile of each tensor
    sizes: torch.Tensor  # (tensors,) float32: elements of each, padding excluded
    alignment: int  # divides every offset; with 16, loads and stores are vectorized


def update_tiles(padded_sizes, sizes, device):
    """UpdateTiles of tensors with `sizes` elements that occupy `padded_sizes` elements of the flat tensor."""
    ends = np.cumsum(padded_sizes).tolist()
    tiles = [
        (tensor, first, min(first + TILE, end))
        for tensor, (size, end) in enumerate(zip(padded_sizes, ends, strict=True))
        for first in range(end - size, end, TILE)
    ]
    first_tiles = np.searchsorted([tile[0] for tile in tiles], np.arange(len(sizes) + 1))
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (tiles, first_tiles.tolist())]
    alignment = 16 if all(first % 16 == end % 16 == 0 for _, first, end in tiles) else 1
    return UpdateTiles(*tensors, torch.tensor(sizes, dtype=torch.float32, device=device), alignment)


def update_adamw_rms(weights, gradients, averages, squares, tiles, first_decayed, on_device, numbers):
    """Update flat tensors in place as RMSScaledAdamW does; those before number `first_decayed` do not decay.

    `on_device` are tensors, so that no value is read on the host: the rate, the scale of the gradients (one that is not
    above 0 changes nothing), and what the averages and the roots of the squares are divided by. `numbers`: both betas,
    epsilon, the weight decay, and the least RMS of a tensor that a step is proportional to.
    """
    grid, options = (len(tiles.tiles),), dict(TILE=TILE, ALIGNMENT=tiles.alignment, num_warps=8)
    sums = torch.empty(len(tiles.tiles), device=weights.device)
    sums_of_squares[grid](weights, tiles.tiles, sums, **options)
    adamw_rms[grid](
        weights, gradients, averages, squares, tiles.tiles, tiles.tensors, tiles.sizes, sums, *on_device,
        first_decayed, *numbers,
        **options,
    )  # fmt: skip
