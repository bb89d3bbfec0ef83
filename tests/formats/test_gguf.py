"""A decoder in a GGUF file has its tensors, sizes and tokenizer; llama.cpp gives its ids and its greedy answers."""

import json
import shutil
import unicodedata

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.data.turn_template import write_turn_template
from model.formats.conversions import to_gguf
from model.formats.gguf_vocabulary import CONTROL, RULES, UNUSED, USER_DEFINED, GgufVocabulary, texts_for
from model.formats.weights import add_values, export_model, load_weights
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.rotary import rotary_at
from model.nn.decoder.sizes import DecoderModelConfig
from model.serve.answering import load_chat_model, prompt_ids
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.data.test_tokenizer import random_strings
from tests.llama import answers_of, asked_of, first_difference, greedy_of, open_in_llama_cpp
from tests.nn.decoder.test_network import SIZES, VARIANTS

gguf = pytest.importorskip("gguf")
NAMES = {"qwen2": "qwen2 tied, grouped", "qwen3": "qwen3", "llama3": "llama 3", "yarn": "qwen3, YaRN"}
MODELS = (*NAMES, "trained_here")
SPARE = 5  # rows of the embedding beyond the tokenizer's
TALKS = [(PROBE * 2)[start : start + 1 + start % 9] for start in range(0, 128, 2)]
NEAR_TIE = 0.05  # nats


def write_decoder(directory, tokenizer, **changes):
    """Write a decoder with random weights, norms and biases too, and return its configuration."""
    config = DecoderModelConfig(**SIZES | changes | dict(vocab_size=tokenizer.vocab_size + SPARE))
    model = DecoderModel(config).initialise(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.2)
    export_model(model, tokenizer, directory)
    return config


def written(directory, kind="f32"):
    """The GGUF file of this type that the model in a directory gives, beside it."""
    target = directory.with_name(f"{directory.name}-{kind}")
    shutil.rmtree(target, ignore_errors=True)
    to_gguf(directory, target, kind)
    (path,) = target.glob("*.gguf")
    return path


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a Qwen tokenizer, one trained here, and a decoder of each kind."""
    home = tmp_path_factory.mktemp("gguf")
    tokenizer = make_qwen_tokenizer(home / "qwen", marks=("<think>",))
    for name, variant in NAMES.items():
        write_decoder(home / name, tokenizer, **VARIANTS[variant])
    train_tokenizer([PROBE, "你好 how are you 12 345 6789"] * 20, 500, home / "own", "byte_level")
    write_turn_template(load_tokenizer(home / "own"), home / "own")
    write_decoder(home / "trained_here", load_tokenizer(home / "own"), model_type="qwen3", head_dim=12)
    return home


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_of_a_file_are_the_model_s_and_its_fields_say_the_sizes(home, name):
    weights, path = load_weights(home / name), written(home / name)
    c, found = weights.model_config, {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    scaled = found.pop("rope_freqs.weight", None)
    assert len(found) == len(weights.tensors) and ("output.weight" in found) == (not c.tie_word_embeddings)
    for theirs, ours in (("embed_tokens", "token_embd"), ("layers.2.mlp.down_proj", "blk.2.ffn_down")):
        assert np.array_equal(found[f"{ours}.weight"], weights.read(f"model.{theirs}.weight").numpy())
    q, stored = weights.read("model.layers.1.self_attn.q_proj.weight").numpy(), found["blk.1.attn_q.weight"]
    if (
        c.model_type == "llama"
    ):  # a pair that rotates together is at (i, i + K / 2) in one and (2i, 2i + 1) in the other
        half = c.head_dim // 2
        assert np.array_equal(stored[c.head_dim : c.head_dim + 2], q[[c.head_dim, c.head_dim + half]])
        angles = torch.atan2(*(getattr(rotary_at(torch.tensor([1]), c), part)[0] for part in ("sin", "cos"))).numpy()
        plain = 1 / c.rope_theta ** (np.arange(half) / half)
        assert np.allclose(plain / scaled, angles, rtol=1e-5)
    else:
        assert np.array_equal(stored, q) and scaled is None
    fields = fields_of(path)
    sizes = dict(
        block_count=3, embedding_length=32, feed_forward_length=48, vocab_size=c.vocab_size,
        context_length=c.max_position_embeddings,
    )  # fmt: skip
    heads = {"head_count": 4, "head_count_kv": c.num_key_value_heads, "key_length": c.head_dim}
    wanted = sizes | {f"attention.{key}": value for key, value in heads.items()} | {"rope.freq_base": c.rope_theta}
    assert fields["general.architecture"] == c.model_type
    assert {key: fields[f"{c.model_type}.{key}"] for key in wanted} == wanted
    scaling = {key.partition("scaling.")[2]: value for key, value in fields.items() if "rope.scaling" in key}
    yarn = dict(type="yarn", factor=4.0, original_context_length=16, yarn_beta_fast=32.0, yarn_beta_slow=1.0)
    assert scaling == (yarn if name == "yarn" else {})


@pytest.mark.parametrize("kind, error", [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 8e-3)])
def test_other_types_hold_the_matrices_to_their_precision_and_vectors_whole(home, kind, error):
    weights = load_weights(home / "qwen3")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(written(home / "qwen3", kind)).tensors}
    matrix, source = tensors["blk.0.ffn_up.weight"], weights.read("model.layers.0.mlp.up_proj.weight").numpy()
    assert matrix.tensor_type.name == kind.upper()
    found = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    assert found.shape == source.shape and abs(found - source).max() <= error * abs(source).max()
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == (kind if kind != "q8_0" else "f16").upper(), (
        "rows of 48"
    )
    norm = weights.read("model.norm.weight").numpy()
    assert np.array_equal(tensors["output_norm.weight"].data, norm)


def test_the_tokenizer_is_in_the_file_with_its_marks_ends_and_template(home):
    add_values(home / "qwen3" / "generation_config.json", dict(eos_token_id=[402, 400]))
    fields, tokenizer = fields_of(written(home / "qwen3", "bf16")), load_tokenizer(home / "qwen3")
    ids = {text: tokenizer.backend.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>", "<think>", "天", "Ġ")}
    found = {key.removeprefix("tokenizer."): value for key, value in fields.items() if key.startswith("tokenizer.")}
    assert (found["ggml.model"], found["ggml.pre"]) == ("gpt2", "qwen2")
    tokens, types = found["ggml.tokens"], found["ggml.token_type"]
    assert all(tokens[number] == text for text, number in ids.items() if number is not None)
    assert len(tokens) == len(types) == tokenizer.vocab_size + SPARE
    assert types[-SPARE:] == [UNUSED] * SPARE and tokens[-1] == f"[PAD{len(tokens) - 1}]"
    assert (types[ids["<|im_end|>"]], types[ids["<think>"]], types[ids["Ġ"]]) == (CONTROL, USER_DEFINED, 1)
    ends = found["ggml.eos_token_id"], found["ggml.eot_token_id"]
    assert ends == (ids["<|im_end|>"], ids["<|endoftext|>"])
    assert found["ggml.padding_token_id"] == found["ggml.bos_token_id"] == ids["<|endoftext|>"]
    assert found["ggml.add_bos_token"] is False and found["chat_template"].startswith("{% for message in messages %}")
    assert len(found["ggml.merges"]) > 50 and found["ggml.merges"][0].count(" ") == 1


def write_with_rules(directory, name):
    """A byte-level tokenizer that cuts texts by the rules of this name, with merges of digits where they allow them."""
    tokenizer = make_qwen_tokenizer(directory, marks=("<think>",))
    state, (pattern, whole) = json.loads(tokenizer.backend.to_str()), RULES.get(name, (name, False))
    own = name == "gpt-2"  # ByteLevel's own rules, as MiniMind's tokenizer has them
    steps = [dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=own)]
    if not own:
        steps.insert(0, dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False))
    state["pre_tokenizer"] = dict(type="Sequence", pretokenizers=steps)
    backend = tokenizer.backend.from_str(json.dumps(state))
    backend.model = models.BPE(ignore_merges=whole)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(
        [PROBE, "12 345 6789 0.12 = 345 6789\n\n  'S don't I'LL WORLD Hello ...\n"] * 9, trainer
    )
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.mark.parametrize("name", RULES)
def test_the_rules_that_give_a_tokenizer_s_ids_are_found_by_texts(tmp_path, name):
    tokenizer = write_with_rules(tmp_path, name)
    assert GgufVocabulary(tokenizer, tokenizer.vocab_size).rules == name


def test_a_tokenizer_of_other_rules_is_refused_with_a_text_of_other_ids(tmp_path, home, tokenizer):
    own = write_with_rules(tmp_path / "odd", r"\p{N}{2}|[^\p{N}]{1,3}|\p{N}")
    write_decoder(tmp_path / "model", own)
    with pytest.raises(ValueError, match="known here .*: its ids of .* differ"):
        to_gguf(tmp_path / "model", tmp_path / "out")
    write_decoder(tmp_path / "characters", tokenizer)
    with pytest.raises(ValueError, match="is not byte-level .* --kind=byte_level"):
        to_gguf(tmp_path / "characters", tmp_path / "out")
    with pytest.raises(ValueError, match="give the model its own tokenizer"):
        _ = GgufVocabulary(own, own.vocab_size - 1).rules
    assert not (tmp_path / "out").exists()


def test_what_such_a_file_cannot_hold_is_refused_before_it_stands_there(tmp_path, home, model, tokenizer):
    qwen = load_tokenizer(home / "qwen")
    write_decoder(tmp_path / "scaled", qwen, rope_scaling=VARIANTS["llama 3"]["rope_scaling"])
    with pytest.raises(ValueError, match="llama.cpp reads it for model_type=llama alone"):
        to_gguf(tmp_path / "scaled", tmp_path / "out")
    export_model(model, tokenizer, tmp_path / "t5")
    with pytest.raises(ValueError, match="is a t5: llama.cpp's programs run no encoder: --to ctranslate2"):
        to_gguf(tmp_path / "t5", tmp_path / "out")
    config = write_decoder(tmp_path / "large", qwen)
    large = DecoderModel(config).initialise(0)
    with torch.no_grad():
        next(p for p in large.parameters() if p.dim() == 2).mul_(1e7)
    export_model(large, qwen, tmp_path / "large")
    with pytest.raises(ValueError, match="f16 holds up to 65504: --type bf16"):
        to_gguf(tmp_path / "large", tmp_path / "out")
    tensors = load_file(home / "qwen3" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    shutil.copytree(home / "qwen3", tmp_path / "damaged")
    save_file(tensors, tmp_path / "damaged" / "model.safetensors")
    with pytest.raises(ValueError, match="1 tensors missing"):
        to_gguf(tmp_path / "damaged", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", RULES)
def test_llama_cpp_gives_the_ids_of_each_text(tmp_path, name):
    pytest.importorskip("llama_cpp")
    tokenizer = write_with_rules(tmp_path / "tokenizer", name)
    write_decoder(tmp_path / "model", tokenizer)
    engine = open_in_llama_cpp(written(tmp_path / "model"), vocab_only=True)
    odd = [unicodedata.normalize("NFC", text) for text in random_strings(1000)]
    for text in [*texts_for(tokenizer), *odd]:
        assert engine.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.parse(text), ascii(text)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_64_of_64_greedy_answers_in_float32_and_leaves_them_at_near_ties_in_float16(home, name):
    pytest.importorskip("llama_cpp")
    chat = load_chat_model(home / name, "cpu")
    inputs = [prompt_ids(chat, [("user", text)], 128) for text in TALKS]
    answers = answers_of(chat, inputs)
    whole, half = (open_in_llama_cpp(written(home / name, kind)) for kind in ("f32", "f16"))
    assert asked_of(whole, TALKS) == inputs and len(TALKS) == 64 and len(set(map(tuple, answers))) > 50
    assert [greedy_of(whole, ids) for ids in inputs] == answers
    theirs = AutoModelForCausalLM.from_pretrained(home / name).eval()
    gaps = [first_difference(theirs, ids, row, greedy_of(half, ids)) for ids, row in zip(inputs, answers, strict=True)]
    assert all(0 <= gap <= NEAR_TIE for gap in gaps if gap is not None)
