"""A large table's gradient is not held twice: of the lookup few rows are, of the output few chunks."""

import pytest
import torch

from model.nn import bf16_gradients, embedding
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.embedding import row_sums
from model.nn.loss_terms import LossTerms
from model.train.optim import make_optimizer
from tests.nn.decoder.test_network import SIZES, sequences_of
from tests.nn.test_loss import LargestFloat32
from tests.parts import make_config

TERMS = LossTerms(z_loss=1e-2, label_smoothing=0.1)


def gradients(model, batch, micro_batches=1):
    """(loss, gradient of each weight, elements of the largest float32 tensor that backward makes)."""
    model.zero_grad()
    for number in range(micro_batches):
        if model.flat.rounding:
            model.flat.rounding.begin(0, 1, 0, number)
        with LargestFloat32() as largest:
            loss = model.cross_entropy(batch, 5, TERMS)[0] if number % 2 else -model.token_log_probs(batch, 5).sum()
            (0.5 * loss).backward()
    return loss.detach(), [p.grad.float() for p in model.flat.trained], largest.numel


@pytest.mark.parametrize("dtype, masters", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bf16")])
def test_its_gradient_is_that_of_a_small_table_in_less_memory(monkeypatch, dtype, masters):
    sizes = SIZES | dict(vocab_size=2000)
    model = DecoderModel(DecoderModelConfig(**sizes), compute_dtype=getattr(torch, dtype)).initialise(1)
    batch = collate(sequences_of([(3, 5), (7, 2), (4, 40)], 0), Packing(0))
    if masters == "bf16":
        make_optimizer(model, make_config(optimizer="adamw", master_dtype="bf16"))
    monkeypatch.setattr(bf16_gradients, "NUMBERS_AT_ONCE", 8000)
    model.gradient_checkpointing, table = sizes["num_hidden_layers"], 2000 * sizes["hidden_size"]
    near = dict(rtol=1e-5, atol=1e-6) if dtype == "float32" else dict(rtol=2e-2, atol=2e-2)
    for micro_batches in (1, 2, 3):
        monkeypatch.setattr(embedding, "LARGE_TABLE", 2**26)
        loss, expected, held = gradients(model, batch, micro_batches)
        monkeypatch.setattr(embedding, "LARGE_TABLE", 1000)
        again, found, held_again = gradients(model, batch, micro_batches)
        assert loss.equal(again)
        for theirs, ours in zip(expected, found, strict=True):
            scale = theirs.abs().max()
            torch.testing.assert_close(ours / scale, theirs / scale, **near)
        assert held >= table and (masters == "float32" or held_again < table)  # what holds float32 gradients counts
    repeated = gradients(model, batch, 3)[1]
    assert all(one.equal(other) for one, other in zip(found, repeated, strict=True))


def test_the_rows_of_a_lookup_have_the_sums_of_their_tokens_and_the_rest_is_zero():
    ids, grad = torch.tensor([7, 3, 7, 0, 3, 7]), torch.randn(6, 4)
    rows, sums = row_sums(grad, ids, 9)
    assert rows.tolist() == [0, 3, 7, 1, 1, 1] and not sums[3:].any()
    expected = torch.zeros(9, 4).index_add_(0, ids, grad)
    torch.testing.assert_close(torch.zeros(9, 4).index_add_(0, rows, sums), expected)
