"""Qwen directories of Hugging Face: read, in one file or several, and refused by the field that is not computed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from model.data.sequences import Sequences
from model.formats.weights import load_weights, write_model
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.family import DECODER
from model.nn.decoder.huggingface import check_config, config_of
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.memory_spec import count_numbers
from model.nn.registry import config_from, config_values, load_model_config
from model.serve.answering import _frozen
from tests.nn.decoder.test_network import IDS, SIZES, VARIANTS
from tests.stock import as_hugging_face


def saved(folder, variant, **options):
    """(model, its directory as transformers writes it)."""
    model = DecoderModel(DecoderModelConfig(**SIZES | VARIANTS[variant])).initialise(1)
    as_hugging_face(model, IDS).save_pretrained(folder, **options)
    return model, folder


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard", ["1GB", "15KB"])
def test_a_directory_of_one_file_or_several_is_read_as_it_was_written(tmp_path, variant, shard):
    model, folder = saved(tmp_path, variant, max_shard_size=shard)
    assert len(list(folder.glob("*.safetensors"))) > 2 or shard == "1GB"
    read = load_weights(folder)
    assert read.model_config == model.config
    again = _frozen(read, folder, torch.device("cpu"), torch.float32)
    assert all(torch.equal(again.state_dict()[name], x) for name, x in model.state_dict().items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.tie_word_embeddings == model.config.tie_word_embeddings
    ids = torch.arange(2, 30)[None]
    assert torch.equal(theirs(ids).logits, as_hugging_face(model, IDS)(ids).logits)


@pytest.mark.parametrize(("name", "parameters"), [("mini", 63_912_192), ("mini_26m", 25_830_912)])
def test_minimind_s_sizes_begin_as_transformers_draws_qwen3_and_are_read_as_it(tmp_path, name, parameters):
    sizes = replace(load_model_config(name), vocab_size=6400)
    assert count_numbers(DECODER, sizes).weights == parameters
    model = DecoderModel(replace(sizes, vocab_size=90, num_hidden_layers=1)).initialise(1)
    write_model(model, IDS, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is transformers.Qwen3ForCausalLM
    ids = torch.arange(2, 60)[None]
    ours = model.hidden(collate(Sequences((ids[0].numpy(),), np.array([[58]]), ids=np.array([0])), Packing(0)))[0]
    torch.testing.assert_close(ours @ model.output_weight.T, theirs(ids).logits[0, :-1])
    drawn = transformers.Qwen3ForCausalLM(theirs.config).state_dict()
    deviations = {name: (x.std().item(), drawn[name].std().item()) for name, x in model.state_dict().items()}
    assert all(one == pytest.approx(other, rel=0.05) for one, other in deviations.values())


def test_a_placed_network_holds_its_weights_in_the_flat_tensors_alone():
    with torch.device("meta"):
        model = DecoderModel(DecoderModelConfig(**SIZES))
    model.place("cpu").initialise(1)
    plain = DecoderModel(DecoderModelConfig(**SIZES)).initialise(1)
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in model.state_dict().items())
    flats = {flat.untyped_storage().data_ptr() for flat in model.flat.weights}
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} <= flats


@pytest.mark.parametrize("named", ["../other.safetensors", "/etc/passwd", ".hidden.safetensors", "a/b.safetensors", 3])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path, named):
    _, folder = saved(tmp_path / "model", "qwen2", max_shard_size="15KB")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = named
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="weight_map must name files beside it"):
        load_weights(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    _, folder = saved(tmp_path, "qwen2", max_shard_size="15KB")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps(values | dict(weight_map=values["weight_map"] | {"more": "model-00009.safetensors"})))
    with pytest.raises(ValueError, match="names model-00009.safetensors, and it is not there"):
        load_weights(folder)
    del values["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="tensors and its files hold"):
        load_weights(folder)


PUBLISHED = dict(  # fields of Qwen1.5-7B's config.json
    model_type="qwen2", hidden_act="silu", hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
    num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768,
    tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936, max_window_layers=28,
)  # fmt: skip


def test_the_sizes_of_published_models_are_read():
    config = config_of(PUBLISHED, "config.json")
    check_config(PUBLISHED, "config.json")
    assert (config.head_dim, config.rope_theta, config.vocab_size) == (128, 1e6, 151_936)
    newer = PUBLISHED | dict(rope_theta=None, rope_parameters=dict(rope_type="default", rope_theta=5e6), head_dim=64)
    assert (config_of(newer, "").rope_theta, config_of(newer, "").head_dim) == (5e6, 64)
    assert config_of(PUBLISHED | dict(model_type="qwen3"), "").head_dim == 128
    older = PUBLISHED | dict(model_type="llama", num_key_value_heads=None)
    assert config_of(older, "").num_key_value_heads == 32


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(use_sliding_window=True), "use_sliding_window"), (dict(hidden_act="gelu"), "hidden_act"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types='sliding_attention'"),
        (dict(attention_bias=True), "attention_bias"), (dict(quantization_config=dict(bits=4)), "quantization_config"),
        (dict(rope_scaling=[1]), "rope_parameters"), (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_field(changes, field):
    with pytest.raises(ValueError, match=field):
        check_config(PUBLISHED | changes, "config.json")


@pytest.mark.parametrize(
    "changes",
    [dict(num_key_value_heads=5), dict(hidden_size=0), dict(head_dim=7), dict(rms_norm_eps="1"), dict(vocab_size=0),
     dict(num_attention_heads=7), dict(rope_theta=-1.0), dict(num_hidden_layers=10**6), dict(rope_theta="x"),
     dict(rope_scaling=dict(type="dynamic", factor=2.0)),
     dict(rope_scaling=dict(type="yarn", factor=-4.0)), dict(rope_parameters=dict(rope_type="linear")),
     dict(rope_scaling=dict(type="linear", factor=1e300)), dict(rope_scaling=dict(type=["yarn"], factor=4.0)),
     dict(rope_scaling=dict(rope_type="longrope", factor=2.0, short_factor=[1]))],
)  # fmt: skip
def test_sizes_that_no_model_can_have_are_refused(changes):
    with pytest.raises(ValueError, match="config.json is not a decoder's configuration"):
        config_of(PUBLISHED | changes, "config.json")


@pytest.mark.parametrize(
    "value, words", [(None, "it lacks hidden_size, and a model needs"), ("x", "must be whole.*hidden_size='x'")]
)
def test_a_size_that_is_missing_or_no_number_is_named_with_the_rule_and_what_to_do(value, words):
    with pytest.raises(ValueError, match=f"config.json is not.*{words}.*take the config.json that"):
        config_of(PUBLISHED | dict(hidden_size=value), "config.json")


def test_a_model_s_json_file_chooses_the_variant_by_the_family():
    values = dict(SIZES, family="qwen3", num_key_value_heads=2)
    config = config_from(values)
    assert config.model_type == "qwen3" and config_from(config_values(config)) == config
    assert config_from(SIZES | dict(family="qwen2")).has_biases
