"""Triton kernels: attention over packed examples with a learned bias for each distance, forward and backward.

The kernels need no padding and no mask or bias matrix: offsets locate the tokens of each example, and a table gives
the bias of each distance. Each program of the queries' pass sums the gradient of the bias by bucket inside its own
tiles. No two programs write to the same address, so results are bit-identical in every run.

Letters: M queries and N keys per tile, D head width, W the power of two that holds it: columns beyond D exist in
registers alone, as zeros. Scores are not scaled here: scale Q.
"""

import torch
import triton
import triton.language as tl

from model.nn.flat_params import split_qkv
from model.nn.kernels.head_rows import _load_rows, _store_rows
from model.nn.kernels.sums import add_to_gradient
from model.nn.packed_layout import TILE

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E); exp2 is a hardware instruction


@triton.jit
def _load_tile(TILES, tile):
    """(first row of the tile in its example, first query, number of queries, first key, number of keys)."""
    TILES += 5 * tile
    return tl.load(TILES), tl.load(TILES + 1), tl.load(TILES + 2), tl.load(TILES + 3), tl.load(TILES + 4)


@triton.jit
def _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scores (M, N) times log2(e), -inf where masked.

    BIAS (heads, 2 * centre + 1) holds the bias of each distance, -inf for those that a causal mask forbids.
    """
    scores = tl.dot(q, tl.trans(k))
    distance = keys[None, :] - queries[:, None]
    visible = (keys < num_keys)[None, :]
    if HAS_BIAS:
        inside = tl.minimum(tl.maximum(distance, -centre), centre)  # larger distances have the bias of the largest
        scores += tl.load(BIAS + head * (2 * centre + 1) + centre + inside)
    elif CAUSAL:
        visible = visible & (distance <= 0)
    return tl.where(visible, scores * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_forward(
    Q, K, V, OUT, LSE, BIAS, TILES,
    stride_q, stride_k, stride_v, stride_out, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """OUT = softmax(Q K^T + bias) V and LSE (heads, N) = log2 of the softmax's denominator, for one tile of queries."""
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _load_tile(TILES, tl.program_id(0))
    queries = first + tl.arange(0, M)
    is_real = queries < num_queries
    q = _load_rows(Q, start_q + queries, is_real, stride_q, head, D, W)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    out = tl.zeros([M, W], tl.float32)
    last = tl.minimum(num_keys, first + M) if CAUSAL else num_keys
    for first_key in range(0, last, N):
        keys = first_key + tl.arange(0, N)
        k = _load_rows(K, start_k + keys, keys < num_keys, stride_k, head // GROUP, D, W)
        v = _load_rows(V, start_k + keys, keys < num_keys, stride_v, head // GROUP, D, W)
        scores = _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS)
        new_row_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_row_max[:, None])
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
        row_max = new_row_max
    out = out / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # padding attends to no key; its output is zero
    _store_rows(OUT, start_q + queries, is_real, stride_out, head, out, D, W)
    tl.store(LSE + head * num_queries_total + start_q + queries, row_max + tl.log2(row_sum), mask=is_real)


@triton.jit
def _weights_and_score_grads(
    q, k, v, grad_out, lse, delta, queries, keys, num_keys, BIAS, head, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """(recomputed attention weights, gradient of the scores), each (M, N)."""
    scores = _scores(q, k, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS)
    weights = tl.exp2(scores - lse[:, None])  # zero in rows beyond the example, whose lse is infinite
    return weights, weights * (tl.dot(grad_out, tl.trans(v)) - delta[:, None])


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


@triton.jit
def _delta(OUT, grad_out, rows, row_is_real, stride, head, D: tl.constexpr, W: tl.constexpr):
    """Sums (rows,) of OUT * grad_out, which the gradient of softmax subtracts."""
    out = _load_rows(OUT, rows, row_is_real, stride, head, D, W)
    return tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_backward_queries(
    Q, K, V, OUT, GRAD_OUT, LSE, DELTA, BIAS, BUCKETS, GRAD_Q, GRAD_BIAS, TILES,
    stride_q, stride_k, stride_v, stride_grad, stride_out, stride_grad_q, num_queries_total, centre,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_PASS: tl.constexpr, NUM_BUCKETS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """GRAD_Q of one tile of queries, and DELTA (heads, queries), `_delta` of each head, for the keys' pass.

    GRAD_BIAS (tiles, buckets, heads) is the tile's part of the bias gradient. With ONE_PASS an example whose keys fit
    in one tile is left to the keys' pass: its GRAD_Q and DELTA are not written here.
    """
    head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _load_tile(TILES, tl.program_id(0))
    if ONE_PASS:
        if (num_keys > 0) & (num_keys <= N):
            return
    queries = first + tl.arange(0, M)
    is_real = queries < num_queries
    q = _load_rows(Q, start_q + queries, is_real, stride_q, head, D, W)
    grad_out = _load_rows(GRAD_OUT, start_q + queries, is_real, stride_grad, head, D, W)
    lse = tl.load(LSE + head * num_queries_total + start_q + queries, mask=is_real, other=float("inf"))
    delta = _delta(OUT, grad_out, start_q + queries, is_real, stride_out, head, D, W)
    tl.store(DELTA + head * num_queries_total + start_q + queries, delta, mask=is_real)
    grad_q = tl.zeros([M, W], tl.float32)
    grad_bias = tl.zeros([NUM_BUCKETS], tl.float32)
    last = tl.minimum(num_keys, first + M) if CAUSAL else num_keys
    for first_key in range(0, last, N):
        keys = first_key + tl.arange(0, N)
        k = _load_rows(K, start_k + keys, keys < num_keys, stride_k, head // GROUP, D, W)
        v = _load_rows(V, start_k + keys, keys < num_keys, stride_v, head // GROUP, D, W)
        _, grad_scores = _weights_and_score_grads(
            q, k, v, grad_out, lse, delta, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS
        )
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q)
        if HAS_BIAS:
            grad_bias += _sums_by_bucket(grad_scores, first_key - first, BUCKETS, centre, NUM_BUCKETS, N)
    _store_rows(GRAD_Q, start_q + queries, is_real, stride_grad_q, head, grad_q, D, W)
    if HAS_BIAS:
        rows = tl.program_id(0) * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS)
        tl.store(GRAD_BIAS + rows * tl.num_programs(1) + head, grad_bias)


@triton.jit(do_not_specialize=["num_queries_total"])
def attention_backward_keys(
    Q, K, V, OUT, GRAD_OUT, LSE, DELTA, BIAS, GRAD_Q, GRAD_K, GRAD_V, TILES,
    stride_q, stride_k, stride_v, stride_grad, stride_out, stride_grad_q, stride_grad_k, stride_grad_v,
    num_queries_total, centre, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_PASS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """GRAD_K and GRAD_V of one tile of keys, summed over the GROUP heads of Q that share them.

    With ONE_PASS also GRAD_Q of an example whose keys fit in one tile, so that its scores are computed once.
    """
    kv_head = tl.program_id(1)
    first, start_q, num_queries, start_k, num_keys = _load_tile(TILES, tl.program_id(0))
    keys = first + tl.arange(0, N)
    is_real = keys < num_keys
    k = _load_rows(K, start_k + keys, is_real, stride_k, kv_head, D, W)
    v = _load_rows(V, start_k + keys, is_real, stride_v, kv_head, D, W)
    grad_k, grad_v = tl.zeros([N, W], tl.float32), tl.zeros([N, W], tl.float32)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        for start in range(first // M * M if CAUSAL else 0, num_queries, M):
            queries = start + tl.arange(0, M)
            query_is_real = queries < num_queries
            q = _load_rows(Q, start_q + queries, query_is_real, stride_q, head, D, W)
            grad_out = _load_rows(GRAD_OUT, start_q + queries, query_is_real, stride_grad, head, D, W)
            rows = head * num_queries_total + start_q + queries
            lse = tl.load(LSE + rows, mask=query_is_real, other=float("inf"))
            delta = tl.load(DELTA + rows, mask=query_is_real, other=0.0)
            if ONE_PASS:
                if num_keys <= N:  # the queries' pass left DELTA unset
                    delta = _delta(OUT, grad_out, start_q + queries, query_is_real, stride_out, head, D, W)
            weights, grad_scores = _weights_and_score_grads(
                q, k, v, grad_out, lse, delta, queries, keys, num_keys, BIAS, head, centre, CAUSAL, HAS_BIAS
            )
            grad_v = tl.dot(tl.trans(weights).to(v.dtype), grad_out, grad_v)
            grad_k = tl.dot(tl.trans(grad_scores).to(q.dtype), q, grad_k)
            if ONE_PASS:
                if num_keys <= N:
                    grad_q = tl.dot(grad_scores.to(k.dtype), k)
                    _store_rows(GRAD_Q, start_q + queries, query_is_real, stride_grad_q, head, grad_q, D, W)
    _store_rows(GRAD_K, start_k + keys, is_real, stride_grad_k, kv_head, grad_k, D, W)
    _store_rows(GRAD_V, start_k + keys, is_real, stride_grad_v, kv_head, grad_v, D, W)


def launch_options(head_width, has_bias, is_backward, device):
    """Triton's options of a launch; for a head width of 64 the fastest of `python -m bench.tiles` on an H100.

    With a bias a program needs many registers and much shared memory. Fewer stages load less ahead, and so more
    programs run on a multiprocessor.
    """
    if head_width > 64:
        return dict(num_stages=2)  # 3, Triton's default, needs more than the 99 KiB of an RTX 30 or 40
    if not has_bias:
        return dict(num_stages=3)
    if not is_backward:
        return dict(num_stages=2)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return dict(num_stages=1, maxnreg=168)  # three programs on a multiprocessor of an H100 or H200
    return dict(num_stages=1)


def packed_attention(qkv, layout, bias, num_heads, num_kv_heads):
    """softmax(q k^T + bias) v within each example, (N, heads * D); D is at least 16.

    `qkv` holds one to three tensors whose concatenated columns are q, k and v; each head of k and v serves
    num_heads / num_kv_heads heads of q. `bias` is a ScoreBias of model/nn/attention.py: its `weight` (buckets, heads)
    is the learned table, `buckets` (2 * C + 1,) int32 the bucket of each distance (key minus query) from -C to C, and
    `table` (heads, 2 * C + 1) the bias of each distance, -inf where a causal mask forbids it.
    """
    return _PackedAttention.apply(layout, bias.weight, bias, num_heads, num_kv_heads, *qkv)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, bias_weight, bias, num_heads, num_kv_heads, *qkv):
        q, k, v = split_qkv(qkv, num_heads, num_kv_heads)
        out, lse = q.new_empty(q.shape), torch.empty(num_heads, len(q), device=q.device)
        head_width = q.shape[1] // num_heads
        ctx.centre = 0 if bias.buckets is None else len(bias.buckets) // 2
        ctx.options = dict(
            CAUSAL=bias.causal, HAS_BIAS=bias.table is not None, GROUP=num_heads // num_kv_heads,
            D=head_width, W=triton.next_power_of_2(head_width), M=TILE, N=TILE,
        )  # fmt: skip
        attention_forward[len(layout.query_tiles), num_heads](
            q, k, v, out, lse, bias.table, layout.query_tiles,
            q.stride(0), k.stride(0), v.stride(0), out.stride(0), len(q), ctx.centre, **ctx.options,
            **launch_options(ctx.options["D"], ctx.options["HAS_BIAS"], False, q.device),
        )  # fmt: skip
        ctx.save_for_backward(out, lse, bias.table, bias.buckets, *qkv)
        ctx.layout, ctx.heads, ctx.bias_weight = layout, (num_heads, num_kv_heads), bias_weight
        ctx.num_buckets = 16 if bias_weight is None else len(bias_weight)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        out, lse, table, buckets, *qkv = ctx.saved_tensors
        layout, centre, (heads, kv_heads) = ctx.layout, ctx.centre, ctx.heads
        grads = [torch.empty_like(x) for x in qkv]
        (q, k, v), (grad_q, grad_k, grad_v) = (split_qkv(x, heads, kv_heads) for x in (qkv, grads))
        grad_out, delta = grad_out.contiguous(), torch.empty_like(lse)
        strides = (q.stride(0), k.stride(0), v.stride(0), grad_out.stride(0), out.stride(0), grad_q.stride(0))
        options = ctx.options | launch_options(ctx.options["D"], table is not None, True, q.device)
        # With a bias one pass gains nothing; with wider heads it spills registers.
        options["ONE_PASS"] = table is None and options["D"] <= 64
        num_tiles = len(layout.query_tiles)
        grad_bias = None if table is None else torch.empty(num_tiles, ctx.num_buckets, heads, device=q.device)
        attention_backward_queries[num_tiles, heads](
            q, k, v, out, grad_out, lse, delta, table, buckets, grad_q, grad_bias, layout.query_tiles, *strides,
            len(q), centre, NUM_BUCKETS=ctx.num_buckets, **options,
        )  # fmt: skip
        attention_backward_keys[len(layout.key_tiles), kv_heads](
            q, k, v, out, grad_out, lse, delta, table, grad_q, grad_k, grad_v, layout.key_tiles, *strides,
            grad_k.stride(0), grad_v.stride(0), len(q), centre, **options,
        )  # fmt: skip
        grad_weight = add_to_gradient(ctx.bias_weight, grad_bias) if ctx.needs_input_grad[1] else None
        return None, grad_weight, None, None, None, *grads
