"""Qwen in its kernels: on a CPU in Triton's interpreter, in one child process; on a GPU as they are, recorded."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from model.data.buckets import Bucket
from model.generate.engine import Limits, generate
from model.generate.sampling import GREEDY, Sampling
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.train.cuda_graphs import StepGraphs
from model.train.objectives.pairs import Pairs
from tests.nn.decoder.test_network import LENGTHS, sequences_of
from tests.nn.kernels.test_attention import ROOT
from tests.parts import farthest, gradients_of

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=16, vocab_size=90,
    initializer_range=0.2,
)  # fmt: skip
VARIANTS = (
    dict(), dict(num_key_value_heads=2), dict(model_type="qwen3", num_key_value_heads=2),
    dict(model_type="qwen3", num_key_value_heads=2, head_dim=96),
)  # fmt: skip
BUCKET = Bucket((64, 128), 6)


def batch_of(kernels, bucket=None, seed=0):
    return collate(sequences_of(LENGTHS, seed), Packing(0, kernels, bucket, bucket.examples if bucket else 0))


def gradients_after(model, batch):
    model.zero_grad()
    model(batch, 16).backward()
    return gradients_of(model)


def interpreted():
    """Largest relative distance of the kernels' gradients from PyTorch's, in float32, of two variants of one block."""
    from model.nn import layers, loss
    from model.nn.decoder import rotary

    distances = []
    for variant, bucket in ((VARIANTS[0], None), (VARIANTS[-1], BUCKET)):
        model = DecoderModel(DecoderModelConfig(**SIZES | variant | dict(num_hidden_layers=1))).initialise(1)
        plain = gradients_after(model, batch_of(False))
        replaced = [(module, module.runs_kernels) for module in (layers, loss, rotary)]
        for module, _ in replaced:
            module.runs_kernels = lambda _: True
        distances.append(farthest(gradients_after(model, batch_of(True, bucket)), plain))
        for module, own in replaced:
            module.runs_kernels = own
    return distances


def test_the_network_in_interpreted_kernels_has_the_gradients_of_pytorch_padded_or_not():
    # A child process, because Triton reads TRITON_INTERPRET when a kernel is defined.
    code = "import json; from tests.nn.decoder.test_on_a_gpu import *; print(json.dumps(interpreted()))"
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    distances = json.loads(done.stdout.splitlines()[-1])
    assert len(distances) == 2 and max(distances) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_steps_in_bf16_have_the_gradients_of_the_step_itself(variant):
    config = DecoderModelConfig(**SIZES | variant)
    model = DecoderModel(config, compute_dtype=torch.bfloat16).initialise(1).to("cuda")
    exact, graphs = DecoderModel(config).initialise(1), StepGraphs(model, Pairs())
    for seed in range(3):
        model.zero_grad()
        graphs.gradients(batch_of(True, BUCKET, seed), BUCKET, 16, ((1.0,), (1.0,)))
        recorded = gradients_of(model)
        assert farthest(recorded, gradients_after(model, batch_of(True, None, seed).to("cuda"))) < 1e-2
        on_cpu = gradients_after(exact, batch_of(False, None, seed))
        assert farthest({name: x.cpu() for name, x in recorded.items()}, on_cpu) < 0.1
    assert len(graphs.captured) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("guards", [GREEDY, Sampling(repetition_penalty=1.3, no_repeat_ngram_size=2)])
def test_recorded_decoding_gives_the_answers_of_the_cpu(variant, guards):
    model, draw = DecoderModel(DecoderModelConfig(**SIZES | variant)).initialise(1), np.random.default_rng(0)
    inputs = [draw.integers(2, SIZES["vocab_size"], draw.integers(1, 40)) for _ in range(50)]
    answers = [generate(model.to(device), inputs, Limits(12, 40, 60, 0, 1), 60, guards) for device in ("cpu", "cuda")]
    assert answers[0] == answers[1]
