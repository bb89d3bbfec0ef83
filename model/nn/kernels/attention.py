"""Triton kernels: attention over packed examples with a learned bias for each distance, forward and backward.

The kernels need no padding and no mask or bias matrix: offsets locate the tokens of each example, and a table gives
the bias of each distance. Each program sums the gradient of the bias by bucket inside its own tiles. No two programs
write to the same address, so results are bit-identical in every run.

Letters: M queries and N keys per tile, D head width. Scores are not scaled here: scale Q.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from model.nn.flat_params import split_qkv
from model.nn.kernels.sums import add_to_gradient

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E); exp2 is a hardware instruction


@triton.jit
def _load_tile(TILES, tile):
    """(first row of the tile in its example, first query, number of queries, first key, number of keys)."""
    TILES += 5 * tile
    return tl.load(TILES), tl.load(TILES + 1), tl.load(TILES + 2), tl.load(TILES + 3), tl.load(TILES + 4)


@triton.jit
def _load_rows(X, rows, row_is_real, stride, head, D: tl.constexpr):
    """`rows` (rows, D) of one head of X; zeros where `row_is_real` is false."""
    columns = head * D + tl.arange(0, D)
    return tl.load(X + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=row_is_real[:, None], other=0.0)


@triton.jit
def _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scores (M, N) times log2(e), -inf where masked. BIAS (heads, 2 * centre + 1) holds the bias of each distance."""
    scores = tl.dot(q, tl.trans(k))
    distance = keys[None, :] - queries[:, None]
    visible = (keys < num_keys)[None, :]
    if CAUSAL:
        visible = visible & (distance <= 0)
    if HAS_BIAS:
        inside = tl.minimum(tl.maximum(distance, -centre), centre)  # distances of padding rows can exceed the table
        scores += tl.load(BIAS + head * (2 * centre + 1) + centre + inside)
    return tl.where(visible, scores * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_forward(
    Q, K, V, OUT, LSE, BIAS, TILES,
    stride_q, stride_k, stride_v, stride_out, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """OUT = softmax(Q K^T + bias) V and LSE (heads, N) = log2 of the softmax's denominator, for one tile of queries."""
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _load_tile(TILES, tl.program_id(0))
    queries = first + tl.arange(0, M)
    is_real = queries < num_queries
    q = _load_rows(Q, start_q + queries, is_real, stride_q, head, D)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    last = tl.minimum(num_keys, first + M) if CAUSAL else num_keys
    for first_key in range(0, last, N):
        keys = first_key + tl.arange(0, N)
        k = _load_rows(K, start_k + keys, keys < num_keys, stride_k, head // GROUP, D)
        v = _load_rows(V, start_k + keys, keys < num_keys, stride_v, head // GROUP, D)
        scores = _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS)
        new_row_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_row_max[:, None])
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
        row_max = new_row_max
    pointers = OUT + (start_q + queries)[:, None].to(tl.int64) * stride_out + head * D + tl.arange(0, D)[None, :]
    out = out / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # padding attends to no key; its output is zero
    tl.store(pointers, out.to(OUT.dtype.element_ty), mask=is_real[:, None])
    tl.store(LSE + head * num_queries_total + start_q + queries, row_max + tl.log2(row_sum), mask=is_real)


@triton.jit
def _weights_and_score_grads(
    q, k, v, grad_out, lse, delta, queries, keys, num_queries, num_keys, BIAS, head, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """(recomputed attention weights, gradient of the scores), each (M, N)."""
    scores = _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS)
    weights = tl.where((queries < num_queries)[:, None], tl.exp2(scores - lse[:, None]), 0.0)
    return weights, weights * (tl.dot(grad_out, tl.trans(v)) - delta[:, None])


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_backward_queries(
    Q, K, V, OUT, GRAD_OUT, LSE, DELTA, BIAS, GRAD_Q, TILES,
    stride_q, stride_k, stride_v, stride_grad, stride_out, stride_grad_q, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """GRAD_Q of one tile of queries, and DELTA (heads, queries) = sum of OUT * GRAD_OUT per head for the keys' pass."""
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _load_tile(TILES, tl.program_id(0))
    queries = first + tl.arange(0, M)
    is_real = queries < num_queries
    q = _load_rows(Q, start_q + queries, is_real, stride_q, head, D)
    grad_out = _load_rows(GRAD_OUT, start_q + queries, is_real, stride_grad, head, D)
    lse = tl.load(LSE + head * num_queries_total + start_q + queries, mask=is_real, other=0.0)
    out = _load_rows(OUT, start_q + queries, is_real, stride_out, head, D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)  # the term that the gradient of softmax subtracts
    tl.store(DELTA + head * num_queries_total + start_q + queries, delta, mask=is_real)
    grad_q = tl.zeros([M, D], tl.float32)
    last = tl.minimum(num_keys, first + M) if CAUSAL else num_keys
    for first_key in range(0, last, N):
        keys = first_key + tl.arange(0, N)
        k = _load_rows(K, start_k + keys, keys < num_keys, stride_k, head // GROUP, D)
        v = _load_rows(V, start_k + keys, keys < num_keys, stride_v, head // GROUP, D)
        _, grad_scores = _weights_and_score_grads(
            q, k, v, grad_out, lse, delta, queries, keys, num_queries, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS
        )
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q)
    pointers = GRAD_Q + (start_q + queries)[:, None].to(tl.int64) * stride_grad_q + head * D + tl.arange(0, D)[None, :]
    tl.store(pointers, grad_q.to(GRAD_Q.dtype.element_ty), mask=is_real[:, None])


@triton.jit
def _sums_by_bucket(grad_scores, offset, BUCKETS, centre, NUM_BUCKETS: tl.constexpr, N: tl.constexpr):
    """Sums (NUM_BUCKETS,) of a square tile (N, N) by position bucket; `offset` is its first key minus its first query.

    Row i is rotated left by i. A column then holds one distance above the row where it wraps around and a second
    distance below that row. So two sums per column give the sums by distance, which are then added up by bucket.
    """
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    rotated = tl.gather(grad_scores, (column + row) % N, 1)
    wrapped = column + row >= N
    near = tl.sum(tl.where(wrapped, 0.0, rotated), 0)
    far = tl.sum(tl.where(wrapped, rotated, 0.0), 0)
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
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_BUCKETS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """GRAD_K and GRAD_V of one tile of keys, summed over the GROUP heads of Q that share them.

    GRAD_BIAS (tiles, buckets, heads) is the tile's part of the bias gradient; with a bias GROUP is 1.
    """
    kv_head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _load_tile(TILES, tl.program_id(0))
    keys = first + tl.arange(0, N)
    is_real = keys < num_keys
    k = _load_rows(K, start_k + keys, is_real, stride_k, kv_head, D)
    v = _load_rows(V, start_k + keys, is_real, stride_v, kv_head, D)
    grad_k, grad_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    bucket_ids = tl.arange(0, NUM_BUCKETS)
    grad_bias = tl.zeros([NUM_BUCKETS], tl.float32)
    first_query = first // M * M if CAUSAL else 0
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for start in range(first_query, num_queries, M):
            queries = start + tl.arange(0, M)
            query_is_real = queries < num_queries
            q = _load_rows(Q, start_q + queries, query_is_real, stride_q, head, D)
            grad_out = _load_rows(GRAD_OUT, start_q + queries, query_is_real, stride_grad, head, D)
            lse = tl.load(LSE + head * num_queries_total + start_q + queries, mask=query_is_real, other=0.0)
            delta = tl.load(DELTA + head * num_queries_total + start_q + queries, mask=query_is_real, other=0.0)
            weights, grad_scores = _weights_and_score_grads(
                q, k, v, grad_out, lse, delta, queries, keys, num_queries, num_keys, BIAS, head, centre,
                CAUSAL, HAS_BIAS,
            )  # fmt: skip
            grad_v = tl.dot(tl.trans(weights).to(v.dtype), grad_out, grad_v)
            grad_k = tl.dot(tl.trans(grad_scores).to(q.dtype), q, grad_k)
            if HAS_BIAS:
                grad_bias += _sums_by_bucket(grad_scores, first - start, BUCKETS, centre, NUM_BUCKETS, N)
    columns = kv_head * D + tl.arange(0, D)[None, :]
    rows = (start_k + keys)[:, None].to(tl.int64)
    tl.store(GRAD_K + rows * stride_grad_k + columns, grad_k.to(GRAD_K.dtype.element_ty), mask=is_real[:, None])
    tl.store(GRAD_V + rows * stride_grad_v + columns, grad_v.to(GRAD_V.dtype.element_ty), mask=is_real[:, None])
    if HAS_BIAS:
        rows = tl.program_id(0) * NUM_BUCKETS + bucket_ids
        tl.store(GRAD_BIAS + rows * tl.num_programs(1) + kv_head, grad_bias)


TILE = 64  # queries or keys per tile
STAGES = {128: dict(num_stages=2)}  # by head width: 3, Triton's default, needs more than an RTX 30 or 40's 99 KiB


@dataclass(frozen=True)
class PackedLayout:
    """Where the tiles of packed examples lie: one row per tile, int32.

    A row holds the tile's first row in its example, and the example's first query, number of queries, first key and
    number of keys. Rows of zeros are unused.
    """

    query_tiles: torch.Tensor  # (tiles, 5)
    key_tiles: torch.Tensor  # (tiles, 5)

    def to(self, device):
        return PackedLayout(self.query_tiles.to(device), self.key_tiles.to(device))


def packed_tiles(query_lengths, key_lengths, bucket=None):
    """(query tiles, key tiles) of PackedLayout as numpy arrays, for examples of these lengths in tokens.

    `bucket` (queries, keys, pairs) pads both to fixed sizes: to that many tokens, which attend to nothing, and to the
    most tiles that so many pairs can take.
    """
    queries, keys, pairs = bucket or (0, 0, 0)
    query_tiles = _tiles(query_lengths, key_lengths, queries, pairs)
    key_tiles = _tiles(key_lengths, query_lengths, keys, pairs)
    return query_tiles, key_tiles.take([0, 3, 4, 1, 2], axis=1)


def _tiles(own, other, bucket_tokens, bucket_pairs):
    """Tiles (tiles, 5) of one side: (first row, own start, own length, other start, other length)."""
    starts, other_starts = np.cumsum(own) - own, np.cumsum(other) - other
    columns = [starts, own, other_starts, other]
    if bucket_tokens:
        num_tokens = int(own.sum())
        padding = (num_tokens, bucket_tokens - num_tokens, 0, 0)
        columns = [np.append(column, value) for column, value in zip(columns, padding, strict=True)]
    counts = -(-columns[1] // TILE)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([index * TILE, *(np.repeat(column, counts) for column in columns)], axis=1).astype(np.int32)
    num_tiles = bucket_tokens // TILE + bucket_pairs + 1 if bucket_tokens else len(tiles)
    return np.concatenate([tiles, np.zeros((num_tiles - len(tiles), 5), np.int32)])


def packed_attention(qkv, layout, bias, num_heads, num_kv_heads):
    """softmax(q k^T + bias) v within each example, (N, heads * D); D is a power of two, at least 16.

    `qkv` holds one to three tensors whose concatenated columns are q, k and v; each head of k and v serves
    num_heads / num_kv_heads heads of q. `bias` is a ScoreBias of model/nn/attention.py: its `weight` (buckets, heads)
    is the learned table, `buckets` (2 * C + 1,) int32 the bucket of each distance (key minus query) from -C to C, and
    `table` (heads, 2 * C + 1) the bias of each distance.
    """
    return _PackedAttention.apply(layout, bias.weight, bias, num_heads, num_kv_heads, *qkv)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, bias_weight, bias, num_heads, num_kv_heads, *qkv):
        q, k, v = split_qkv(qkv, num_heads, num_kv_heads)
        out, lse = q.new_empty(q.shape), torch.empty(num_heads, len(q), device=q.device)
        ctx.centre = 0 if bias.buckets is None else len(bias.buckets) // 2
        ctx.options = dict(
            CAUSAL=bias.causal, HAS_BIAS=bias.table is not None, GROUP=num_heads // num_kv_heads,
            D=q.shape[1] // num_heads, M=TILE, N=TILE,
        )  # fmt: skip
        ctx.options |= STAGES.get(ctx.options["D"], {})
        attention_forward[len(layout.query_tiles), num_heads](
            q, k, v, out, lse, bias.table, layout.query_tiles,
            q.stride(0), k.stride(0), v.stride(0), out.stride(0), len(q), ctx.centre, **ctx.options,
        )  # fmt: skip
        ctx.save_for_backward(out, lse, bias.table, bias.buckets, *qkv)
        ctx.layout, ctx.heads, ctx.bias_weight = layout, (num_heads, num_kv_heads), bias_weight
        ctx.num_buckets = 16 if bias_weight is None else len(bias_weight)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        out, lse, table, buckets, *qkv = ctx.saved_tensors
        layout, centre, (heads, kv_heads), options = ctx.layout, ctx.centre, ctx.heads, ctx.options
        grads = [torch.empty_like(x) for x in qkv]
        (q, k, v), (grad_q, grad_k, grad_v) = (split_qkv(x, heads, kv_heads) for x in (qkv, grads))
        grad_out, delta = grad_out.contiguous(), torch.empty_like(lse)
        strides = (q.stride(0), k.stride(0), v.stride(0), grad_out.stride(0))
        attention_backward_queries[len(layout.query_tiles), heads](
            q, k, v, out, grad_out, lse, delta, table, grad_q, layout.query_tiles, *strides, out.stride(0),
            grad_q.stride(0), len(q), centre, **options,
        )  # fmt: skip
        num_tiles = len(layout.key_tiles)
        grad_bias = None if table is None else torch.empty(num_tiles, ctx.num_buckets, heads, device=q.device)
        attention_backward_keys[num_tiles, kv_heads](
            q, k, v, grad_out, lse, delta, table, buckets, grad_k, grad_v, grad_bias, layout.key_tiles, *strides,
            grad_k.stride(0), grad_v.stride(0), len(q), centre, NUM_BUCKETS=ctx.num_buckets, **options,
        )  # fmt: skip
        grad_weight = add_to_gradient(ctx.bias_weight, grad_bias) if ctx.needs_input_grad[1] else None
        return None, grad_weight, None, None, None, *grads
