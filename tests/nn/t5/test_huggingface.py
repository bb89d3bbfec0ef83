import copy
import json
import multiprocessing
import os
import resource
import shutil
import struct
import time
import zipfile
from dataclasses import replace

import pytest
import torch
import ujson
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from bench.fuzz_strangers import pickled_bytes, pickled_tensor, write_archive
from config import T5ModelConfig
from model.data.token_store import open_store
from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.generate.answers import answer
from model.nn.t5.batch import collate
from model.nn.t5.huggingface import as_hugging_face
from model.nn.t5.network import TextToTextModel
from model.nn.weights_io import export_model, load_into, load_weights
from model.train.evaluate import answer_pairs, evaluate_loss
from model.train.optim import make_optimizer
from tests.parts import ALONE, PLAN, SHAPE, make_config, make_model, padded, stock_loss, write_parquet


@pytest.fixture
def exported(model, tokenizer, tmp_path):
    export_model(model, tokenizer, tmp_path / "best")
    return tmp_path / "best"


def assert_holds(weights, model):
    state = model.state_dict()
    assert weights.tensors.keys() == state.keys()
    assert all(torch.equal(weights.tensors[name], state[name]) for name in state)


def test_promise_1_the_exported_checkpoint_gives_the_logits_of_the_trainer(exported, model, store, tokenizer):
    stock = AutoModelForSeq2SeqLM.from_pretrained(exported)
    assert stock.dtype == torch.float32
    ids = range(20)
    batch = padded(store, ids, tokenizer.pad_id)
    micro_batch = collate(store, ids, tokenizer.pad_id, "cpu")
    with torch.no_grad():
        theirs = stock(**batch).logits[batch["labels"] != -100]
        ours = model.decode(micro_batch) @ model.shared.weight.T
    assert (ours - theirs).abs().max() <= 1e-4


def test_promise_1_the_loss_of_stock_transformers_on_a_file_is_the_trainers(exported, model, store, tokenizer):
    stock = AutoModelForSeq2SeqLM.from_pretrained(exported)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(store), 8):
            ids = range(start, min(start + 8, len(store)))
            total += stock_loss(stock, padded(store, ids, tokenizer.pad_id)).item()
    expected = total / store.lengths[:, 1].sum()
    assert evaluate_loss(ALONE, model, store, PLAN, tokenizer.pad_id) == pytest.approx(expected, rel=1e-5)
    half = make_model(tokenizer.vocab_size, compute_dtype=torch.bfloat16)
    assert evaluate_loss(ALONE, half, store, PLAN, tokenizer.pad_id) == pytest.approx(expected, rel=5e-3)


def test_evaluation_leaves_the_model_in_training_mode_and_without_gradients(model, store, tokenizer):
    evaluate_loss(ALONE, model.train(), store, PLAN, tokenizer.pad_id)
    assert model.training
    assert not any(p.grad.any() for p in model.parameters())


def test_stock_tokenizer_beside_the_weights_gives_the_trainers_ids(exported, tokenizer):
    stock = AutoTokenizer.from_pretrained(exported)
    text = "你好，[EOS] world"
    assert stock(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert (stock.pad_token_id, stock.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id)


def padding_with_eos(tokenizer, directory):
    """A copy of `tokenizer` in `directory` whose pad token is its EOS, as many have it."""
    copy_tokenizer(tokenizer.directory, directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | dict(pad_token="[EOS]")))
    return load_tokenizer(directory)


@pytest.mark.parametrize("pad", ["[PAD]", "[EOS]"])
def test_generation_of_an_over_fitted_pair_stops_at_eos(tmp_path, tokenizer, pad):
    tokenizer = padding_with_eos(tokenizer, tmp_path / "given") if pad == "[EOS]" else tokenizer
    prompt, response = "今天天气怎么样", "今天天气真好"
    store = open_store(
        write_parquet(tmp_path / "one.parquet", [(prompt, response)]), tokenizer, 64, tmp_path / "tokens"
    )
    model = over_fit(make_model(tokenizer.vocab_size), store, tokenizer)
    export_model(model, tokenizer, tmp_path / "best")
    stock, stock_tokenizer = (
        kind.from_pretrained(tmp_path / "best") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    out = stock.generate(**stock_tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)[0].tolist()
    assert out == [tokenizer.pad_id, *tokenizer.encode(response), tokenizer.eos_id]
    assert stock_tokenizer.decode(out, skip_special_tokens=True) == response
    (answer,) = answer_pairs(ALONE, as_hugging_face(model, tokenizer), store, tokenizer, PLAN, 1, 60, torch.float32)
    assert (answer.prompt, answer.answer, answer.reference) == (prompt, response, response)


def test_prompts_that_are_answered_together_keep_their_eos_where_it_is_the_pad_token_too(
    tmp_path, model, store, tokenizer
):
    tokenizer = padding_with_eos(tokenizer, tmp_path)
    assert tokenizer.pad_id == tokenizer.eos_id
    stock, masks = as_hugging_face(model, tokenizer), []
    generate, ids = stock.generate, list(range(8))
    stock.generate = lambda *args, **values: (masks.append(values["attention_mask"]), generate(*args, **values))[1]
    together = answer(stock, store, tokenizer, ids, 8)
    assert masks[0].sum(1).tolist() == store.lengths[ids, 0].tolist()
    assert together == [answer(stock, store, tokenizer, [i], 8)[0] for i in ids]


def over_fit(model, store, tokenizer):
    optimizer = make_optimizer(model, make_config(learn_rate=0.02))
    micro_batch = collate(store, [0], tokenizer.pad_id, "cpu")
    for _ in range(100):
        loss = model(micro_batch) / len(micro_batch.labels)
        model.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    return model


def test_stock_twin_shares_the_models_memory(model, tokenizer):
    stock = as_hugging_face(model, tokenizer)
    pointers = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in stock.parameters()} == pointers
    assert not stock.training


def test_an_exported_directory_comes_back_with_shape_and_tokenizer(exported, model):
    weights = load_weights(exported)
    assert weights.model_config == model.config
    assert weights.tokenizer_dir == exported
    assert_holds(weights, model)


def test_a_run_directory_gives_its_best_model_and_else_its_last(exported, model, tokenizer):
    run_dir = exported.parent
    other = make_model(tokenizer.vocab_size, seed=2)
    export_model(other, tokenizer, run_dir / "last")
    assert_holds(load_weights(run_dir), model)
    exported.rename(run_dir / "kept")
    assert_holds(load_weights(run_dir), other)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_an_old_bin_file_is_read_whatever_wrapped_its_model(tmp_path, model, tokenizer, prefix):
    state = as_hugging_face(model, tokenizer).state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "old.bin")
    weights = load_weights(tmp_path / "old.bin")
    assert (weights.model_config, weights.tokenizer_dir) == (None, None)
    assert_holds(weights, model)


def test_half_precision_weights_become_float32(exported, model):
    file = exported / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    tensors = load_weights(exported).tensors
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    torch.testing.assert_close(tensors["shared.weight"], model.shared.weight, rtol=1e-2, atol=1e-2)


def gated(state):
    return {name.replace("wi.", "wi_0."): tensor for name, tensor in state.items()}


def untied(state):
    return state | {"lm_head.weight": state["shared.weight"] + 1}


def without_embedding(state):
    return {name: tensor for name, tensor in state.items() if name != "shared.weight"}


@pytest.mark.parametrize(
    "change, words", [(gated, "gated"), (untied, "does not tie lm_head.weight"), (without_embedding, "not a T5")]
)
def test_another_architecture_is_refused(tmp_path, model, change, words):
    torch.save(change(model.state_dict()), tmp_path / "other.bin")
    with pytest.raises(ValueError, match=words):
        load_weights(tmp_path / "other.bin")


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, model):
    torch.save({**model.state_dict(), "extra": Planted(tmp_path / "planted")}, tmp_path / "evil.bin")
    with pytest.raises(ValueError, match="evil.bin.* it is not a plain state dict of floats: it holds"):
        load_weights(tmp_path / "evil.bin")
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("content", [["a", "list"], {"step": 3}, torch.zeros(3)])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.bin")
    with pytest.raises(ValueError, match="not a state dict of tensors"):
        load_weights(tmp_path / "other.bin")


@pytest.mark.parametrize("name", ["cut.safetensors", "cut.bin"])
@pytest.mark.parametrize("num_bytes", [0, 5, 3000])
def test_a_file_that_was_cut_is_refused(tmp_path, model, name, num_bytes):
    path = tmp_path / name
    write = save_file if path.suffix == ".safetensors" else torch.save
    write(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=name):
        load_weights(path)


def test_a_place_without_a_model_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.bin"):
        with pytest.raises(ValueError, match=f"finetune_from_ckp_file={path}: no model there"):
            load_weights(path)


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "bert"}', '{"model_type": "t5", "d_model": 32}'])
def test_a_config_that_is_not_a_t5s_is_refused(exported, text):
    (exported / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load_weights(exported)


def test_weights_of_another_shape_are_refused_by_name(exported, tokenizer):
    weights = load_weights(exported)
    wide = TextToTextModel(T5ModelConfig(**SHAPE | dict(d_ff=96), vocab_size=tokenizer.vocab_size))
    with pytest.raises(ValueError, match=r"8 of another shape; .*DenseReluDense.*\(.*\) there, \(.*\) here"):
        load_into(wide, weights, exported)
    deep = TextToTextModel(T5ModelConfig(**SHAPE | dict(num_layers=3), vocab_size=tokenizer.vocab_size))
    with pytest.raises(ValueError, match=r"8 tensors missing, 0 unknown.*encoder\.block\.2"):
        load_into(deep, weights, exported)
    with pytest.raises(ValueError, match="1 tensors missing"):
        load_into(make_model(tokenizer.vocab_size), replace(weights, tensors=without_embedding(weights.tensors)), "x")


@pytest.mark.gpu
def test_an_export_takes_no_memory_of_the_gpu(tmp_path, model, tokenizer):
    model.to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    export_model(model, tokenizer, tmp_path / "best")
    assert torch.cuda.max_memory_allocated() == before
    assert_holds(load_weights(tmp_path / "best"), model.to("cpu"))


def test_an_export_that_fails_leaves_the_one_before(exported, tokenizer, model):
    other = make_model(tokenizer.vocab_size, seed=2)
    other.register_buffer("stray", torch.zeros(1))
    with pytest.raises(RuntimeError):
        export_model(other, tokenizer, exported)
    assert_holds(load_weights(exported), model)
    assert [path.name for path in exported.parent.iterdir()] == ["best"]


def test_the_exported_directory_holds_no_code_and_says_what_it_is(exported, tokenizer):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    config = ujson.loads((exported / "config.json").read_text())
    assert config["model_type"] == "t5"
    assert config["vocab_size"] == tokenizer.vocab_size
    assert "auto_map" not in config


def configured(exported, **changes):
    """`exported` with these values in its config.json."""
    config = ujson.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(ujson.dumps(config | changes))
    return exported


@pytest.mark.parametrize(
    "name, value",
    [
        ("feed_forward_proj", "gelu"), ("feed_forward_proj", "gated-gelu"), ("dense_act_fn", "gelu_new"),
        ("is_gated_act", True), ("scale_decoder_outputs", False), ("tie_word_embeddings", False),
        ("tie_encoder_decoder", True), ("is_encoder_decoder", False), ("decoder_start_token_id", 5),
        ("quantization_config", {"bits": 8}), ("hidden_size", 7),
    ],
)  # fmt: skip
def test_a_t5_that_computes_otherwise_is_refused_by_the_field_that_says_so(exported, name, value):
    with pytest.raises(ValueError, match=f"config.json says {name}="):
        load_weights(configured(exported, **{name: value}))
    torch.save(load_file(exported / "model.safetensors"), exported / "pytorch_model.bin")
    for file in ("pytorch_model.bin", "model.safetensors"):
        with pytest.raises(ValueError, match=f"config.json says {name}="):
            load_weights(exported / file)


def test_a_config_without_the_fields_that_older_ones_lack_is_read(exported, model):
    config = ujson.loads((exported / "config.json").read_text())
    lacks = ("num_decoder_layers", "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "feed_forward_proj")
    (exported / "config.json").write_text(ujson.dumps({k: v for k, v in config.items() if k not in lacks}))
    assert load_weights(exported).model_config == model.config


def strange_files(folder, exported, model):
    """Small files and directories that ask for memory or time without end, and those of other kinds of tensors."""
    state, row = model.state_dict(), "encoder.final_layer_norm.weight"
    norm = state[row]
    kinds = dict(
        expanded=torch.zeros(1).expand(2**20, 2**10), endless=torch.zeros(1).expand(2**34), meta=norm.to("meta"),
        sparse=norm.to_sparse(), whole=norm.to(torch.int64), eight_bits=norm.to(torch.float8_e4m3fn),
        nan=norm * float("nan"), tied=state["shared.weight"].expand(9, *state["shared.weight"].shape),
    )  # fmt: skip
    for kind, tensor in kinds.items():
        torch.save({name: t.clone() for name, t in state.items()} | {row: tensor}, folder / f"{kind}.bin")
        yield folder / f"{kind}.bin"
    torch.save({"shared.weight": torch.zeros(1, 1).expand(2**34, 16)}, folder / "rows.bin")
    write_archive(folder / "bytes.bin", pickled_bytes(2**33))
    write_archive(folder / "claimed.bin", pickled_tensor(2**34, 0, (2**24, 2**10), (2**10, 1)))
    write_archive(folder / "strides.bin", pickled_tensor(4, 0, (2, 2), (-2, 1)))
    write_archive(folder / "negative.bin", pickled_tensor(4, 0, (0, -1), (1, 1)))
    write_archive(folder / "overflow.bin", pickled_tensor(4, 0, (2**62, 4), (0, 0)))
    bomb = pickled_tensor(2**27, 0, (2**17, 2**10), (2**10, 1))
    write_archive(folder / "deflated.bin", bomb, bytes(2**29), zipfile.ZIP_DEFLATED)
    yield from (
        folder / f"{name}.bin" for name in ("rows", "bytes", "claimed", "strides", "negative", "overflow", "deflated")
    )
    data = (exported / "model.safetensors").read_bytes()
    (folder / "claims.safetensors").write_bytes(struct.pack("<Q", 2**40) + data[8:])
    yield folder / "claims.safetensors"
    for number, changes in enumerate(
        (dict(num_layers=2_000_000), dict(d_model="wide"), dict(num_layers=256, d_ff=65536))
    ):
        yield configured(shutil.copytree(exported, folder / f"absurd_{number}"), **changes)


def test_no_small_file_takes_much_memory_or_time(tmp_path, exported, model):
    """In a child process, whose largest resident set is measured."""
    files = list(strange_files(tmp_path, exported, model))

    def refuse(results):
        for path in files:
            before, began, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), None
            try:
                load_into(copy.deepcopy(model), load_weights(path), path)
            except ValueError as error:
                said = str(error)
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            results.send((path.name, said, time.monotonic() - began, grown))

    mine, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=refuse, args=(theirs,))
    child.start()
    for path in files:
        assert mine.poll(20), f"no answer to {path.name}"
        name, said, seconds, grown = mine.recv()
        assert said and path.name in said, name
        assert seconds < 2 and grown < 300 * 2**20, f"{name}: {seconds:.1f} s, {grown:,} bytes"
    child.join()


def test_honest_files_of_other_forms_are_read(tmp_path, model, tokenizer):
    state = as_hugging_face(model, tokenizer).state_dict()
    turned = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in state.items()}
    parameters = {name: torch.nn.Parameter(t.clone()) for name, t in model.state_dict().items()}
    halves = {name: t.half() for name, t in state.items()}  # the aliases are tensors of their own now
    for name, tensors in (("turned", turned), ("halves", halves), ("parameters", parameters)):
        torch.save(tensors, tmp_path / f"{name}.bin")
        load_into(copy.deepcopy(model), load_weights(tmp_path / f"{name}.bin"), name)
    assert_holds(load_weights(tmp_path / "turned.bin"), model)
    torch.save(state, tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
    assert_holds(load_weights(tmp_path / "legacy.bin"), model)


def hugging_face_cache(folder, exported):
    """A snapshot as Hugging Face's cache has it: links into the blobs/ of the model."""
    snapshot, blobs = folder / "models--x--y" / "snapshots" / "0123", folder / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in exported.iterdir():
        (blobs / f"{path.name}.hash").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}.hash")
    return snapshot


def test_a_snapshot_in_hugging_face_s_cache_is_read_and_its_tokenizer_copied(tmp_path, exported, model):
    snapshot = hugging_face_cache(tmp_path, exported)
    weights = load_weights(snapshot)
    assert_holds(weights, model)
    export_model(model, load_tokenizer(weights.tokenizer_dir), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()
    assert not any(path.is_symlink() for path in (tmp_path / "again").iterdir())


def test_an_export_does_not_carry_off_what_a_link_beside_the_tokenizer_leads_to(tmp_path, exported, model, tokenizer):
    home = tmp_path / "home"
    copy_tokenizer(tokenizer.directory, home)
    (tmp_path / "secret").write_text("secret")
    (home / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(
        ValueError, match=r"chat_template.jinja is a link to .*secret, outside .*: copy the file itself"
    ):
        copy_tokenizer(home, tmp_path / "copy")
    with pytest.raises(OSError, match="chat_template.jinja is a link"):
        export_model(model, load_tokenizer(home), exported)
    assert_holds(load_weights(exported), model)
