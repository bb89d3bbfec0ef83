import pytest
import torch
import ujson
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from model.formats.weights import export_model, load_weights
from model.generate.engine import Limits, generate
from model.nn.t5.huggingface import first_id
from model.train.evaluate import evaluate_loss
from model.train.objectives.pairs import Pairs
from tests.parts import PLAN, SHAPE, batch_of, evaluation_of, make_model, padded, stock_loss
from tests.stock import attention_of


def test_promise_1_the_exported_checkpoint_gives_the_logits_of_the_trainer(exported, model, store, tokenizer):
    stock = AutoModelForSeq2SeqLM.from_pretrained(exported)
    assert stock.dtype == torch.float32
    ids = range(20)
    batch = padded(store, ids, tokenizer.pad_id)
    micro_batch = batch_of(store, ids, tokenizer.pad_id)
    with torch.no_grad():
        theirs = stock(**batch).logits[batch["labels"] != -100]
        ours = model.hidden(micro_batch)[0] @ model.shared.weight.T
    assert (ours - theirs).abs().max() <= 1e-4


def test_promise_1_the_loss_of_stock_transformers_on_a_file_is_the_trainers(exported, model, store, tokenizer):
    stock = AutoModelForSeq2SeqLM.from_pretrained(exported)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(store), 8):
            ids = range(start, min(start + 8, len(store)))
            total += stock_loss(stock, padded(store, ids, tokenizer.pad_id)).item()
    expected = total / store.lengths[:, 1].sum()
    assert loss_of(model, store, tokenizer) == pytest.approx(expected, rel=1e-5)
    half = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16)
    assert loss_of(half, store, tokenizer) == pytest.approx(expected, rel=5e-3)


def loss_of(model, store, tokenizer):
    return evaluate_loss(evaluation_of(model, store, tokenizer), PLAN)["loss"]


def test_evaluation_leaves_the_model_in_training_mode_and_without_gradients(model, store, tokenizer):
    loss_of(model.train(), store, tokenizer)
    assert model.training
    assert not any(p.grad.any() for p in model.parameters())


def test_stock_tokenizer_beside_the_weights_gives_the_trainers_ids(exported, tokenizer):
    stock = AutoTokenizer.from_pretrained(exported)
    text = "你好，[EOS] world"
    ids = stock(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert ids == tokenizer.encode(text)
    assert (stock.pad_token_id, stock.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id)


VARIANTS = {
    "v1.1": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, scale_decoder_outputs=False),
    "gelu": dict(feed_forward_proj="gelu", num_heads=3, d_kv=8),
    "gated-silu, untied, scaled": dict(feed_forward_proj="gated-silu", tie_word_embeddings=False),
    "gated-relu, another start": dict(feed_forward_proj="gated-relu", decoder_start_token_id=9),
    "silu": dict(feed_forward_proj="silu", scale_decoder_outputs=False, num_decoder_layers=1),
    "mt5": dict(
        model_type="mt5", feed_forward_proj="gated-gelu", tie_word_embeddings=False, scale_decoder_outputs=False
    ),
    "mt5, tied": dict(model_type="mt5", feed_forward_proj="gated-gelu", scale_decoder_outputs=False),
    "umt5": dict(model_type="umt5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def variant(request, tokenizer):
    return make_model(tokenizer.vocab_size, shape=SHAPE | request.param)


@pytest.fixture
def stock_variant(variant, tokenizer, tmp_path):
    export_model(variant, tokenizer, tmp_path / "best")
    return AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "best", **attention_of(variant))


def test_promise_1_and_2_every_variant_has_the_logits_and_gradients_of_transformers(
    variant, stock_variant, store, tokenizer
):
    ids, start = range(8), first_id(variant.config, tokenizer)
    batch = padded(store, ids, tokenizer.pad_id)
    with torch.no_grad():
        theirs = stock_variant(**batch).logits[batch["labels"] != -100]
        ours = variant.hidden(batch_of(store, ids, start))[0] @ variant.output_weight.T
    assert (ours - theirs).abs().max() <= 1e-4
    variant(batch_of(store, ids, start)).backward()
    for one in ids:  # one by one
        stock_loss(stock_variant, padded(store, [one], tokenizer.pad_id)).backward()
    expected = dict(stock_variant.named_parameters())
    for name, p in variant.named_parameters():
        difference = (p.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert difference <= 1e-5, (name, difference)


def test_promise_1_every_variant_answers_as_transformers(variant, stock_variant, store, tokenizer):
    inputs, _ = Pairs().questions(store, list(range(8)))
    limits = Limits(3, max(map(len, inputs)), 12, first_id(variant.config, tokenizer), tokenizer.eos_id)
    for own, answer in zip(inputs, generate(variant, inputs, limits, 12), strict=True):
        (row,) = stock_variant.generate(torch.as_tensor(own)[None], max_new_tokens=12, do_sample=False).tolist()
        assert answer == [token for token in row[1:] if token != tokenizer.eos_id]


def test_every_variant_is_read_back_as_it_was_written(variant, tokenizer, tmp_path):
    export_model(variant, tokenizer, tmp_path / "best")
    read = load_weights(tmp_path / "best")
    assert read.model_config == variant.config
    assert read.tensors.keys() == variant.state_dict().keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in variant.state_dict().items())


def test_the_files_say_what_transformers_writes_for_the_model_that_it_reads_from_them(stock_variant, tmp_path):
    stock_variant.save_pretrained(tmp_path / "again")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (ujson.loads((tmp_path / folder / name).read_text()) for folder in ("best", "again"))
        ours.pop("tie_word_embeddings", None)  # which transformers sets when it reads an embedding that is not tied
        ours.pop("torch_dtype", None)  # for older readers
        assert theirs | ours == theirs
    kept, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("best", "again"))
    assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)


def two_embeddings(state):
    return state | {"encoder.embed_tokens.weight": state["shared.weight"] + 1}


def without_embedding(state):
    return {name: tensor for name, tensor in state.items() if name != "shared.weight"}


def of_minimind(state):
    return {"model.embed_tokens.weight": state["shared.weight"]}


@pytest.mark.parametrize(
    "change, words",
    [
        (two_embeddings, "does not tie encoder.embed_tokens.weight"),
        (without_embedding, "not a T5"),
        (of_minimind, r"a decoder's weights without its config.json: give a Hugging Face directory .*convert_model.py"),
    ],
)
def test_another_architecture_is_refused(tmp_path, model, change, words):
    torch.save(change(model.state_dict()), tmp_path / "other.bin")
    with pytest.raises(ValueError, match=words):
        load_weights(tmp_path / "other.bin")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ""),
        ("[]", ""),
        ('{"model_type": "bert"}', "'bert'"),
        ('{"model_type": "t5", "d_ff": 3}', "it lacks d_model"),
    ],
)
def test_a_config_of_another_model_is_refused(exported, text, words):
    (exported / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json.*{words}"):
        load_weights(exported)


def configured(exported, **changes):
    """`exported` with these values in its config.json."""
    config = ujson.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(ujson.dumps(config | changes))
    return exported


@pytest.mark.parametrize(
    "name, value",
    [
        ("dense_act_fn", "gelu_new"), ("is_gated_act", True), ("tie_encoder_decoder", True),
        ("is_encoder_decoder", False), ("quantization_config", {"bits": 8}), ("hidden_size", 7),
    ],
)  # fmt: skip
def test_a_t5_with_another_computation_is_refused_with_the_field_s_name(exported, name, value):
    with pytest.raises(ValueError, match=f"config.json says {name}="):
        load_weights(configured(exported, **{name: value}))
    torch.save(load_file(exported / "model.safetensors"), exported / "pytorch_model.bin")
    for file in ("pytorch_model.bin", "model.safetensors"):
        with pytest.raises(ValueError, match=f"config.json says {name}="):
            load_weights(exported / file)


def test_an_older_config_without_some_fields_is_read(exported, model):
    config = ujson.loads((exported / "config.json").read_text())
    lacks = ("num_decoder_layers", "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "feed_forward_proj")
    (exported / "config.json").write_text(ujson.dumps({k: v for k, v in config.items() if k not in lacks}))
    assert load_weights(exported).model_config == model.config
