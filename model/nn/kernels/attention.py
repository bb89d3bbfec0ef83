"""Triton kernels: attention over packed examples with T5's relative position bias, forward and backward.

Nothing is padded in memory and no mask or bias matrix is read: an example's tokens are found by its offsets, the bias
of a pair of positions in a table by distance. The gradient of the bias is summed by bucket inside each block of
queries and keys, so no two programs write to the same place and results are the same at every run.

Letters: M queries and N keys of one tile, D head width. Scores are not scaled: T5 has none.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from model.nn.flat_params import columns

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and the hardware has exp2


@triton.jit
def _tile(TILES, tile):
    """Where a tile stands: its first row within its example, and the example's start and length on both sides."""
    TILES += 5 * tile
    return tl.load(TILES), tl.load(TILES + 1), tl.load(TILES + 2), tl.load(TILES + 3), tl.load(TILES + 4)


@triton.jit
def _rows(X, rows, row_is_real, stride, head, D: tl.constexpr):
    """Rows of one head, zero where there is none."""
    columns = head * D + tl.arange(0, D)
    return tl.load(X + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=row_is_real[:, None], other=0.0)


@triton.jit
def _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scores (M, N) in units of log2, -inf where a query must not look. BIAS (heads, 2 * centre + 1) by distance."""
    scores = tl.dot(q, tl.trans(k))
    distance = keys[None, :] - queries[:, None]
    visible = (keys < num_keys)[None, :]
    if CAUSAL:
        visible = visible & (distance <= 0)
    if HAS_BIAS:
        inside = tl.minimum(tl.maximum(distance, -centre), centre)  # rows of padding may lie outside the table
        scores += tl.load(BIAS + head * (2 * centre + 1) + centre + inside)
    return tl.where(visible, scores * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_forward(
    Q, K, V, OUT, LSE, BIAS, TILES,
    stride_q, stride_k, stride_v, stride_out, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """OUT = softmax(Q K^T + bias) V and LSE (heads, N) = log2 of the softmax's denominator. One tile of queries."""
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _tile(TILES, tl.program_id(0))
    queries = first + tl.arange(0, M)
    real = queries < num_queries
    q = _rows(Q, start_q + queries, real, stride_q, head, D)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    last = tl.minimum(num_keys, first + M) if CAUSAL else num_keys
    for first_key in range(0, last, N):
        keys = first_key + tl.arange(0, N)
        k = _rows(K, start_k + keys, keys < num_keys, stride_k, head, D)
        v = _rows(V, start_k + keys, keys < num_keys, stride_v, head, D)
        scores = _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
        highest = new_highest
    place = OUT + (start_q + queries)[:, None].to(tl.int64) * stride_out + head * D + tl.arange(0, D)[None, :]
    out = out / tl.where(total > 0, total, 1.0)[:, None]  # padding sees no key: zero
    tl.store(place, out.to(OUT.dtype.element_ty), mask=real[:, None])
    tl.store(LSE + head * num_queries_total + start_q + queries, highest + tl.log2(total), mask=real)


@triton.jit
def _weights_and_score_grads(
    q, k, v, grad_out, lse, delta, queries, keys, num_queries, num_keys, BIAS, head, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Attention weights (M, N) computed again, and the gradient of the scores."""
    scores = _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS)
    weights = tl.where((queries < num_queries)[:, None], tl.exp2(scores - lse[:, None]), 0.0)
    return weights, weights * (tl.dot(grad_out, tl.trans(v)) - delta[:, None])


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_backward_queries(
    Q, K, V, OUT, GRAD_OUT, LSE, DELTA, BIAS, GRAD_Q, TILES,
    stride_q, stride_k, stride_v, stride_grad, stride_out, stride_grad_q, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """GRAD_Q of one tile of queries, and DELTA (heads, N) = sum over the head of OUT * GRAD_OUT, for the keys' pass."""
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _tile(TILES, tl.program_id(0))
    queries = first + tl.arange(0, M)
    real = queries < num_queries
    q = _rows(Q, start_q + queries, real, stride_q, head, D)
    grad_out = _rows(GRAD_OUT, start_q + queries, real, stride_grad, head, D)
    lse = tl.load(LSE + head * num_queries_total + start_q + queries, mask=real, other=0.0)
    out = _rows(OUT, start_q + queries, real, stride_out, head, D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)  # what softmax's gradient subtracts
    tl.store(DELTA + head * num_queries_total + start_q + queries, delta, mask=real)
    grad_q = tl.zeros([M, D], tl.float32)
    last = tl.minimum(num_keys, first + M) if CAUSAL else num_keys
    for first_key in range(0, last, N):
        keys = first_key + tl.arange(0, N)
        k = _rows(K, start_k + keys, keys < num_keys, stride_k, head, D)
        v = _rows(V, start_k + keys, keys < num_keys, stride_v, head, D)
        _, grad_scores = _weights_and_score_grads(
            q, k, v, grad_out, lse, delta, queries, keys, num_queries, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS
        )
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q)
    place = GRAD_Q + (start_q + queries)[:, None].to(tl.int64) * stride_grad_q + head * D + tl.arange(0, D)[None, :]
    tl.store(place, grad_q.to(GRAD_Q.dtype.element_ty), mask=real[:, None])


@triton.jit
def _sums_by_bucket(grad_scores, offset, BUCKETS, centre, NUM_BUCKETS: tl.constexpr, N: tl.constexpr):
    """Sum of a square tile (N, N) over the pairs of each bucket; `offset` is the first key minus the first query.

    Row i is turned left by i, so that a column holds one distance down to the row where it wraps round, and another
    below it: two sums down the columns, then from distances to buckets.
    """
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    turned = tl.gather(grad_scores, (column + row) % N, 1)
    wrapped = column + row >= N
    near = tl.sum(tl.where(wrapped, 0.0, turned), 0)
    far = tl.sum(tl.where(wrapped, turned, 0.0), 0)
    distance = offset + tl.arange(0, N)
    return _to_buckets(near, distance, BUCKETS, centre, NUM_BUCKETS) + _to_buckets(
        far, distance - N, BUCKETS, centre, NUM_BUCKETS
    )


@triton.jit
def _to_buckets(sums, distance, BUCKETS, centre, NUM_BUCKETS: tl.constexpr):
    buckets = tl.load(BUCKETS + centre + tl.minimum(tl.maximum(distance, -centre), centre))
    return tl.sum(tl.where(buckets[:, None] == tl.arange(0, NUM_BUCKETS)[None, :], sums[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_backward_keys(
    Q, K, V, GRAD_OUT, LSE, DELTA, BIAS, BUCKETS, GRAD_K, GRAD_V, GRAD_BIAS, TILES,
    stride_q, stride_k, stride_v, stride_grad, stride_grad_k, stride_grad_v, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_BUCKETS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """GRAD_K and GRAD_V of one tile of keys; GRAD_BIAS (tiles, heads, buckets), its part of the bias gradient."""
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _tile(TILES, tl.program_id(0))
    keys = first + tl.arange(0, N)
    real = keys < num_keys
    k = _rows(K, start_k + keys, real, stride_k, head, D)
    v = _rows(V, start_k + keys, real, stride_v, head, D)
    grad_k, grad_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    bucket_ids = tl.arange(0, NUM_BUCKETS)
    grad_bias = tl.zeros([NUM_BUCKETS], tl.float32)
    first_query = first // M * M if CAUSAL else 0
    for start in range(first_query, num_queries, M):
        queries = start + tl.arange(0, M)
        query_real = queries < num_queries
        q = _rows(Q, start_q + queries, query_real, stride_q, head, D)
        grad_out = _rows(GRAD_OUT, start_q + queries, query_real, stride_grad, head, D)
        lse = tl.load(LSE + head * num_queries_total + start_q + queries, mask=query_real, other=0.0)
        delta = tl.load(DELTA + head * num_queries_total + start_q + queries, mask=query_real, other=0.0)
        weights, grad_scores = _weights_and_score_grads(
            q, k, v, grad_out, lse, delta, queries, keys, num_queries, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS
        )
        grad_v = tl.dot(tl.trans(weights).to(v.dtype), grad_out, grad_v)
        grad_k = tl.dot(tl.trans(grad_scores).to(q.dtype), q, grad_k)
        if HAS_BIAS:
            grad_bias += _sums_by_bucket(grad_scores, first - start, BUCKETS, centre, NUM_BUCKETS, N)
    columns = head * D + tl.arange(0, D)[None, :]
    rows = (start_k + keys)[:, None].to(tl.int64)
    tl.store(GRAD_K + rows * stride_grad_k + columns, grad_k.to(GRAD_K.dtype.element_ty), mask=real[:, None])
    tl.store(GRAD_V + rows * stride_grad_v + columns, grad_v.to(GRAD_V.dtype.element_ty), mask=real[:, None])
    if HAS_BIAS:
        slot = tl.program_id(0) * tl.num_programs(1) + head
        tl.store(GRAD_BIAS + slot * NUM_BUCKETS + bucket_ids, grad_bias)


TILE = 64  # queries and keys of a tile
STAGES = {128: dict(num_stages=2)}  # by head width: Triton's three would exceed the 99 KiB that an RTX 30 or 40 gives


@dataclass(frozen=True)
class PackedLayout:
    """The tiles of the examples' queries and keys.

    Each row, int32: the tile's first row within its example, the example's first query, number of queries, first key
    and number of keys. Rows of zeros have nothing to do.
    """

    query_tiles: torch.Tensor  # (tiles, 5)
    key_tiles: torch.Tensor  # (tiles, 5)

    def to(self, device):
        return PackedLayout(self.query_tiles.to(device), self.key_tiles.to(device))


def packed_tiles(query_lengths, key_lengths, bucket=None):
    """PackedLayout's two arrays for examples of these lengths (numpy, tokens).

    `room` (queries, keys, pairs): fill so many rows in memory, with padding that attends to nothing, and as many
    tiles as so many pairs can need.
    """
    queries, keys, pairs = bucket or (0, 0, 0)
    query_tiles = _tiles(query_lengths, key_lengths, queries, pairs)
    key_tiles = _tiles(key_lengths, query_lengths, keys, pairs)
    return query_tiles, key_tiles.take([0, 3, 4, 1, 2], axis=1)


def _tiles(own, other, bucket_tokens, bucket_pairs):
    """(first row, own start, own length, other start, other length) of each tile of the own side."""
    starts, other_starts = np.cumsum(own) - own, np.cumsum(other) - other
    columns = [starts, own, other_starts, other]
    if bucket_tokens:
        padding = (sum(own), bucket_tokens - sum(own), 0, 0)
        columns = [np.append(column, value) for column, value in zip(columns, padding, strict=True)]
    counts = -(-columns[1] // TILE)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([index * TILE, *(np.repeat(column, counts) for column in columns)], axis=1).astype(np.int32)
    room_tiles = bucket_tokens // TILE + bucket_pairs + 1 if bucket_tokens else len(tiles)
    return np.concatenate([tiles, np.zeros((room_tiles - len(tiles), 5), np.int32)])


def packed_attention(qkv, layout, bias_weight=None, buckets=None, table=None, causal=False, num_heads=1):
    """softmax(q k^T + bias) v for each example, (N, heads * D), D a power of two from 16 on.

    `qkv`: one to three tensors whose columns, side by side, are those of q, k and v. `bias_weight` (buckets, heads)
    is T5's table, `buckets` (2 * C + 1,) int32 the bucket of each distance (key minus query) from -C to C, and `table`
    (heads, 2 * C + 1) the bias of each distance.
    """
    return _PackedAttention.apply(layout, bias_weight, buckets, table, causal, num_heads, *qkv)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, bias_weight, buckets, table, causal, num_heads, *qkv):
        q, k, v = columns(qkv)
        out, lse = q.new_empty(q.shape), torch.empty(num_heads, len(q), device=q.device)
        ctx.centre = 0 if buckets is None else len(buckets) // 2
        ctx.options = dict(CAUSAL=causal, HAS_BIAS=table is not None, D=q.shape[1] // num_heads, M=TILE, N=TILE)
        ctx.options |= STAGES.get(ctx.options["D"], {})
        attention_forward[len(layout.query_tiles), num_heads](
            q, k, v, out, lse, table, layout.query_tiles,
            q.stride(0), k.stride(0), v.stride(0), out.stride(0), len(q), ctx.centre, **ctx.options,
        )  # fmt: skip
        ctx.save_for_backward(out, lse, table, buckets, *qkv)
        ctx.layout, ctx.num_heads = layout, num_heads
        ctx.num_buckets = 16 if bias_weight is None else len(bias_weight)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        out, lse, table, buckets, *qkv = ctx.saved_tensors
        layout, centre, heads, options = ctx.layout, ctx.centre, ctx.num_heads, ctx.options
        grads = [torch.empty_like(x) for x in qkv]
        (q, k, v), (grad_q, grad_k, grad_v) = columns(qkv), columns(grads)
        grad_out, delta = grad_out.contiguous(), torch.empty_like(lse)
        strides = (q.stride(0), k.stride(0), v.stride(0), grad_out.stride(0))
        attention_backward_queries[len(layout.query_tiles), heads](
            q, k, v, out, grad_out, lse, delta, table, grad_q, layout.query_tiles, *strides, out.stride(0),
            grad_q.stride(0), len(q), centre, **options,
        )  # fmt: skip
        num_tiles = len(layout.key_tiles)
        grad_bias = None if table is None else torch.empty(num_tiles, heads, ctx.num_buckets, device=q.device)
        attention_backward_keys[num_tiles, heads](
            q, k, v, grad_out, lse, delta, table, buckets, grad_k, grad_v, grad_bias, layout.key_tiles, *strides,
            grad_k.stride(0), grad_v.stride(0), len(q), centre, NUM_BUCKETS=ctx.num_buckets, **options,
        )  # fmt: skip
        grad_weight = None if table is None else grad_bias.sum(0).T
        return None, grad_weight, None, None, None, None, *grads
