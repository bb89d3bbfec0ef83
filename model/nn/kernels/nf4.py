"""Triton: the numbers of matrices in NF4, as model/nn/quantized.py holds them, in one pass over memory."""

import triton
import triton.language as tl

BLOCKS, WARPS = 32, 2  # blocks of 64 numbers in a program, and its warps: so a thread reads codes in wide loads


@triton.jit
def dequantize_blocks(
    CODES, SCALES, GROUPS, OFFSETS, LEVELS, STEPS, OUT, num_blocks, matrix_blocks, matrix_groups,
    GROUP: tl.constexpr, BYTES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_real = block < num_blocks
    matrix = block // matrix_blocks
    group = matrix * matrix_groups + (block - matrix * matrix_blocks) // GROUP
    step = tl.load(STEPS + tl.load(SCALES + block, mask=is_real, other=0).to(tl.int32))
    largest = step * tl.load(GROUPS + group, mask=is_real, other=0.0)
    largest = (largest + tl.load(OFFSETS + matrix, mask=is_real, other=0.0))[:, None]
    byte = block[:, None].to(tl.int64) * BYTES + tl.arange(0, BYTES)[None, :]
    code = tl.load(CODES + byte, mask=is_real[:, None], other=0).to(tl.int32)
    numbers = tl.interleave(tl.load(LEVELS + (code >> 4)) * largest, tl.load(LEVELS + (code & 15)) * largest)
    place = block[:, None].to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(OUT + place, numbers.to(OUT.dtype.element_ty), mask=is_real[:, None])


def dequantize(codes, scales, groups, offsets, levels, steps, out):
    """Write the numbers of adjacent matrices of one shape to `out`, which is returned."""
    num_blocks, matrices = len(scales), len(offsets)
    # without fused multiply-add, which rounds once where PyTorch rounds twice
    dequantize_blocks[(triton.cdiv(num_blocks, BLOCKS),)](
        codes, scales, groups, offsets, levels, steps, out, num_blocks, num_blocks // matrices, len(groups) // matrices,
        GROUP=256, BYTES=len(codes) // num_blocks, BLOCKS=BLOCKS, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
