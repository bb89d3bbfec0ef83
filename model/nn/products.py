"""The product of tokens with a matrix, which a CPU may take in blocks."""

import torch
import torch.nn.functional as F

BLOCK_ROWS = 64  # of a matrix that a CPU multiplies in blocks, which may take a third of the time
MOST_ROWS, LEAST_NUMBERS = 128, 2**16  # rows of x, at most, and numbers of the matrix, at least, for which that pays


def product(x, matrix, bias=None):
    """x @ matrix.T + bias, (N, width) to (N, rows of the matrix)."""
    if not _is_faster_in_blocks(x, matrix):
        return F.linear(x, matrix, bias)
    out = product_in_blocks(x, matrix)
    return out if bias is None else out.add_(bias)


def _is_faster_in_blocks(x, matrix):
    if x.is_cuda or x.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return False
    has_few_rows = len(x) <= (MOST_ROWS if torch.get_num_threads() > 1 else 1)
    fits = matrix.numel() >= LEAST_NUMBERS and len(matrix) % BLOCK_ROWS == 0 and matrix.is_contiguous()
    return has_few_rows and fits


def product_in_blocks(x, matrix):
    """x @ matrix.T as a batch of products with BLOCK_ROWS rows of the matrix each.

    MKL computes each product of a batch in one of its threads. A single product with few rows keeps few of them busy.
    """
    blocks = matrix.view(-1, BLOCK_ROWS, matrix.shape[1])
    if len(x) == 1:  # matrix times column is faster here, and slower with several columns
        return torch.bmm(blocks, x.T.expand(len(blocks), -1, -1)).view(1, -1)
    return torch.bmm(x.expand(len(blocks), -1, -1), blocks.mT).transpose(0, 1).reshape(len(x), -1)
