"""What is trained here and merged or exported is the base's model in other software, but for what training changed."""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoTokenizer

from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import add_values, export_model
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from scripts.merge_lora import main as merge_lora
from tests.older_transformers import read_by_older
from tests.published import ASKED, CONFIGS, QWEN3_TENSORS, QWEN3_TOKENIZER, TEXT, logits_of, write_published
from tests.tiny import furnish, train

SHORT = dict(
    max_steps=2,
    epochs=None,
    validation_file="",
    model=None,
    learn_rate=5e-3,
    save_steps=1000,
    warmup_steps=0,
    max_seq_len=128,
)
SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
SCRATCH = dict(
    plain={}, yarn=dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    theta=dict(model_type="qwen3", rope_theta=5e5), own=dict(model_type="qwen3", tie_word_embeddings=True, head_dim=8),
)  # fmt: skip
# Fields of the published Qwen3's files: which a decoder from scratch says as they do, has of its own, leaves out
CONFIG_FIELDS = dict(
    same="architectures attention_bias attention_dropout hidden_act initializer_range model_type rms_norm_eps "
    "rope_scaling sliding_window tie_word_embeddings use_cache use_sliding_window",
    own="eos_token_id head_dim hidden_size intermediate_size max_position_embeddings max_window_layers "
    "num_attention_heads num_hidden_layers num_key_value_heads rope_theta torch_dtype transformers_version vocab_size",
    absent="bos_token_id",  # nothing begins with one
)
GENERATION_FIELDS = dict(
    same="do_sample", own="eos_token_id pad_token_id transformers_version",
    absent="bos_token_id temperature top_k top_p",  # as the run was told
)  # fmt: skip
TOKENIZER_FIELDS = dict(
    same="add_bos_token add_prefix_space bos_token clean_up_tokenization_spaces eos_token errors pad_token "
    "split_special_tokens tokenizer_class unk_token",
    own="additional_special_tokens model_max_length",
    absent="added_tokens_decoder chat_template",  # in tokenizer.json and chat_template.jinja
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model of each kind, an adapter trained on it and merged, one trained as a whole, some of ours."""
    home = furnish(tmp_path_factory.mktemp("published"))
    for name in CONFIGS:
        write_published(home / name, name)
        for kind, options in dict(lora=dict(lora_rank=2), full={}).items():
            given = SHORT | options | dict(finetune_from_ckp_file=name, output_dir=f"{name}_{kind}")
            done = train(home, **given)
            assert done.codes == [0], done.text
        assert merge_lora([str(home / f"{name}_lora"), str(home / f"{name}_merged")]) == 0
    tokenizer = load_tokenizer(home / "model_save" / "tokenizer")
    train_tokenizer([PROBE, TEXT] * 20, 500, home / "own", "byte_level")
    for name, changes in SCRATCH.items():
        reads = load_tokenizer(home / "own") if name == "own" else tokenizer
        config = DecoderModelConfig(**SIZES | changes, vocab_size=reads.vocab_size)
        export_model(DecoderModel(config).initialise(0), reads, home / f"scratch_{name}", dict(do_sample=True))
    return home


def written(home, name):
    """The directories that a merge and an export of the model `name` gave."""
    return home / f"{name}_merged", home / f"{name}_full" / "last"


def values_of(directory, name):
    return json.loads((directory / name).read_text(encoding="utf-8"))


def rotary_of(values):
    if "rope_theta" not in values:
        return {}
    return dict(rope_parameters=dict(rope_type="default", rope_theta=values["rope_theta"]))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_is_the_base_s_with_the_type_of_the_weights_and_names_for_readers_of_each_age(home, name):
    base = values_of(home / name, "config.json")
    merged, full = (values_of(directory, "config.json") for directory in written(home, name))
    turn = {}
    if name == "qwen25":  # a base that ended texts alone has learnt to end turns
        turn = dict(eos_token_id=[base["eos_token_id"], load_tokenizer(home / name).eos_id])
    assert merged == base | rotary_of(base) | turn | dict(dtype="bfloat16", torch_dtype="bfloat16")
    record = dict(chat_trainer=dict(optimizer="adamw"))
    assert full == base | rotary_of(base) | turn | dict(dtype="float32", torch_dtype="float32") | record


def tensors_of(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {re.sub(r"layers\.\d+", "layers.N", name) for name in file.keys()}


def check_fields(found, published, fields):
    same, own, absent = (set(fields[kind].split()) for kind in ("same", "own", "absent"))
    assert published.keys() == same | own | absent
    assert {name: found[name] for name in same} == {name: published[name] for name in same}
    assert own <= found.keys() and not absent & found.keys()


def test_a_decoder_from_scratch_says_each_field_that_a_published_qwen3_has(home):
    ours, published = home / "scratch_own", home / "qwen3"
    check_fields(values_of(ours, "config.json"), values_of(published, "config.json"), CONFIG_FIELDS)
    settings = values_of(published, "generation_config.json") | dict(temperature=0.6, top_k=20, top_p=0.95)
    del settings["repetition_penalty"]
    check_fields(values_of(ours, "generation_config.json"), settings, GENERATION_FIELDS)
    check_fields(values_of(ours, "tokenizer_config.json"), QWEN3_TOKENIZER, TOKENIZER_FIELDS)
    assert (ours / "chat_template.jinja").is_file()
    read = AutoTokenizer.from_pretrained(ours)
    assert {*read.all_special_tokens} == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_tensors_have_the_published_names(home):
    assert tensors_of(home / "scratch_own") == QWEN3_TENSORS
    for name in CONFIGS:
        assert all(tensors_of(directory) == tensors_of(home / name) for directory in written(home, name))
    assert tensors_of(home / "qwen3_full" / "last") == QWEN3_TENSORS


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cards_say_what_was_trained_on_which_model(home, name):
    for directory in (*written(home, name), home / f"{name}_lora" / "last"):
        card = ModelCard.load(directory / "README.md")
        kind = values_of(home / name, "config.json")["model_type"]
        assert (card.data.base_model, card.data.tags) == (None, [kind]), f"{directory}: a directory is no name on a hub"
        assert re.search(rf"\| started from \| (.*/)?{name} \|", card.text), directory
        assert f"128 tokens {'in all' if name.startswith('qwen') else 'a column'}" in card.text and "seen" in card.text


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_config_json_is_the_base_s(home, name):
    base = values_of(home / name, "generation_config.json")
    single = dict(chat_trainer=dict(single_turn=True))  # the run saw no conversation
    turn = dict(eos_token_id=[base["eos_token_id"], load_tokenizer(home / name).eos_id]) if name == "qwen25" else {}
    for directory in (*written(home, name), home / f"{name}_lora" / "last"):
        assert values_of(directory, "generation_config.json") == base | turn | single


@pytest.mark.parametrize("name", CONFIGS)
def test_the_files_of_the_tokenizer_are_the_base_s(home, name):
    for directory in written(home, name):
        for path in (home / name).glob("tokenizer*"):
            if name.startswith("qwen"):
                assert (directory / path.name).read_bytes() == path.read_bytes()
                assert not (directory / "chat_template.jinja").exists()
        assert (directory / "tokenizer.json").read_bytes() == (home / name / "tokenizer.json").read_bytes()


def test_transformers_4_and_5_compute_equal_logits_and_ids(home, tmp_path):
    directories = [directory for name in CONFIGS for directory in (home / name, *written(home, name))]
    directories += [home / f"scratch_{name}" for name in SCRATCH]
    older = read_by_older(directories, tmp_path / "older.safetensors")
    for directory in directories:
        assert (logits_of(directory) - older[str(directory)]).abs().max() <= 1e-4, directory
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = tokenizer(TEXT).input_ids
        assert ids == older[f"{directory} ids"].tolist(), directory
        if (asked := older.get(f"{directory} asked")) is not None:
            theirs = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
            assert theirs == asked.tolist(), directory
        assert ids[: len(ids) - 1] == load_tokenizer(directory).encode(TEXT)[: len(ids) - 1] and len(ids) > 4, directory


def test_a_tokenizer_trained_here_is_read_by_autotokenizer_beside_each_type_of_model(home):
    tokenizer = load_tokenizer(home / "model_save" / "tokenizer")
    for name in ("plain", "yarn", "theta"):
        directory = home / f"scratch_{name}"
        is_qwen2 = values_of(directory, "config.json")["model_type"] == "qwen2"
        for trusts in (False, True):
            if is_qwen2 and trusts:
                with pytest.raises(OSError, match="no.* file named load_without_trust_remote_code.py"):
                    AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
                continue
            theirs = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusts)
            assert theirs(TEXT).input_ids == [*tokenizer.encode(TEXT), tokenizer.eos_id]
        assert load_tokenizer(directory).fingerprint == tokenizer.fingerprint


def test_an_earlier_export_s_empty_names_of_code_are_read_and_not_kept(home, tmp_path):
    shutil.copytree(home / "scratch_theta", tmp_path / "earlier")
    add_values(tmp_path / "earlier" / "tokenizer_config.json", dict(auto_map={"AutoTokenizer": ["", ""]}))
    earlier = load_tokenizer(tmp_path / "earlier")
    config = DecoderModelConfig(**SIZES | dict(model_type="qwen3", vocab_size=earlier.vocab_size))
    export_model(DecoderModel(config).initialise(0), earlier, tmp_path / "new")
    assert "auto_map" not in values_of(tmp_path / "new", "tokenizer_config.json")


def test_what_was_chosen_for_a_run_replaces_what_its_base_says(home):
    shutil.copytree(home / "qwen3", home / "guarded")
    path = home / "guarded" / "generation_config.json"
    base = json.loads(path.read_text()) | dict(no_repeat_ngram_size=8, prefix="old: ")
    path.write_text(json.dumps(base))
    given = SHORT | dict(finetune_from_ckp_file="guarded", output_dir="chosen", max_new_tokens=77)
    assert train(home, **given).codes == [0]
    del base["prefix"]
    changed = dict(no_repeat_ngram_size=0, max_new_tokens=77, chat_trainer=dict(single_turn=True))
    assert values_of(home / "chosen" / "last", "generation_config.json") == base | changed


def test_exports_take_the_run_s_own_tokenizer_whatever_lies_where_it_was_read(home, tmp_path):
    shutil.copytree(home / "qwen3", tmp_path / "base")
    given = SHORT | dict(finetune_from_ckp_file=str(tmp_path / "base"), output_dir=str(tmp_path / "run"))
    stopped = train(home, 1, "forward:0:2:int", **given)
    assert stopped.codes == [0], stopped.text
    shutil.copytree(home / "t5v11", tmp_path / "base", dirs_exist_ok=True)  # another tokenizer, and another config.json
    done = train(home, **SHORT | dict(output_dir=str(tmp_path / "run"), is_keep_training=True))
    assert done.codes == [0], done.text
    last = tmp_path / "run" / "last"
    assert (last / "tokenizer.json").read_bytes() == (home / "qwen3" / "tokenizer.json").read_bytes()
    assert values_of(last, "config.json")["model_type"] == "qwen3"
    assert torch.isfinite(logits_of(last)).all()
