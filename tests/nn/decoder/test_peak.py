"""The peak that is predicted for a step of the published sizes against the tensors that live in one."""

import numpy as np
import pytest
import torch

from model.data.length_histogram import Lengths
from model.data.sequences import Sequences
from model.memory.estimate import Estimate
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.family import DECODER, LAYERS
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.lora import LoraConfig, attach
from model.nn.memory_spec import Constants, MemorySpec
from model.nn.recomputation import HostInputs
from tests.live_bytes import peak_of_step, use_kernels_without_launching_them
from tests.sizes import QWEN_RANK, QWEN_VOCAB_SIZE, QWENS

CASES = [  # size, layers (0: all), sequences of 2,048 tokens, recomputed blocks, targets, precision of the base
    ("qwen1.5-7b", 0, 2, -32, LAYERS, "nf4"), ("qwen3-4b", 4, 2, -3, LAYERS, "nf4"),  # below 0: with inputs offloaded
    ("qwen1.5-7b", 0, 2, 30, LAYERS, "nf4"), ("qwen3-4b", 0, 2, 33, LAYERS, "nf4"),
    ("qwen1.5-1.8b", 4, 1, 3, LAYERS, "nf4"), ("qwen1.5-1.8b", 4, 1, 4, LAYERS, "nf4"),
    ("qwen1.5-7b", 4, 2, 0, LAYERS, "auto"), ("qwen3-4b", 4, 2, 3, LAYERS, "auto"),
    ("qwen3-4b", 4, 2, 1, LAYERS[:3], "nf4"), ("qwen1.5-1.8b", 4, 2, 4, (), ""),
    ("qwen1.5-1.8b", 4, 2, 3, (), ""), ("qwen1.5-7b", 4, 1, 1, (), ""),
]  # fmt: skip


@pytest.mark.parametrize("size, layers, sequences, recomputed, targets, precision", CASES)
def test_the_predicted_peak_is_that_of_the_live_tensors(
    size, layers, sequences, recomputed, targets, precision, monkeypatch
):
    use_kernels_without_launching_them(monkeypatch)
    monkeypatch.setattr(HostInputs, "_copy", lambda *_: None)  # nothing can be copied from the meta device
    changes = dict(num_hidden_layers=layers) if layers else {}
    config = DecoderModelConfig(**QWENS[size] | changes, vocab_size=QWEN_VOCAB_SIZE)
    lora = LoraConfig(rank=QWEN_RANK, alpha=8, targets=targets, base_precision=precision) if targets else None
    with torch.device("meta"):
        model = DecoderModel(config, compute_dtype=torch.bfloat16)
        model = attach(model, lora) if lora else model
    offloads, recomputed = recomputed < 0, abs(recomputed)
    model.gradient_checkpointing, model.offloads_inputs = recomputed, offloads
    sides = np.full((sequences, 2), 1024)
    measured = peak_of_step(model, collate(_sequences(sides), Packing(0, kernels=True)), 512)
    constants = dict(constants=Constants(1.0, 1.0, 0))
    spec = MemorySpec(DECODER, config, 2, kernels=True, lora=lora, offloads_inputs=offloads, **constants)
    estimate = Estimate(spec, Lengths(sides[:1], np.array([sequences])), sequences)
    predicted = max(estimate.step_parts(2048 * sequences, 512, recomputed).values())
    # of NF4 the largest matrix is counted, whichever there is at the peak
    more = spec.product_bytes
    if not lora and recomputed == config.num_blocks:  # the logits are computed again: the peak is a block's
        more = 2 * config.hidden_size * sides.sum()  # a stream that the last of all recomputed blocks does not hold
    assert 0.995 * measured <= predicted <= 1.005 * measured + more
    if not layers:
        held = sum(estimate.fixed.values())
        assert 0 <= (held + predicted) / (held + measured) - 1 <= 0.02


def _sequences(sides):
    return Sequences(tuple(np.full(count, 5) for count in sides.sum(axis=0)), sides, ids=np.arange(len(sides)))
