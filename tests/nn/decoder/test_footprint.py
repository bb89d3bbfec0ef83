"""The bytes that are predicted for Qwen against those that autograd saves, and its weights counted."""

import numpy as np
import pytest
import torch

from model.data.sequences import Sequences
from model.nn.attention import round_up
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.family import DECODER
from model.nn.decoder.footprint import step_moments
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.memory_spec import MemorySpec, Numbers, count_numbers
from tests.nn.decoder.test_network import SIZES, VARIANTS

EXAMPLES, SIDES = 4, (40, 24)  # a length that attention does not pad


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weights_are_counted_and_those_in_matrices_apart(variant):
    model = DecoderModel(DecoderModelConfig(**SIZES | VARIANTS[variant]))
    matrices = [p for name, p in model.named_parameters() if "proj.w" in name]
    expected = Numbers(*(sum(p.numel() for p in some) for some in (model.parameters(), matrices)))
    assert count_numbers(DECODER, model.config) == expected


@pytest.mark.parametrize("recomputed", [0, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_predicted_activations_are_within_ten_percent_of_what_autograd_saves(variant, recomputed):
    model = DecoderModel(DecoderModelConfig(**SIZES | VARIANTS[variant])).initialise(0)
    model.gradient_checkpointing = recomputed
    sides = tuple(np.full(EXAMPLES * length, 5) for length in SIDES)
    batch = collate(Sequences(sides, np.tile(SIDES, (EXAMPLES, 1)), ids=np.arange(EXAMPLES)), Packing(0))
    saved = saved_bytes(model, batch)
    c, tokens = model.config, EXAMPLES * sum(SIDES)
    blocks = c.num_hidden_layers - recomputed
    # on a CPU each norm keeps its input too, and but for the last its output is kept by the product behind it alone
    saved -= (2 * blocks + 1) * 4 * c.hidden_size * tokens
    spec = MemorySpec(DECODER, c, 4, kernels=False)
    predicted = EXAMPLES * step_moments(spec, np.array([SIDES]), recomputed)["loss"][0]
    # held without being saved for backward: mask, ids, angles, the loss's input and its gradient
    predicted -= EXAMPLES * (4 * round_up(sum(SIDES)) ** 2 + 2 * 4 * c.hidden_size * SIDES[1])
    predicted -= (24 + 4 * c.head_dim) * tokens
    assert predicted == pytest.approx(saved, rel=0.1)


def saved_bytes(model, batch):
    """Bytes of the distinct storages that autograd saves in one forward, weights and layouts left out."""
    own, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(batch)
    return sum(count for count, _ in seen.values())
