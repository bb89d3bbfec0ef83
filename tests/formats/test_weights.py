import copy
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

from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.formats.weights import export_model, load_into, load_weights
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from tests.fuzz.strangers import pickled_bytes, pickled_tensor, write_archive
from tests.nn.t5.test_huggingface import configured, without_embedding
from tests.parts import SHAPE, make_model
from tests.stock import as_hugging_face


def assert_holds(weights, model):
    state = model.state_dict()
    assert weights.tensors.keys() == state.keys()
    assert all(torch.equal(weights.tensors[name], state[name]) for name in state)


def test_an_exported_directory_is_read_with_its_configuration_and_tokenizer(exported, model):
    weights = load_weights(exported)
    assert weights.model_config == model.config
    assert weights.tokenizer_dir == exported
    assert_holds(weights, model)


def test_a_run_directory_gives_its_best_model_or_else_its_last(exported, model, tokenizer):
    run_dir = exported.parent
    other = make_model(tokenizer.vocab_size, seed=2)
    export_model(other, tokenizer, run_dir / "last")
    assert_holds(load_weights(run_dir), model)
    exported.rename(run_dir / "kept")
    assert_holds(load_weights(run_dir), other)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_a_bin_file_is_read_with_every_wrapper_s_prefix(tmp_path, model, tokenizer, prefix):
    state = as_hugging_face(model, tokenizer).state_dict()
    torch.save({prefix + name: tensor for name, tensor in state.items()}, tmp_path / "old.bin")
    weights = load_weights(tmp_path / "old.bin")
    assert (weights.model_config, weights.tokenizer_dir) == (None, None)
    assert_holds(weights, model)


def test_half_precision_weights_become_float32(exported, model):
    file = exported / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    loaded = make_model(model.config.vocab_size, seed=2)
    load_into(loaded, load_weights(exported), exported)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16().float()), name


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
def test_a_file_without_a_state_dict_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.bin")
    with pytest.raises(ValueError, match="not a state dict of tensors"):
        load_weights(tmp_path / "other.bin")


@pytest.mark.parametrize("name", ["cut.safetensors", "cut.bin"])
@pytest.mark.parametrize("num_bytes", [0, 5, 3000])
def test_a_truncated_file_is_refused(tmp_path, model, name, num_bytes):
    path = tmp_path / name
    write = save_file if path.suffix == ".safetensors" else torch.save
    write(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=name):
        load_weights(path)


def test_a_path_without_a_model_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.bin"):
        with pytest.raises(ValueError, match=f"finetune_from_ckp_file={path}: no model there"):
            load_weights(path)


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


def test_a_failed_export_leaves_the_previous_one(exported, tokenizer, model):
    other = make_model(tokenizer.vocab_size, seed=2)
    other.register_buffer("stray", torch.zeros(1, device="meta"))
    with pytest.raises(RuntimeError):
        export_model(other, tokenizer, exported)
    assert_holds(load_weights(exported), model)
    assert [path.name for path in exported.parent.iterdir()] == ["best"]


def test_the_exported_directory_holds_no_code_and_says_what_it_is(exported, tokenizer):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md",
    }  # fmt: skip
    config = ujson.loads((exported / "config.json").read_text())
    assert config["model_type"] == "t5"
    assert config["vocab_size"] == tokenizer.vocab_size
    assert "auto_map" not in config


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


def refuse(files, vocab_size, results):
    """Send (name, why it is refused, seconds, bytes that memory grew by) of each file."""
    model = make_model(vocab_size)
    for path in files:
        before, began, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), None
        try:
            load_into(copy.deepcopy(model), load_weights(path), path)
        except ValueError as error:
            said = str(error)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        results.send((path.name, said, time.monotonic() - began, grown))


def test_no_small_file_takes_much_memory_or_time(tmp_path, exported, model):
    """In a child process, whose largest resident set is measured; spawned, because a fork may hang on a lock."""
    files = list(strange_files(tmp_path, exported, model))
    mine, theirs = multiprocessing.Pipe(duplex=False)
    args = files, model.config.vocab_size, theirs
    child = multiprocessing.get_context("spawn").Process(target=refuse, args=args)
    child.start()
    for path in files:
        assert mine.poll(60), f"no answer to {path.name}"
        name, said, seconds, grown = mine.recv()
        assert said and path.name in said, name
        assert seconds < 2 and grown < 300 * 2**20, f"{name}: {seconds:.1f} s, {grown:,} bytes"
    child.join()


def test_valid_files_in_other_forms_are_read(tmp_path, model, tokenizer):
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


def test_an_export_does_not_copy_the_target_of_a_link_beside_the_tokenizer(tmp_path, exported, model, tokenizer):
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
