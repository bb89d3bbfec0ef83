"""Checkpoints are read back exactly; damaged ones are skipped, and failed saves leave the others intact."""

import functools
import hashlib
import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import ujson
from safetensors import SafetensorError, safe_open

from model.data.tokenizer import copy_tokenizer
from model.formats.weights import export_model, write_tensors
from model.run import checkpoint
from model.run.checkpoint import checkpoint_paths, discard_after, load_newest, read_checkpoint
from model.run.journal import Journal
from model.runtime import fault_injection
from model.runtime.atomic_io import write_json
from tests.parts import PLAN, STATE, make_config

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def test_a_checkpoint_is_read_back_bit_for_bit(save, model, optimizer):
    checkpoint = read_checkpoint(save(500))
    assert checkpoint.state == replace(STATE, shape=asdict(model.config))
    assert checkpoint.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(checkpoint.tensors[name], weight) for name, weight in model.state_dict().items())
    for name, p in model.named_parameters():
        for field, value in optimizer.state[p].items():
            assert torch.equal(checkpoint.optimizer[f"{name}/{field}"], value)
    assert len(checkpoint.optimizer) == 3 * len(checkpoint.tensors)


def test_a_checkpoint_has_the_documented_name_and_files(save, tmp_path):
    path = save(500)
    assert path == tmp_path / "checkpoints" / "step_00000500"
    assert sorted(os.listdir(path)) == sorted(FILES)
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step_00000500"
    manifest = ujson.loads((path / "manifest.json").read_text())
    assert {name: entry["size"] for name, entry in manifest.items()} == {
        name: (path / name).stat().st_size for name in FILES[:3]
    }


def flip(path):
    content = bytearray(path.read_bytes())
    content[0 if path.name == "manifest.json" else len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 7)


def empty(path):
    os.truncate(path, 0)


def delete(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, empty, delete])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_skipped_with_a_message(save, tmp_path, name, damage):
    save(400)
    newest = save(500)
    damage(newest / name)
    said = []
    assert load_newest(tmp_path, said.append).state.step == 400
    (line,) = said
    assert str(newest) in line and "damaged" in line and "going back" in line
    with pytest.raises(ValueError, match="is damaged"):
        read_checkpoint(newest)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("put", [lambda file: file.symlink_to(file.parents[1] / "elsewhere"), os.mkfifo, Path.mkdir])
def test_a_checkpoint_with_a_link_or_a_pipe_in_it_is_refused(save, name, put):
    path = save(500)
    (path / name).rename(path.parent / "elsewhere")
    put(path / name)
    with pytest.raises(ValueError, match=f"{name} is a link or not a regular file"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "another.safetensors"])
def test_a_manifest_that_names_other_files_is_refused(save, name):
    path = save(500)
    manifest = ujson.loads((path / "manifest.json").read_text())
    manifest[name] = manifest["state.json"]
    (path / "manifest.json").write_text(ujson.dumps(manifest, escape_forward_slashes=False))
    with pytest.raises(ValueError, match=f"manifest names .*{name}"):
        read_checkpoint(path)


def change_state(path, change):
    """Set values in the state.json of a checkpoint by dotted name, ... to delete one, and update its manifest."""
    file = path / "state.json"
    state = ujson.loads(file.read_text())
    for name, value in change.items():
        *outer, last = name.split(".")
        place = functools.reduce(dict.get, outer, state)
        place[last] = value
        if value is Ellipsis:
            del place[last]
    file.write_text(json.dumps(state))
    manifest = ujson.loads((path / "manifest.json").read_text())
    manifest["state.json"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (path / "manifest.json").write_text(ujson.dumps(manifest))


def test_load_newest_gives_none_if_every_checkpoint_is_damaged(save, tmp_path):
    assert load_newest(tmp_path, pytest.fail) is None
    delete(save(400) / "model.safetensors")
    delete(save(500) / "manifest.json")
    said = []
    assert load_newest(tmp_path, said.append) is None
    assert len(said) == 2


def test_only_the_newest_checkpoints_are_kept(save, tmp_path):
    for step in (1, 2, 9, 10, 11, 100):
        save(step, keep=3)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step_00000100", "step_00000011", "step_00000010"]
    assert load_newest(tmp_path, pytest.fail).state.step == 100


def test_a_save_succeeds_even_if_an_old_checkpoint_cannot_be_deleted_which_is_logged_once(save, tmp_path, caplog):
    (tmp_path / "theirs").mkdir()
    save(1)
    (tmp_path / "checkpoints" / "step_00000002").symlink_to(tmp_path / "theirs")  # rmtree refuses links, for root too
    for step in (3, 4):
        assert save(step, keep=1).is_dir()
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step_00000004"
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step_00000004", "step_00000002"]
    assert caplog.text.count("step_00000002 is no longer needed and cannot be deleted") == 1


def test_damaged_checkpoints_that_a_resume_skipped_do_not_push_out_valid_ones(save, tmp_path):
    for step in (100, 200, 300):
        save(step, keep=3)
    for step in (200, 300):
        cut(tmp_path / "checkpoints" / f"step_{step:08d}" / "model.safetensors")
    said = []
    discard_after(tmp_path, load_newest(tmp_path, said.append).state.step)
    assert len(said) == 2 and [path.name for path in checkpoint_paths(tmp_path)] == ["step_00000100"]
    save(310, keep=2)
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step_00000310", "step_00000100"]
    cut(tmp_path / "checkpoints" / "step_00000310" / "model.safetensors")
    assert load_newest(tmp_path, said.append).state.step == 100
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step_00000310", "step_00000100", "LATEST"}


def test_the_same_step_may_be_saved_again(save, tmp_path, model):
    save(500)
    with torch.no_grad():
        model.shared.weight.add_(1)
    assert torch.equal(read_checkpoint(save(500)).tensors["shared.weight"], model.shared.weight)
    assert len(checkpoint_paths(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_failed_save_leaves_earlier_checkpoints_intact_and_the_next_save_succeeds(save, tmp_path, monkeypatch, kind):
    save(400, keep=2)
    monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults(f"save:0:500:{kind}"))
    with pytest.raises(OSError, match="injected"):
        save(500, keep=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["LATEST", "step_00000400"]
    assert load_newest(tmp_path, pytest.fail).state.step == 400
    save(500, keep=2)
    assert load_newest(tmp_path, pytest.fail).state.step == 500


def test_a_file_that_fails_while_the_other_is_written_leaves_neither(save, tmp_path, monkeypatch):
    def write_slowly(tensors, path):
        if path.name == "model.safetensors":
            raise SafetensorError("no room")
        time.sleep(0.2)
        write_tensors(tensors, path)

    monkeypatch.setattr(checkpoint, "write_tensors", write_slowly)
    with pytest.raises(OSError, match="no room"):
        save(500)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_drafts_of_killed_saves_are_deleted_by_the_next_save(save, tmp_path, monkeypatch):
    for step in (100, 200):
        if (child := os.fork()) == 0:
            fault_injection._faults = fault_injection.parse_faults(f"save:0:{step}:kill")
            save(step)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
        assert len(os.listdir(tmp_path / "checkpoints")) == 1
    assert load_newest(tmp_path, pytest.fail) is None
    save(300)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["LATEST", "step_00000300"]


def test_an_unknown_folder_beside_checkpoints_is_kept(save, tmp_path):
    unknown = tmp_path / "checkpoints" / "step_by_hand"
    unknown.mkdir(parents=True)
    for step in (1, 2, 3):
        save(step, keep=2)
    assert unknown.is_dir()
    assert len(checkpoint_paths(tmp_path)) == 2


def test_promise_8_no_pickle_is_written_in_a_run_directory(save, tmp_path, model, tokenizer):
    save(500)
    for name in ("best", "last"):
        export_model(model, tokenizer, tmp_path / name)
    copy_tokenizer(tokenizer.directory, tmp_path / "tokenizer")
    write_json(tmp_path / "config.json", asdict(make_config()))
    write_json(tmp_path / "plan.json", asdict(PLAN))
    with Journal(tmp_path / "metrics.jsonl") as journal:
        journal.write("train", step=1, loss=2.0)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 12
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as content:
                assert list(content.keys())
        else:
            text = path.read_text(encoding="utf-8")
            assert path.suffix in (".json", ".jsonl", ".jinja", ".md") or path.name == "LATEST"
            assert re.match(r'step_|---|[{\["]', text)
