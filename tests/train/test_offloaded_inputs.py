"""Steps whose recomputed blocks keep their inputs in host memory."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.lora import LoraConfig, attach, draw
from model.nn.recomputation import HostInputs
from model.runtime.device_memory import release_memory
from model.train.optim import make_optimizer
from tests.nn.decoder.test_network import SIZES, sequences_of
from tests.parts import PLAN, gradients_of, make_config, make_model, steps_of

RECOMPUTED = replace(PLAN, gradient_checkpointing=4)


def weights_and_events(store, tokenizer, offloads):
    model, config = make_model(tokenizer.vocab_size, dropout=0.1), make_config()
    model.offloads_inputs = offloads
    schedule = dict(total_pairs=len(store), global_batch=16)
    results = list(islice(steps_of(model, make_optimizer(model, config), store, RECOMPUTED, config, **schedule), 3))
    return model.state_dict(), [len(result.events) for result in results]


@pytest.mark.parametrize("name, calls", [("put", 3), ("get", 2)])
def test_promise_4_a_step_that_runs_out_of_memory_while_inputs_leave_or_return_is_repeated_bit_for_bit(
    store, tokenizer, monkeypatch, name, calls
):
    expected, _ = weights_and_events(store, tokenizer, offloads=False)
    real, left = getattr(HostInputs, name), [calls]

    def fails_once(host, *args):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError
        return real(host, *args)

    monkeypatch.setattr(HostInputs, name, fails_once)
    weights, events = weights_and_events(store, tokenizer, offloads=True)
    assert left[0] < 0 and events == [1, 0, 0]
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())


def test_the_empty_tensor_that_an_older_checkpoint_saves_beside_an_input_stays_where_it_is():
    host, empty = HostInputs(torch.device("cpu")), torch.empty(0)
    kept = [host.put(x) for x in (empty, torch.ones(2), empty, torch.ones(3))]
    assert kept[0] is empty and [len(host.get(number)) for number in reversed(kept)] == [3, 0, 2, 0]


@pytest.mark.gpu
def test_on_a_gpu_offloaded_inputs_leave_the_bits_of_gradients_and_take_little_of_its_memory():
    from model.nn.base import Packing
    from model.nn.decoder.batch import collate

    sizes = SIZES | dict(hidden_size=512, intermediate_size=512, head_dim=64, num_hidden_layers=24)
    model = attach(DecoderModel(DecoderModelConfig(**sizes), compute_dtype=torch.bfloat16), LoraConfig(
        rank=8, alpha=16, targets=("q_proj", "o_proj", "up_proj", "down_proj")))  # fmt: skip
    draw(model.initialise(1), 1)
    with torch.no_grad():
        model.flat.masters.add_(torch.randn_like(model.flat.masters) * 0.05)
    model = model.to("cuda")
    batch = collate(sequences_of([(500, 524)] * 16), Packing(0, kernels=True)).to("cuda")
    model.gradient_checkpointing, found = 24, []
    for model.offloads_inputs in (False, True, True, True):
        model.zero_grad()
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        model(batch, 512).backward()
        found.append((gradients_of(model), torch.cuda.max_memory_allocated()))
    (expected, most), *offloaded = found
    for gradients, peak in offloaded:
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())
        assert peak <= most - 20 * 16 * 1024 * 512 * 2, "of 24 inputs at most two are there at a time"
