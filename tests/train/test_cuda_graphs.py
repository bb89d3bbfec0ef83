"""Recorded steps. Needs a GPU: CUDA graphs exist nowhere else."""

import numpy as np
import pytest
import torch

from config import T5ModelConfig
from model.data.buckets import Bucket, buckets_for
from model.nn.t5.batch import pack
from model.nn.t5.network import TextToTextModel
from model.runtime.device_memory import release_memory
from model.train.cuda_graphs import StepGraphs
from tests.parts import farthest, gradients_of

SHAPE = T5ModelConfig(
    d_model=128, d_ff=256, num_heads=2, d_kv=64, num_layers=2, num_decoder_layers=2, vocab_size=500
)  # fmt: skip
ROOM = Bucket(1024, 1280, 32)


def random_micro_batch(num_pairs, room, seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 60, size=(2, num_pairs))
    prompt_ids, labels = (draw.integers(1, 500, size=side.sum()) for side in lengths)
    return pack(prompt_ids, np.roll(labels, 1), labels, *lengths, room)


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_recorded_step_gives_the_gradients_of_the_step_itself(gradient_checkpointing):
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16, gradient_checkpointing).initialise(0).to("cuda")
    graphs = StepGraphs(model, [ROOM])
    for seed in range(4):
        model.zero_grad()
        graphs.gradients(random_micro_batch(20 + seed, ROOM, seed), ROOM, 512, 1e-4, 0.25)
        recorded, recorded_parts = gradients_of(model), model.flat.loss_parts.clone()
        model.zero_grad()
        loss, parts = model.loss_and_parts(random_micro_batch(20 + seed, None, seed).to("cuda"), 512, 1e-4)
        (loss * 0.25).backward()
        torch.testing.assert_close(recorded_parts, parts * 0.25, rtol=1e-3, atol=0)
        assert farthest(recorded, gradients_of(model)) < 1e-2
    assert len(graphs.recorded) == 1


class Greedy(torch.autograd.Function):
    """Asks for more than any card has, in forward or in backward, while a step is recorded."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return take_too_much(x, where == "forward")

    @staticmethod
    def backward(ctx, grad):
        return take_too_much(grad, ctx.where == "backward"), None


def take_too_much(x, now):
    if now and torch.cuda.is_current_stream_capturing():
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    return x.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_while_a_step_is_recorded_is_known_and_leaves_nothing_behind(where):
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    decode, graphs, micro_batch = model.decode, StepGraphs(model, [ROOM]), random_micro_batch(20, ROOM, 0)
    model.decode = lambda *args: Greedy.apply(decode(*args), where)
    allocated = []
    for _ in range(3):
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):
            graphs.gradients(micro_batch, ROOM, 512, 0.0, 1.0)
        graphs.clear()
        release_memory(torch.device("cuda"))
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[2]
    model.decode = decode
    model.zero_grad()
    graphs.gradients(micro_batch, ROOM, 512, 0.0, 1.0)
    recorded = gradients_of(model)
    model.zero_grad()
    model(random_micro_batch(20, None, 0).to("cuda"), 512).backward()
    assert farthest(recorded, gradients_of(model)) < 1e-2


def test_few_rooms_hold_nearly_every_micro_batch_with_little_padding():
    draw = np.random.default_rng(0)
    lengths = np.stack([draw.gamma(1.2, 20, 50_000), draw.gamma(1.6, 68, 50_000)], axis=1).clip(1, 256).astype("uint16")
    for pairs, least_fill in ((64, 0.90), (256, 0.95), (512, 0.965)):
        buckets = buckets_for(lengths, pairs)
        assert 1 <= len(buckets) <= 8
        real = computed = missed = 0
        for _ in range(400):
            drawn = lengths[draw.integers(len(lengths), size=pairs)].astype(int)
            room = next((room for room in buckets if room.holds(drawn)), None)
            missed += room is None
            real += drawn.sum()
            computed += room.prompt_tokens + room.response_tokens if room else drawn.sum()
        assert missed < 20
        assert real / computed > least_fill


def test_pairs_of_one_length_need_one_room():
    assert buckets_for(np.full((100, 2), 32, dtype="uint16"), 10) == [Bucket(320, 320, 10)]
