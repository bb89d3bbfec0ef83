"""Adapters against PEFT: the same gradients, the same logits, merged and not."""

import numpy as np
import peft
import pytest
import torch

from model.data.sequences import Sequences
from model.nn.base import Packing
from model.nn.lora import LoraConfig, attach, draw, is_factor, merged
from model.nn.registry import family_of
from model.nn.t5.family import T5
from model.train.examples import Examples
from model.train.objectives.pairs import Pairs
from tests.parts import SHAPE, batch_of, farthest, gradients_of, make_model, padded, stock_loss
from tests.stock import as_hugging_face
from tests.tenants.causal import CAUSAL, CausalConfig, CausalModel, collate

IDS = [3, 0, 41, 17, 8, 22, 59]
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, scale_decoder_outputs=False)
SHAPES = {
    "v1.0": SHAPE,
    "v1.1": SHAPE | GATED,
    "mt5": SHAPE | GATED | dict(model_type="mt5"),
    "umt5": SHAPE | dict(model_type="umt5", feed_forward_proj="gated-gelu"),
    "equal widths": SHAPE | dict(d_ff=32, num_heads=2, d_kv=16),  # of the factors A and B, with a rank of 32
}
ALL = ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo")


def targets_in(model, wanted=ALL):
    names = {name.split(".")[-2] for name, _ in model.named_parameters()}
    return tuple(name for name in wanted if name in names)


def adapted(model, targets=None, seed=3, **options):
    """`model` with drawn adapters whose B is not zero."""
    lora = LoraConfig(**dict(rank=4, alpha=6, targets=targets or targets_in(model)) | options)
    draw(attach(model, lora), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_factor(name, "lora_B"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def with_peft(stock, model):
    """PEFT's model around transformers' `stock`, with the factors of `model`."""
    lora = model.lora
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), use_rslora=lora.use_rslora,
        task_type=family_of(model.config).task_type,
    )  # fmt: skip
    theirs = peft.get_peft_model(stock, config).eval()
    factors = {f"base_model.model.{name}": t.clone() for name, t in model.saved_tensors().items()}
    left = peft.set_peft_model_state_dict(theirs, factors)
    assert not left.unexpected_keys and not [name for name in left.missing_keys if "lora" in name]
    return theirs


def stock_of(vocab_size, tokenizer, shape):
    return as_hugging_face(make_model(vocab_size, shape=shape), tokenizer)


def gradients_after(model, batch):
    model.zero_grad()
    model(batch, chunk_tokens=16).backward()
    return gradients_of(model)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_promise_2_gradients_are_those_of_peft(name, use_rslora, store, tokenizer):
    size, rank = tokenizer.vocab_size, 32 if name == "equal widths" else 4
    model = adapted(make_model(size, shape=SHAPES[name]), rank=rank, use_rslora=use_rslora)
    theirs = with_peft(stock_of(size, tokenizer, SHAPES[name]), model)
    stock_loss(theirs, padded(store, IDS, tokenizer.pad_id)).backward()
    expected = {
        key.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for key, p in theirs.named_parameters() if p.grad is not None
    }  # fmt: skip
    assert farthest(gradients_after(model, batch_of(store, IDS, tokenizer.pad_id)), expected) <= 1e-5


@pytest.mark.parametrize("targets", [("q", "v"), ("k", "wo"), ("DenseReluDense.wi",), ("EncDecAttention.o", "v")])
def test_any_targets_have_the_gradients_of_peft(targets, store, tokenizer):
    model = adapted(make_model(tokenizer.vocab_size), targets)
    theirs = with_peft(stock_of(tokenizer.vocab_size, tokenizer, SHAPE), model)
    stock_loss(theirs, padded(store, IDS, tokenizer.pad_id)).backward()
    ours = gradients_after(model, batch_of(store, IDS, tokenizer.pad_id))
    for name, p in theirs.named_parameters():
        if p.grad is not None:
            own = ours.pop(name.removeprefix("base_model.model.").replace(".default", ""))
            assert (own - p.grad).norm() <= 1e-5 * p.grad.norm(), name
    assert not ours


def test_merged_weights_give_the_logits_of_the_adapted_model(store, tokenizer):
    model, plain = adapted(make_model(tokenizer.vocab_size)), make_model(tokenizer.vocab_size)
    factors = model.saved_tensors()
    tensors = {name: merged(name, weight, factors, model.lora) for name, weight in plain.state_dict().items()}
    plain.load_state_dict(tensors)
    batch = batch_of(store, IDS, tokenizer.pad_id)
    ours, added = (one.hidden(batch)[0] @ one.shared.weight.T for one in (model, plain))
    assert (ours - added).abs().max() <= 1e-4 and ours.std() > 0.05


def test_only_factors_have_gradients_and_the_base_is_held_once_in_the_compute_dtype(store, tokenizer):
    model = adapted(make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16))
    assert gradients_after(model, batch_of(store, IDS, tokenizer.pad_id)).keys() == model.saved_tensors().keys()
    factors = sum(t.numel() for t in model.saved_tensors().values())
    flat = model.flat
    assert flat.masters.numel() == flat.gradients.numel() == flat.copies.numel() == factors
    assert model.shared.weight.dtype == model.encoder.block[0].layer[0].SelfAttention.q.weight.dtype == torch.bfloat16
    matrices = sum(p.numel() for p in model.parameters() if p.dtype == torch.bfloat16)
    assert len(flat.frozen[0]) - matrices <= 64 * SHAPE["d_model"], "beside the padding of the table, nothing is twice"


def test_layers_with_biases_and_without_kernels_have_adapters_too():
    config = CausalConfig(vocab_size=60)
    model = adapted(CausalModel(config).initialise(1), CAUSAL.adapter_targets(config))
    plain = CausalModel(config).initialise(1)
    with torch.no_grad():
        for one in (model, plain):
            one.blocks[0].q.bias.fill_(0.5)
            one.blocks[1].v.bias.fill_(-0.5)
    factors = model.saved_tensors()
    tensors = {name: merged(name, weight, factors, model.lora) for name, weight in plain.state_dict().items()}
    lengths = np.array([[3, 5], [9, 2]])
    sequences = Sequences(tuple(np.arange(column.sum()) for column in lengths.T), lengths)
    batch = collate(sequences, Packing(0))
    before = plain.hidden(batch)[0].detach().clone()
    plain.load_state_dict(tensors)
    assert (model.hidden(batch)[0] - plain.hidden(batch)[0]).abs().max() <= 1e-5
    assert (before - plain.hidden(batch)[0]).abs().max() > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_in_the_kernels_on_a_gpu_are_near_those_in_float32(dropout, store, tokenizer):
    shape, gradients = SHAPE | dict(num_heads=1, d_kv=64), []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        model = adapted(make_model(tokenizer.vocab_size, shape=shape, compute_dtype=dtype), dropout=dropout).to(device)
        model.key_dropout(3, 4)
        batch = Examples(store, Pairs(), T5, 0, 1, model.uses_kernels, dropout > 0).batch(range(40), 1).to(device)
        gradients.append({name: g.cpu() for name, g in gradients_after(model, batch).items()})
    assert farthest(*gradients) < 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_promise_2_dropout_of_adapters_has_the_same_gradient_packed_and_one_by_one(checkpointing, store, tokenizer):
    model = adapted(make_model(tokenizer.vocab_size), dropout=0.3)
    model.key_dropout(5, 6)
    packed = gradients_after(model, batch_of(store, IDS, tokenizer.pad_id, dropout=True))
    model.lora = None
    plain = gradients_after(model.eval(), batch_of(store, IDS, tokenizer.pad_id))
    assert farthest(packed, plain) > 0.1
    model.lora, model.gradient_checkpointing = LoraConfig(rank=4, alpha=6, targets=ALL, dropout=0.3), checkpointing
    model.train().zero_grad()
    for i in reversed(IDS):
        model(batch_of(store, [i], tokenizer.pad_id, dropout=True)).backward()
    assert farthest(gradients_of(model), packed) <= 1e-5


def test_an_adapter_of_a_layer_drops_with_masks_of_its_own(tokenizer):
    model = adapted(make_model(tokenizer.vocab_size), dropout=0.3)
    sites = [p.adapter.site for p in model.parameters() if hasattr(p, "adapter")]
    assert len(set(sites)) == len(sites) == len(model.saved_tensors()) / 2


@pytest.mark.parametrize("init", ["uniform", "gaussian"])
def test_factors_are_drawn_as_peft_draws_them(init, tokenizer):
    model = make_model(tokenizer.vocab_size)
    targets, options = targets_in(model), dict(task_type="SEQ_2_SEQ_LM", init_lora_weights=init == "uniform" or init)
    theirs = peft.get_peft_model(
        stock_of(tokenizer.vocab_size, tokenizer, SHAPE), peft.LoraConfig(r=4, target_modules=list(targets), **options)
    )
    stock = torch.cat([p.flatten() for name, p in theirs.named_parameters() if "lora_A" in name])
    draw(attach(model, LoraConfig(rank=4, alpha=8, targets=targets)), 0, init)
    drawn = {name: p for name, p in model.named_parameters() if "lora_" in name}
    ours = torch.cat([p.flatten() for name, p in drawn.items() if is_factor(name, "lora_A")])
    assert not any(p.any() for name, p in drawn.items() if is_factor(name, "lora_B"))
    assert len(ours) == len(stock)
    for moment in (2, 4):  # the fourth tells a gaussian from a uniform of equal variance
        assert ours.pow(moment).mean().item() == pytest.approx(stock.pow(moment).mean().item(), rel=0.25)


def test_a_target_that_names_no_layer_is_refused_with_the_names_there_are(tokenizer):
    with pytest.raises(ValueError, match="lora_targets=q_proj.*name some of k, o, q, v, wi, wo"):
        attach(make_model(tokenizer.vocab_size), LoraConfig(rank=4, alpha=8, targets=("q", "q_proj")))
