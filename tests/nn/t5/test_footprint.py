import numpy as np
import pytest
import torch

from model.nn.attention import make_layout, round_up
from model.nn.lora import LoraConfig, attach, draw
from model.nn.memory_spec import MemorySpec, count_numbers
from model.nn.t5.batch import MicroBatch
from model.nn.t5.family import T5
from model.nn.t5.footprint import step_moments
from tests.parts import SHAPE, make_model


def test_the_weights_of_the_decoder_are_counted_apart():
    model = make_model(500)
    model.freeze_all_but("decoder")
    counted = count_numbers(T5, model.config, "decoder")
    assert counted.weights == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted.matrices < count_numbers(T5, model.config).matrices


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gated-gelu"])
@pytest.mark.parametrize("prompt, response", ((48, 48), (64, 128), (128, 24)))
def test_the_predicted_activations_are_within_one_percent_of_what_autograd_saves(prompt, response, activation, dropout):
    """Against the tensors that autograd really saves on a CPU, where RMSNorm keeps two more than on a GPU."""
    num_examples, model = 4, make_model(500, shape=SHAPE | dict(feed_forward_proj=activation), dropout=dropout)
    shape = model.config
    kept = saved_bytes(model, num_examples, prompt, response)
    layers = 2 * shape.num_layers * prompt + 3 * shape.num_decoder_layers * response + prompt + response
    kept -= 2 * num_examples * layers * 4 * shape.d_model
    spec = MemorySpec(T5, shape, 4, kernels=False, dropout=dropout > 0)
    moment = step_moments(spec, np.array([[prompt, response]]), checkpointing=0)["loss"][0]
    # held without being saved for backward: the position bias, ids and keys, what the loss reads and its gradient; and
    # of the decoder's last norm, and of the encoder's with dropout, the CPU keeps no output
    moment -= 4 * shape.num_heads * (round_up(prompt) ** 2 + round_up(response) ** 2)
    moment -= (24 + 12 * spec.dropout) * (prompt + response) + 4 * shape.d_model * prompt * spec.dropout
    moment -= 3 * 4 * shape.d_model * response
    assert num_examples * moment == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("activation", ["relu", "gated-gelu"])
def test_the_predicted_activations_of_an_adapter_are_within_one_percent_of_what_autograd_saves(activation):
    shape, (prompt, response) = SHAPE | dict(feed_forward_proj=activation), (64, 128)
    targets = T5.adapter_targets(make_model(500, shape=shape).config)
    lora, kept, predicted = LoraConfig(rank=8, alpha=8, targets=targets), [], []
    for adapter in (None, lora):
        model = make_model(500, shape=shape)
        if adapter:
            draw(attach(model, lora), 0)
            for p in model.parameters():  # else the norms keep less on a CPU
                p.requires_grad_(not hasattr(p, "adapter"))
            model.make_flat()
        kept.append(saved_bytes(model, 4, prompt, response))
        spec = MemorySpec(T5, model.config, 4, kernels=False, lora=adapter)
        predicted.append(4 * step_moments(spec, np.array([[prompt, response]]), checkpointing=False)["loss"][0])
    assert predicted[1] - predicted[0] == pytest.approx(kept[1] - kept[0], rel=0.01)
    assert spec.trained == sum(t.numel() for t in model.saved_tensors().values())
    assert spec.parameters == sum(p.numel() for p in model.parameters())


def saved_bytes(model, num_examples, prompt, response):
    """Bytes of the distinct storages that autograd saves in one forward, weights and layouts left out."""
    prompts, responses = np.full(num_examples, prompt), np.full(num_examples, response)
    micro_batch = MicroBatch(
        *(torch.zeros(num_examples * length, dtype=torch.long) for length in (prompt, response, response)),
        make_layout(prompts, prompts),
        make_layout(responses, responses),
        make_layout(responses, prompts),
        {},
        *(torch.zeros(num_examples * length, 3, dtype=torch.int32) for length in (prompt, response)),
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(micro_batch)
    return sum(count for count, _ in seen.values())
