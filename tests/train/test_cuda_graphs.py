"""Steps recorded as CUDA graphs. All tests but that of bucket_of need a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config import T5ModelConfig
from model.data.buckets import Bucket
from model.nn.dropout import token_keys
from model.nn.t5.batch import pack
from model.nn.t5.network import TextToTextModel
from model.runtime.device_memory import release_memory
from model.train.cuda_graphs import StepGraphs
from tests.parts import farthest, gradients_of

SHAPE = T5ModelConfig(
    d_model=128, d_ff=256, num_heads=2, d_kv=64, num_layers=2, num_decoder_layers=2, vocab_size=500
)  # fmt: skip
BUCKET = Bucket(1024, 1280, 32)


def random_micro_batch(num_pairs, bucket, seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 60, size=(2, num_pairs))
    prompt_ids, labels = (draw.integers(1, 500, size=side.sum()) for side in lengths)
    keys = [token_keys(range(num_pairs), of_side, side) for side, of_side in enumerate(lengths)]
    return pack(prompt_ids, np.roll(labels, 1), labels, *lengths, bucket, keys)


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_recorded_step_gives_the_gradients_of_the_step_itself(gradient_checkpointing, dropout):
    model = TextToTextModel(SHAPE, dropout, torch.bfloat16, gradient_checkpointing).initialise(0).to("cuda")
    graphs = StepGraphs(model, [BUCKET])
    for seed in range(4):
        model.key_dropout(0, seed)
        model.zero_grad()
        graphs.gradients(random_micro_batch(20 + seed, BUCKET, seed), BUCKET, 512, 1e-4, 0.25)
        recorded, recorded_parts = gradients_of(model), model.flat.loss_parts.clone()
        model.zero_grad()
        loss, parts = model.loss_and_parts(random_micro_batch(20 + seed, None, seed).to("cuda"), 512, 1e-4)
        (loss * 0.25).backward()
        torch.testing.assert_close(recorded_parts, parts * 0.25, rtol=1e-3, atol=0)
        assert farthest(recorded, gradients_of(model)) < 1e-2
    assert len(graphs.recorded) == 1


class AllocateTooMuch(torch.autograd.Function):
    """Allocates more than any GPU has, in forward or in backward, while a step is recorded."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return allocate_too_much(x, where == "forward")

    @staticmethod
    def backward(ctx, grad):
        return allocate_too_much(grad, ctx.where == "backward"), None


def allocate_too_much(x, here):
    if here and torch.cuda.is_current_stream_capturing():
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    return x.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_while_a_step_is_recorded_is_raised_and_leaks_no_memory(where):
    model = TextToTextModel(SHAPE, 0.0, torch.bfloat16).initialise(0).to("cuda")
    decode, graphs, micro_batch = model.decode, StepGraphs(model, [BUCKET]), random_micro_batch(20, BUCKET, 0)
    model.decode = lambda *args: AllocateTooMuch.apply(decode(*args), where)
    allocated = []
    for _ in range(3):
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):
            graphs.gradients(micro_batch, BUCKET, 512, 0.0, 1.0)
        graphs.clear()
        release_memory(torch.device("cuda"))
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[2]
    model.decode = decode
    model.zero_grad()
    graphs.gradients(micro_batch, BUCKET, 512, 0.0, 1.0)
    recorded = gradients_of(model)
    model.zero_grad()
    model(random_micro_batch(20, None, 0).to("cuda"), 512).backward()
    assert farthest(recorded, gradients_of(model)) < 1e-2


def test_a_step_is_recorded_only_up_to_the_tokens_of_the_plan():
    graphs = SimpleNamespace(buckets=[Bucket(64, 128, 4), Bucket(128, 192, 4)])
    small, large = np.full((4, 2), 16), np.full((4, 2), 32)
    for lengths, most_tokens, bucket in ((small, 320, 0), (small, 192, 0), (small, 191, None), (large, 319, None)):
        assert StepGraphs.bucket_of(graphs, lengths, most_tokens) == (
            None if bucket is None else graphs.buckets[bucket]
        )
    assert StepGraphs.bucket_of(graphs, large, 320) == graphs.buckets[1]
