"""Parts of the flat gradients cover all of them once, and each is complete when backward reports it."""

import pytest
import torch

from model.nn import gradient_parts
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.gradient_parts import reporting
from tests.nn.decoder.test_network import LENGTHS, SIZES, sequences_of
from tests.parts import batch_of, make_model


@pytest.fixture(params=["t5", "t5, decoder only", "t5, dropout", "qwen"])
def case(request, monkeypatch, store, tokenizer):
    """(a network whose gradients have several parts, batches for it)."""
    monkeypatch.setattr(gradient_parts, "LEAST_NUMBERS", 1)
    if request.param == "qwen":
        model = DecoderModel(DecoderModelConfig(**SIZES)).initialise(1)
        return model, [collate(sequences_of(LENGTHS, seed), Packing(0)) for seed in (0, 1)]
    rate = 0.1 if "dropout" in request.param else 0.0
    model = make_model(tokenizer.vocab_size, dropout=rate)
    model = model.freeze_all_but("decoder") if "only" in request.param else model
    return model, [batch_of(store, ids, dropout=rate > 0) for ids in ([0, 1, 2], [3, 4])]


def gradients_and_metrics(model, number):
    flat = model.flat.gradients_and_sums
    return torch.cat([flat[start:stop] for start, stop in model.gradient_parts[number].ranges])


@pytest.mark.parametrize("recomputed", [0, 3])
def test_a_part_is_complete_when_it_is_reported_and_the_last_one_is_not_yet(case, recomputed):
    (model, batches), reported = case, {}
    model.gradient_checkpointing = recomputed

    def report(number):
        parts = range(number, len(model.gradient_parts))
        reported[number] = [gradients_and_metrics(model, part).clone() for part in parts]

    model.zero_grad()
    with reporting(model.gradient_parts, report):
        loss = sum(model(batch, 16) for batch in batches)
    model.flat.sums.fill_(1)
    loss.backward()
    last = len(model.gradient_parts) - 1
    assert list(reported) == list(range(last)) and reported
    for number, (own, *_, rest) in reported.items():
        assert own.any() and torch.equal(own, gradients_and_metrics(model, number))
        assert not torch.equal(rest, gradients_and_metrics(model, last))


def test_parts_cover_each_gradient_and_the_metrics_once(case):
    model, _ = case
    ranges = sorted(single for part in model.gradient_parts for single in part.ranges)
    stops = [stop for _, stop in ranges]
    assert [start for start, _ in ranges] == [0, *stops[:-1]] and stops[-1] == len(model.flat.gradients_and_sums)
    assert len(model.gradient_parts) > 1 and all(part.ranges for part in model.gradient_parts)


def test_a_few_gradients_are_one_part(tokenizer):
    (part,) = make_model(tokenizer.vocab_size).gradient_parts
    assert part.first_block is None and len(part.ranges) == 1


def spoil_gradient(_block, _inputs, outputs):
    """A hook of a block: the gradient of its output is not finite for the first token."""
    outputs[1].register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), float("nan")))


def test_a_number_of_backward_that_is_not_finite_reaches_the_last_part_wherever_it_arises(case):
    model, (batch, _) = case
    trained = [block for block in model.all_blocks if next(block.parameters()).requires_grad]
    for block in [None, *trained]:
        handle = block.register_forward_hook(spoil_gradient) if block else None
        model.zero_grad()
        model(batch, 16).backward()
        assert gradients_and_metrics(model, -1).isfinite().all() == (block is None)
        if block:
            handle.remove()
