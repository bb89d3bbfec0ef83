"""The lookup of tokens in a table, and its gradient: of a large table few rows, those of the tokens that are there."""

import torch
import torch.nn.functional as F

from model.nn.flat_params import add_values

LARGE_TABLE = 2**26  # numbers of a table whose gradient is not held twice


def embed(ids, weight):
    """Embedding lookup in the compute dtype, (N,) to (N, width)."""
    return _Embed.apply(ids, weight)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight.copy)

    @staticmethod
    def backward(ctx, grad):
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if adds_rows(len(ids), *weight.shape):
            add_rows(weight, *row_sums(grad, ids, len(weight)))
        else:
            add_values([weight], _dense(grad, ids, len(weight)))
        return None, None


def adds_rows(num_tokens, rows, width):
    """Whether the gradient of a table of so many rows is computed for the rows of so many tokens alone."""
    return is_large(rows * width) and 2 * num_tokens <= rows


def is_large(numbers):
    """Whether a table of so many numbers has a gradient that is not held twice."""
    return numbers >= LARGE_TABLE


def row_sums(grad_ND, ids_N, num_rows):
    """(rows (N,), sums (N, D) float32): the gradient of each row with tokens, then zeros for a row without.

    The shapes are those of the tokens, so that a CUDA graph holds it; sums have an order of their own.
    """
    ordered, order = ids_N.long().sort(stable=True)
    places = torch.cat([ordered.new_zeros(1), ordered[1:] != ordered[:-1]]).cumsum(0)
    sums = _dense(grad_ND, torch.empty_like(places).scatter_(0, order, places), len(ids_N))
    is_free = torch.ones(num_rows, dtype=torch.uint8, device=ids_N.device).index_fill_(0, ordered, 0)
    rows = is_free.argmax().expand(len(ids_N)).clone()
    return rows.scatter_(0, places, ordered), sums


def _dense(grad_ND, ids_N, num_rows):
    return torch.ops.aten.embedding_dense_backward(grad_ND.float(), ids_N, num_rows, -1, False)


def add_rows(weight, rows, sums):
    """Add `sums`, as of `row_sums`, to these rows of the gradient of a table."""
    if weight.rounding:
        weight.rounding.add_rows(weight.grad, rows, sums)
    else:
        weight.grad.index_add_(0, rows, sums)  # one sum for each row, but for zeros: their order does not matter
