"""AdamW whose masters and state are in host memory."""

import pytest
import torch

from model.nn.lora import LoraConfig, attach, draw
from model.runtime.distributed import ALONE
from model.train import host_adamw
from model.train.optim import make_optimizer
from model.train.reduction import publish
from tests.parts import batch_of, make_config, make_model

LORA = LoraConfig(rank=3, alpha=6, targets=("q", "wo"))


@pytest.mark.parametrize("lora, at_once, pieces", [(LORA, 2**22, 1), (None, 2**22, 2), (None, 4099, 12)])
def test_small_tensors_in_host_memory_are_updated_together_and_large_ones_in_pieces_as_on_the_device(
    monkeypatch, lora, at_once, pieces
):
    monkeypatch.setattr(host_adamw, "AT_ONCE", at_once)
    found = []
    for offload in ("none", "optimizer"):
        model = make_model(90, compute_dtype=torch.bfloat16)
        model = draw(attach(model, lora), 1) if lora else model
        optimizer = make_optimizer(model, make_config(optimizer="adamw", weight_decay=0.1, offload=offload))
        for step in range(3):
            model.flat.gradients.copy_(torch.randn(len(model.flat.gradients), generator=torch.manual_seed(step)))
            optimizer.update(1e-2, torch.tensor(0.5))
        model.flat.refresh()
        state = [fields[name] for fields in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
        found.append([p.copy.float() for p in model.flat.trained] + state)
    assert len(optimizer.pieces) == pieces < len(optimizer.state)
    for device, host in zip(*found, strict=True):
        torch.testing.assert_close(host, device, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_on_a_gpu_steps_whose_masters_are_in_host_memory_end_with_the_weights_of_those_whose_are_not(store, tokenizer):
    found = []
    for offload in ("none", "optimizer"):
        model = make_model(tokenizer.vocab_size).to("cuda")
        optimizer = make_optimizer(model, make_config(optimizer="adamw", offload=offload))
        for _ in range(3):
            model.zero_grad()
            model.cross_entropy(batch_of(store, range(8)).to(model.device))[0].backward()
            optimizer.update(1e-2, torch.tensor(0.5, device="cuda"))
            publish(ALONE, model.flat)
        found.append(model.flat.copies)
    assert model.flat.masters.is_pinned()
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)  # backward adds in another order each time
