from itertools import product

import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

from model.nn import dropout
from tests.parts import SHAPE, batch_of, farthest, gradients_of, make_model, padded, stock_loss

IDS = [3, 0, 41, 17, 8, 22, 59]


@pytest.fixture
def micro_batch(store, tokenizer):
    return batch_of(store, IDS, tokenizer.pad_id, dropout=True)


def make_hf_model(model):
    """transformers' own T5 with copies of the weights of `model`."""
    config = T5Config(
        **SHAPE, vocab_size=model.config.vocab_size, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    reference = T5ForConditionalGeneration(config)
    assert not reference.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    return reference


def gradients_after(model, micro_batch):
    model.zero_grad()
    model(micro_batch, chunk_tokens=16).backward()
    return gradients_of(model)


def logits_of(model, micro_batch):
    return model.hidden(micro_batch)[0].float() @ model.shared.weight.T


def test_promise_1_logits_are_those_of_transformers(model, store, tokenizer, micro_batch):
    batch = padded(store, IDS, tokenizer.pad_id)
    theirs = make_hf_model(model)(**batch).logits[batch["labels"] != -100]
    assert theirs.std() > 0.05
    assert (logits_of(model, micro_batch) - theirs).abs().max() <= 1e-4


def test_loss_and_every_gradient_are_those_of_transformers(model, store, tokenizer, micro_batch):
    reference = make_hf_model(model)
    loss = stock_loss(reference, padded(store, IDS, tokenizer.pad_id))
    loss.backward()
    ours = gradients_after(model, micro_batch)
    torch.testing.assert_close(model(micro_batch), loss)
    assert ours.keys() == {name for name, _ in model.named_parameters()}
    assert farthest(ours, gradients_of(reference)) < 1e-4


@pytest.mark.parametrize("trainable", ["all", "decoder"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradient_checkpointing_and_its_offloaded_inputs_leave_gradients_as_they_are(
    tokenizer, micro_batch, trainable, dropout
):
    model = make_model(tokenizer.vocab_size, dropout=dropout)
    if trainable == "decoder":
        model.freeze_all_but("decoder")
    plain = gradients_after(model, micro_batch)
    for model.gradient_checkpointing, model.offloads_inputs in product(range(1, 6), (False, True)):
        again = gradients_after(model, micro_batch)
        for name, gradient in plain.items():
            assert torch.equal(again[name], gradient), (name, model.gradient_checkpointing)


@pytest.mark.parametrize("gradient_checkpointing", [0, 4])
def test_exactly_the_trainable_weights_receive_a_gradient(model, micro_batch, gradient_checkpointing):
    model.gradient_checkpointing = gradient_checkpointing
    everything = gradients_after(model, micro_batch)
    assert everything.keys() == model.state_dict().keys()
    assert all(gradient.any() for gradient in everything.values())
    model.zero_grad()
    decoder = gradients_after(model.freeze_all_but("decoder"), micro_batch)
    assert decoder.keys() == {name for name in everything if name.startswith("decoder.")}
    for name, gradient in decoder.items():
        torch.testing.assert_close(gradient, everything[name])


def test_each_checkpointed_block_keeps_fewer_activations(model, micro_batch):
    kept = []
    for model.gradient_checkpointing in range(5):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.setdefault(id(t), t), lambda t: t):
            model(micro_batch)
        kept.append(sum(t.numel() for t in saved.values()))
    assert sorted(kept, reverse=True) == kept and kept[-1] < kept[0] / 2


def test_dropout_is_active_in_training_only(tokenizer, micro_batch):
    model = make_model(tokenizer.vocab_size, dropout=0.3)
    plain = make_model(tokenizer.vocab_size).hidden(micro_batch)[0]
    dropped = model.hidden(micro_batch)[0]
    assert not torch.equal(dropped, plain)
    model.eval()
    assert torch.equal(model.hidden(micro_batch)[0], plain)
    assert torch.equal(make_model(tokenizer.vocab_size).train().hidden(micro_batch)[0], plain)


def test_the_seed_and_the_step_alone_choose_the_masks(tokenizer, micro_batch):
    model, outputs = make_model(tokenizer.vocab_size, dropout=0.3), {}
    for key in ((1, 1), (1, 2), (2, 1)):
        model.key_dropout(*key)
        outputs[key] = model.hidden(micro_batch)[0]
        torch.manual_seed(sum(key))
        assert torch.equal(model.hidden(micro_batch)[0], outputs[key])
    assert not any(torch.equal(outputs[1, 1], outputs[other]) for other in ((1, 2), (2, 1)))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gated-silu"])
def test_every_place_of_dropout_has_masks_of_its_own(tokenizer, micro_batch, activation, monkeypatch):
    """In transformers' order: embedding, after each sublayer, inside the feed-forward layer, after the last norm."""
    sites, inner = [], dropout.is_kept
    monkeypatch.setattr(dropout, "is_kept", lambda masks, width: sites.append((masks, width)) or inner(masks, width))
    shape = SHAPE | dict(feed_forward_proj=activation)
    make_model(tokenizer.vocab_size, shape=shape, dropout=0.1).hidden(micro_batch)
    stacks = [[masks.site for masks, _ in sites if masks.token_keys is keys]
              for keys in (micro_batch.prompt_token_keys, micro_batch.decoder_token_keys)]  # fmt: skip
    for places, layers in zip(stacks, (2, 3), strict=True):
        assert len(places) == 1 + SHAPE["num_layers"] * (layers + 1) + 1
        assert sorted(places) == sorted(set(places))
    assert len(sites) == sum(map(len, stacks))
    assert sum(width == SHAPE["d_ff"] for _, width in sites) == 2 * SHAPE["num_layers"]


@pytest.mark.parametrize("gradient_checkpointing", [0, 4])
@pytest.mark.parametrize("activation", ["relu", "silu", "gated-gelu"])
def test_promise_2_dropout_has_the_same_gradient_packed_and_one_by_one(
    tokenizer, store, micro_batch, activation, gradient_checkpointing
):
    model = make_model(tokenizer.vocab_size, shape=SHAPE | dict(feed_forward_proj=activation), dropout=0.2)
    model.key_dropout(5, 6)
    packed = gradients_after(model, micro_batch)
    model.zero_grad()
    model.gradient_checkpointing = gradient_checkpointing
    for i in reversed(IDS):
        model(batch_of(store, [i], tokenizer.pad_id, dropout=True)).backward()
    assert farthest(gradients_of(model), packed) <= 1e-5


def test_dropout_refuses_a_micro_batch_without_keys(tokenizer, store):
    with pytest.raises(AssertionError, match="keys"):
        make_model(tokenizer.vocab_size, dropout=0.1)(batch_of(store, IDS, tokenizer.pad_id))


def test_random_weights_depend_on_the_seed_alone(tokenizer):
    one = make_model(tokenizer.vocab_size, seed=5).state_dict()
    torch.manual_seed(99)
    same, other = (make_model(tokenizer.vocab_size, seed=seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if "norm" not in name)


def test_random_weights_have_the_standard_deviation_of_transformers(model):
    torch.manual_seed(0)
    stock = T5ForConditionalGeneration(T5Config(**SHAPE, vocab_size=model.config.vocab_size)).state_dict()
    for name, weight in model.state_dict().items():
        if "norm" in name:
            assert torch.equal(weight, stock[name])
            continue
        noise = 5 * (2 * weight.numel()) ** -0.5
        assert abs(weight.std() / stock[name].std() - 1) < 2 * noise, name
        assert abs(weight.mean()) < 5 * weight.std() * weight.numel() ** -0.5, name


def test_loss_of_random_weights_is_near_that_of_guessing(model, micro_batch):
    per_token = model(micro_batch) / len(micro_batch.labels)
    guessing = F.cross_entropy(torch.zeros(1, model.config.vocab_size), torch.zeros(1, dtype=torch.long))
    assert abs(per_token - guessing) < 1.0


def test_bf16_stays_near_float32(tokenizer, model, micro_batch):
    half = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16)
    assert half.hidden(micro_batch)[0].dtype == torch.bfloat16
    torch.testing.assert_close(half(micro_batch), model(micro_batch), rtol=5e-3, atol=0)
    ours, exact = gradients_after(half, micro_batch), gradients_after(model, micro_batch)
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    assert farthest(ours, exact) < 0.1


def test_the_state_holds_the_weights_under_their_names_and_nothing_else(model):
    assert model.state_dict().keys() == {name for name, _ in model.named_parameters()}
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in model.state_dict()
