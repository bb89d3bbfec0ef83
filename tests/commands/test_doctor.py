import functools
import json
import os
import shutil

import pytest
import torch

from model.commands import doctor
from model.commands.data_rows import FIRST_ROWS
from model.commands.doctor import as_text, examine
from model.commands.option_values import load_config
from model.data.tokenizer import load_tokenizer
from model.run.run_dir import TOKENIZER_DIR, TOKENS_DIR
from model.run.train_state import FORMAT
from model.runtime.launch import must_use_cpu
from model.runtime.nccl_check import Verdict
from tests.parts import open_pairs
from tests.ranks import launch, launcher, run_ranks, wait_for_launch
from tests.run.test_checkpoint import change_state
from tests.tiny import OPTIONS, train, words
from train_low_mem import main


@pytest.fixture
def rows(home, monkeypatch):
    """Function from options to the rows of doctor for the tiny run, by name; the all-reduce over Gloo is skipped."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(doctor, "try_backend", lambda backend, world_size: "")

    def check(overwrite=False, **options):
        found = examine(load_config("pretrain", OPTIONS | options), overwrite=overwrite)
        return {row.what: row for row in found}

    return check


def test_doctor_reports_ok_for_a_run_that_would_work_and_writes_no_file(home):
    before = sorted(home.rglob("*"))
    done = run_ranks(1, main, words("doctor", output_dir="fresh"), folder=home)
    assert done.codes == [0], done.text
    assert "FAILS" not in done.text
    for what in ("packages", "GPUs", "CPU", "/dev/shm", "locale", "Gloo", "train_file", "tokenizer", "model", "disk"):
        assert f"\nok     {what:<18} " in f"\n{done.text}" or what == "CPU", done.text  # a busy CPU is a note
    assert [path for path in sorted(home.rglob("*")) if path.name != "rank0.txt"] == before


def test_each_missing_file_has_a_remedy_in_any_locale_and_the_exit_code_is_1(tmp_path):
    ascii_only = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    line = [*launcher("python"), "doctor", "--train_file=没有.json"]
    code, text = wait_for_launch(launch(line, tmp_path, ascii_only), tmp_path)
    assert code == 1 and "Traceback" not in text, text
    for part in (
        ".json: no such file",
        "scripts/train_tokenizer.py",
        "export LANG=C.UTF-8",
        "3 problems",
        "unknown for weights",
        "unknown for checkpoints",
    ):
        assert part in text, text


def test_a_wrong_option_of_doctor_exits_2(tmp_path):
    done = run_ranks(1, main, ["doctor", "--epoch=3"], folder=tmp_path)
    assert done.codes == [2] and "--epochs" in done.text


def test_a_driver_without_a_cuda_build_of_torch_fails_with_the_remedy(rows, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "must_use_cpu", functools.partial(must_use_cpu, driver=str(tmp_path / "version")))
    assert rows()["GPUs"].fails and "CUDA build" in rows()["GPUs"].remedy


def test_packages_that_are_missing_or_too_old_fail(rows, monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=99", "no-such-package>=1", "numpy"]')
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    found = [row for row in doctor.examine(load_config("pretrain", {})) if row.what.startswith("package")]
    assert [row.fails for row in found] == [True, True, False]
    assert "pip install 'torch>=99'" in as_text(found[0]) and "no-such-package missing" in as_text(found[1])


def test_gloo_that_does_not_answer_is_reported(rows, monkeypatch):
    monkeypatch.setattr(doctor, "try_backend", lambda backend, world_size: "no answer within 30 s")
    assert "no answer" in rows()["Gloo"].found and "GLOO_SOCKET_IFNAME" in rows()["Gloo"].remedy


@pytest.mark.parametrize(
    ("options", "what", "part"),
    [
        (dict(prompt_column="qestion"), "train_file", "--prompt_column"),
        (dict(output_dir="/proc/run"), "disk", "--output_dir"),
        (dict(keep_latest_n_ckp=10**9), "disk", "--keep_latest_n_ckp"),
        (dict(model="train.jsonl.json"), "tokenizer, model", "JSON object"),
        (dict(finetune_from_ckp_file="nowhere"), "tokenizer, model", "no model there"),
        (dict(output_dir="train.jsonl/run"), "output_dir", "--output_dir"),
        (dict(output_dir="."), "output_dir", "is not a run directory"),
        (dict(output_dir="caf\udce9"), "output_dir", "not UTF-8"),
        (dict(backend="nccl"), "GPUs", "--backend"),
    ],
)
def test_an_option_that_would_end_a_run_fails(rows, options, what, part):
    row = rows(**options)[what]
    assert row.fails and part in row.remedy


@pytest.mark.parametrize("text", ['{"prompt": "", "response": ""}\n', '{"prompt": "a", "response": "b"}\n{"prompt\n'])
def test_a_data_file_without_usable_rows_fails(rows, home, text):
    (home / "bad.jsonl").write_text(text)
    assert rows(train_file="bad.jsonl")["train_file"].fails


def test_a_data_file_is_read_as_the_objective_reads_it(rows, home):
    line = dict(prompt="你好", chosen="今天", rejected="天气", response="")
    (home / "preferences.jsonl").write_text(json.dumps(line) + "\n")
    assert rows(train_file="preferences.jsonl")["train_file"].fails
    both = dict.fromkeys(("train_file", "validation_file"), "preferences.jsonl")
    table = rows(objective="dpo", **both)
    assert not any(table[what].fails for what in both) and " tokens" in table["train_file"].found
    assert "choose one of" in rows(objective="denoise")["train_file"].remedy


def test_empty_pairs_at_the_start_of_a_data_file_are_only_a_note(rows, home):
    empty, whole = '{"prompt": "", "response": ""}\n', '{"prompt": "a", "response": "b"}\n'
    (home / "late.jsonl").write_text(empty * FIRST_ROWS + whole)
    row = rows(train_file="late.jsonl")["train_file"]
    assert not row.fails and f"none of its first {FIRST_ROWS} rows has text" in row.remedy


def test_a_damaged_token_store_of_either_file_fails(rows, home):
    for name in ("train_file", "validation_file"):
        (home / "mine.jsonl").write_text((home / "train.jsonl").read_text())
        store = open_pairs("mine.jsonl", load_tokenizer(TOKENIZER_DIR), OPTIONS["max_seq_len"], TOKENS_DIR)
        assert not rows(**{name: "mine.jsonl"})["model"].fails
        (store.directory / "lengths.npy").write_bytes(b"")
        row = rows(**{name: "mine.jsonl"})["tokenizer, model"]
        assert row.fails and f"{store.directory} are damaged" in row.remedy
        shutil.rmtree(store.directory)


def test_a_token_store_that_cannot_be_opened_fails_and_the_table_is_completed(rows, home, monkeypatch):
    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(doctor, "find_store", refuse)
    table = rows()
    assert table["tokenizer, model"].fails and "Too many open files" in table["tokenizer, model"].remedy
    assert "disk" in table


def test_with_overwrite_the_old_run_is_not_compared(rows, home):
    assert train(home, output_dir="old", epochs=1).codes == [0]
    assert rows(output_dir="old", seed=5)["tokenizer, model"].fails
    assert "random initialisation" in rows(output_dir="old", seed=5, overwrite=True)["model"].found
    for checkpoint in (home / "old" / "checkpoints").glob("step_*"):
        (checkpoint / "state.json").unlink()
    assert rows(output_dir="old")["checkpoint"].fails
    assert "checkpoint" not in rows(output_dir="old", overwrite=True)


@pytest.mark.parametrize(
    "options, part",
    [
        (dict(seed=5), "seed"),
        (dict(train_file="short.jsonl"), "training pairs 44, now 20"),
        (dict(train_file="turned.jsonl"), "other training pairs, or in another order"),
    ],
)
def test_options_that_a_resumed_run_would_refuse_fail(rows, home, options, part):
    if not (home / "short.jsonl").exists():
        assert train(home, output_dir="mine", epochs=1).codes == [0]
        lines = (home / "train.jsonl").read_text().splitlines(True)
        for name, held in (("short.jsonl", lines[:20]), ("turned.jsonl", lines[::-1])):
            (home / name).write_text("".join(held))
            open_pairs(name, load_tokenizer(TOKENIZER_DIR), OPTIONS["max_seq_len"], TOKENS_DIR)
    assert "step_00000006" in rows(output_dir="mine")["model"].found
    row = rows(output_dir="mine", **options)["tokenizer, model"]
    assert row.fails and part in row.remedy


def test_a_damaged_checkpoint_is_reported(rows, home):
    assert train(home, output_dir="kept", epochs=1).codes == [0]
    assert "step_00000006" in rows(output_dir="kept")["model"].found
    newest, older = sorted((home / "kept" / "checkpoints").glob("step_*"), reverse=True)
    change_state(newest, {"format": FORMAT + 1})
    assert rows(output_dir="kept")["checkpoint"].fails
    change_state(newest, {"format": FORMAT})
    (newest / "model.safetensors").write_bytes(b"")
    row = rows(output_dir="kept")["checkpoint"]
    assert not row.fails and newest.name in row.found
    shutil.rmtree(older)
    (newest / "state.json").unlink()
    assert rows(output_dir="kept")["checkpoint"].fails


def test_links_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    """Its header has escape codes, and columns of other devices follow those of the GPUs."""
    matrix = "\\t\\033[4mGPU0\\tGPU1\\tGPU2\\tNIC0\\tCPU Affinity\\033[0m\\n"
    matrix += "GPU0\\t X \\tNV18\\tSYS\\tPIX\\t0-15\\nGPU1\\tNV18\\t X \\tPHB\\tSYS\\t0-15\\n"
    matrix += "GPU2\\tSYS\\tPHB\\t X \\tSYS\\t16-31\\nNIC0\\tPIX\\tSYS\\tSYS\\t X \\n\\nLegend:\\n  X    = Self\\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{matrix}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (0, 2))
    (row,) = doctor._links()
    assert row.found == "GPU0-GPU1 NV18, GPU0-GPU2 SYS, GPU1-GPU2 PHB; direct access not between all: slower"


def test_nccl_that_needs_a_remedy_is_a_note_and_not_a_failure(monkeypatch):
    verdict = Verdict("nccl", {"NCCL_SHM_DISABLE": "1"}, ["NCCL failed: no answer within 30 s"], 33.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "try_backend", lambda backend, world_size: "")
    monkeypatch.setattr(doctor, "find_backend", lambda count: verdict)
    _, nccl = doctor._round_trips()
    assert "NCCL NCCL_SHM_DISABLE=1 works" in nccl.found and "no answer" in nccl.remedy and not nccl.fails


def test_the_model_configuration_is_read_as_a_run_reads_it(rows, home):
    assert rows()["model"].found.startswith("13.5 K weights from random initialisation")
    (home / "broken.json").write_text(json.dumps(dict(d_model=16)))
    assert rows(model="broken.json")["tokenizer, model"].fails


@pytest.mark.gpu
def test_each_gpu_has_its_rows(rows):
    found, count = rows(), torch.cuda.device_count()
    for row in found.values():
        print(as_text(row))
    names = {f"GPU {index}{what}" for index in range(count) for what in ("", " memory")}
    assert names | ({"GPU links", "NCCL"} if count > 1 else set()) <= found.keys()
    assert not any(row.fails for row in found.values())
