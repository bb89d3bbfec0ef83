import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from config import MODELS
from model.nn.attention import attend, has_kernels, make_layout, score_mask
from model.nn.registry import load_model_config
from model.nn.t5.position_bias import score_bias
from model.nn.t5.sizes import T5ModelConfig

HEADS, WIDTH = 2, 8

LENGTHS = [(5, 5), (1, 1), (17, 17), (40, 40), (16, 16), (33, 33), (2, 2)]

CROSS = [(5, 9), (1, 30), (17, 1), (40, 70), (16, 16), (3, 3), (25, 25)]


def random_inputs(lengths, seed=0):
    """q, k, v and a bias table whose scores are large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = np.sum(lengths, axis=0)
    shapes = [(queries, HEADS * WIDTH), (keys, HEADS * WIDTH), (keys, HEADS * WIDTH), (32, HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def packed(lengths, q, k, v, table, causal, is_cross):
    layout = make_layout(*np.array(lengths).T)
    bias = score_mask(layout, causal) if is_cross else score_bias(layout, table, 128, causal)
    return attend((q, k, v), layout, bias, HEADS)


def separate(lengths, q, k, v, table, causal, is_cross):
    """softmax(q k^T + bias) v, example by example and head by head, as the formula says it."""
    outputs = []
    for example in zip(*(x.split([n[i] for n in lengths]) for x, i in ((q, 0), (k, 1), (v, 1))), strict=True):
        positions = torch.arange(max(map(len, example)))
        distance = positions[None, : len(example[1])] - positions[: len(example[0]), None]
        buckets = T5Attention._relative_position_bucket(distance, bidirectional=not causal)
        heads = []
        for h, columns in enumerate(torch.arange(HEADS * WIDTH).split(WIDTH)):
            q_TK, k_SK, v_SK = (x[:, columns] for x in example)
            scores = q_TK @ k_SK.T + (0 if is_cross else table[buckets, h])
            scores = scores.masked_fill(distance > 0, -torch.inf) if causal else scores
            heads.append(scores.softmax(1) @ v_SK)
        outputs.append(torch.cat(heads, dim=1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "lengths, causal, is_cross",
    [(LENGTHS, False, False), (LENGTHS, True, False), (CROSS, False, True), ([(1, 1)], True, False)],
    ids=["encoder", "decoder", "cross", "one token"],
)
def test_packed_examples_give_the_same_as_each_alone(lengths, causal, is_cross):
    results = []
    for function in (packed, separate):
        inputs = random_inputs(lengths)
        out = function(lengths, *inputs, causal, is_cross)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        results.append([out, *(x.grad for x in inputs[: 3 if is_cross else 4])])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def test_the_order_of_examples_in_the_pack_changes_nothing():
    inputs = random_inputs(LENGTHS)
    parts = [x.split([n for n, _ in LENGTHS]) for x in inputs[:3]]
    turned = [torch.cat(part[::-1]) for part in parts]
    out = packed(LENGTHS, *inputs, False, False).split([n for n, _ in LENGTHS])
    back = packed(LENGTHS[::-1], *turned, inputs[3], False, False)
    torch.testing.assert_close(torch.cat(out[::-1]), back)


@pytest.mark.parametrize("poisoned", range(len(CROSS)))
def test_a_number_that_is_not_finite_stays_in_its_own_example(poisoned):
    q, k, v, table = random_inputs(CROSS)
    with torch.no_grad():
        k.split([s for _, s in CROSS])[poisoned].fill_(torch.nan)
        v.split([s for _, s in CROSS])[poisoned].fill_(torch.nan)
    out = packed(CROSS, q, k, v, table, False, True)
    clean = [part.isfinite().all().item() for part in out.split([t for t, _ in CROSS])]
    assert clean == [i != poisoned for i in range(len(CROSS))]
    sum(part.sum() for part, good in zip(out.split([t for t, _ in CROSS]), clean, strict=True) if good).backward()
    for grad, side in ((q.grad, 0), (k.grad, 1), (v.grad, 1)):
        parts = grad.split([n[side] for n in CROSS])
        assert all(part.isfinite().all() for i, part in enumerate(parts) if i != poisoned)


def test_causal_attention_does_not_see_later_tokens():
    lengths = [(20, 20), (20, 20)]
    q, k, v, table = random_inputs(lengths)
    before = packed(lengths, q, k, v, table, True, False)
    with torch.no_grad():
        k[10:20] += 1
        v[10:20] += 1
    after = packed(lengths, q, k, v, table, True, False)
    torch.testing.assert_close(after[:10], before[:10], rtol=0, atol=0)
    assert not torch.allclose(after[10:20], before[10:20])


@pytest.mark.parametrize("num_examples", [1, 10, 400])
def test_the_cost_is_the_sum_of_squares_and_not_the_square_of_the_sum(num_examples):
    lengths = np.random.default_rng(num_examples).integers(16, 257, size=(2, num_examples))
    layout = make_layout(*lengths)
    scores = sum(b * t * s for b, t, s in (block.shape for block in layout.blocks))
    assert (lengths[0] * lengths[1]).sum() <= scores <= 2.25 * (lengths[0] * lengths[1]).sum()
    q, k, v = (torch.zeros(n, HEADS * WIDTH) for n in (lengths[0].sum(), lengths[1].sum(), lengths[1].sum()))
    if num_examples == 10:
        with torch.profiler.profile(profile_memory=True) as profile:
            attend((q, k, v), layout, score_mask(layout), HEADS)
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        assert 0 < largest < 4 * HEADS * lengths[0].sum() * lengths[1].sum() / 2


def test_blocks_have_few_shapes():
    lengths = np.arange(1, 513)
    assert len(make_layout(lengths, lengths).blocks) <= 12


def test_the_kernels_are_used_only_for_the_sizes_that_they_support():
    def supports(device, dtype=torch.bfloat16, **change):
        return has_kernels(torch.device(device), dtype, *T5ModelConfig(**MODELS["tiny"] | change).kernel_sizes)

    presets = [load_model_config(name) for name in MODELS]
    assert all(has_kernels(torch.device("cuda"), torch.bfloat16, *preset.kernel_sizes) for preset in presets)
    assert supports("cuda", d_kv=96)
    assert not supports("cpu") and not supports("cuda", torch.float32)
    for change in (dict(d_kv=48), dict(d_kv=256), dict(relative_attention_num_buckets=96)):
        assert not supports("cuda", **change)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_are_those_of_repeated_keys_and_values(num_kv_heads):
    lengths, heads, width = np.array([3, 9, 5]), 4, 8
    draw = torch.Generator().manual_seed(0)
    sizes = (heads * width, num_kv_heads * width, num_kv_heads * width)
    q, k, v = (torch.randn(17, size, generator=draw, requires_grad=True) for size in sizes)
    layout = make_layout(lengths, lengths)
    grouped = attend((q, k, v), layout, score_mask(layout, causal=True), heads, num_kv_heads)
    shared_by = [head * num_kv_heads // heads for head in range(heads)]
    repeated = [torch.cat([x[:, h * width : (h + 1) * width] for h in shared_by], dim=1) for x in (k, v)]
    expected = attend((q, *repeated), layout, score_mask(layout, causal=True), heads)
    torch.testing.assert_close(grouped, expected)
    for one, other in zip(
        torch.autograd.grad(grouped.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
