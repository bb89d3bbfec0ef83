"""Gradients in bf16: near those in float32, rounded alike by every attempt, and without what naive rounding loses."""

from dataclasses import replace

import pytest
import torch

from model.nn.base import Packing
from model.nn.bf16_gradients import GradientRounding
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.train.gradients import Outcome, attempt_gradients
from model.train.optim import make_optimizer
from tests.nn.decoder.test_network import LENGTHS, SIZES, sequences_of
from tests.parts import PLAN, batch_of, context_of, make_config, make_model

ROUNDED = dict(optimizer="adamw", master_dtype="bf16", seed=3)


@pytest.mark.parametrize("family", ["t5", "qwen3"])
def test_those_of_one_forward_are_those_in_float32_rounded_once_a_use_and_take_half_the_memory(
    store, tokenizer, family
):
    model, batch = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16), batch_of(store, range(8))
    if family == "qwen3":
        model = DecoderModel(DecoderModelConfig(**SIZES), compute_dtype=torch.bfloat16).initialise(1)
        batch = collate(sequences_of(LENGTHS, 0), Packing(0))
    expected, bytes_before = [], model.flat.gradients.nbytes
    for loss in (model.cross_entropy, model.token_log_probs):
        model.zero_grad()
        (loss(batch)[0] if loss == model.cross_entropy else loss(batch).sum()).backward()
        expected.append([p.grad.clone() for p in model.flat.trained])
    make_optimizer(model, make_config(**ROUNDED))
    assert model.flat.gradients.nbytes == bytes_before / 2 and len(model.flat.read_whole) > 2
    for loss, found in zip((model.cross_entropy, model.token_log_probs), expected, strict=True):
        model.zero_grad()
        (loss(batch)[0] if loss == model.cross_entropy else loss(batch).sum()).backward()
        for p, in_float32 in zip(model.flat.trained, found, strict=True):
            assert p.grad.dtype == p.dtype
            if p.dtype == torch.float32:
                assert p.grad.equal(in_float32)
            assert (p.grad - in_float32).norm() <= 2**-8 * in_float32.norm()


def test_weights_that_will_be_rounded_are_loaded_without_one_in_float32_and_are_those_that_are_rounded_later():
    found = []
    for will_round in (True, False):
        with torch.device("meta"):
            model = DecoderModel(DecoderModelConfig(**SIZES), compute_dtype=torch.bfloat16)
        flat = model.place("cpu", will_round=will_round).initialise(1).flat
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (flat.masters, flat.gradients)}
        assert (sum(held.values()) == 4 * len(flat.copies)) == will_round, "bf16 weights and gradients"
        make_optimizer(model, make_config(**ROUNDED))
        found.append({name: (p, p.grad.dtype) for name, p in model.named_parameters()})
    for (rounded, dtype), (later, later_dtype) in zip(*(each.values() for each in found), strict=True):
        assert rounded.equal(later) and rounded.dtype == later.dtype and dtype == later_dtype


def test_several_micro_batches_are_rounded_alike_by_each_attempt_and_otherwise_in_another_step(store, tokenizer):
    config = make_config(**ROUNDED)
    model = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16)
    context = context_of(model, make_optimizer(model, config), store, config, total_pairs=120, global_batch=24)
    work, found = context.loader.work_at(0, 0), []
    for step in (1, 1, 2):
        attempt = attempt_gradients(context, replace(PLAN, micro_batch_tokens=160), replace(work, step=step))
        assert attempt.outcome is Outcome.OK and attempt.micro_batches > 3
        found.append(model.flat.gradients.clone())
    assert found[0].equal(found[1]) and not found[0].equal(found[2])
    assert (found[0] - found[2]).norm() < 2**-6 * found[0].norm()


def test_what_naive_rounding_to_bf16_loses_is_kept_on_average():
    sums = {}
    for is_naive in (True, False):
        rounding, total = GradientRounding(torch.device("cpu")), torch.zeros(40, 50, dtype=torch.bfloat16)
        for number in range(1000):
            rounding.begin(0, 1, 0, number)
            rounding.is_first |= is_naive
            rounding.add(total, torch.full((40, 50), 1e-3))
        sums[is_naive] = total.float().mean()
    assert sums[True] < 0.6 and abs(sums[False] - 1) < 0.01
    a, b = torch.randn(300, 70).bfloat16(), torch.randn(70, 50).bfloat16()
    total = torch.ones(300, 50, dtype=torch.bfloat16)
    rounding.add_product(total, a, b)
    torch.testing.assert_close(total.float(), 1 + a.float() @ b.float(), rtol=2**-7, atol=2**-7)
