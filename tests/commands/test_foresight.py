"""What would lose a run's result is refused before the first step, and train and doctor say the same of poor data."""

import os
from types import SimpleNamespace

import pytest

from model.commands.doctor import examine
from model.commands.foresight import check_host, seen_tokens
from model.commands.option_values import load_config
from model.commands.space import disk_row
from model.runtime.distributed import ALONE
from tests.tiny import OPTIONS, train


def rows_of_doctor(home, monkeypatch, **options):
    monkeypatch.chdir(home)
    monkeypatch.setattr("model.commands.doctor.try_backend", lambda *_: "")  # takes seconds, and is not looked at
    return list(examine(load_config("pretrain", OPTIONS | options)))


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_by_both(home, monkeypatch):
    options = dict(output_dir="too_much", keep_latest_n_ckp=2_000_000_000)
    done = train(home, **options)
    (row,) = [row for row in rows_of_doctor(home, monkeypatch, **options) if row.what == "disk"]
    assert done.codes == [1] and row.fails
    assert row.found.split("GiB")[1] in done.text and row.remedy in done.text
    assert "keep_latest_n_ckp" in row.remedy and not (home / "too_much").exists()


def test_inputs_that_host_memory_cannot_hold_are_refused_before_the_first_step():
    spec = SimpleNamespace(offloads=False, own_part=None, offloaded_bytes=0)
    check_host(ALONE, spec, 2**20)
    with pytest.raises(RuntimeError, match="takes 1048576.0 GiB of host memory.*--activation_offload=False"):
        check_host(ALONE, spec, 2**50)


def test_what_a_resumed_run_has_written_counts_as_free_once(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "best").mkdir()
    with open(tmp_path / "checkpoints" / "weights", "wb") as file:
        file.truncate(2**43)  # without blocks on the disk
    os.link(tmp_path / "checkpoints" / "weights", tmp_path / "best" / "weights")
    new, resumed = (float(disk_row(tmp_path, 2, None, resumed).found.split()[0]) for resumed in (False, True))
    assert abs(resumed - new - 2**13) < 64  # GiB


def test_train_and_doctor_say_the_same_of_cut_answers_a_large_batch_and_prompts_longer_than_seen(home, monkeypatch):
    options = dict(output_dir="cut", max_seq_len=8, epochs=1, save_steps=100, validation_file="", global_batch_size=88)
    options["warmup_steps"] = 0
    cut = train(home, **options)
    tuned = dict(options, output_dir="longer", max_seq_len=12, finetune_from_ckp_file="cut/last", model=None)
    longer = train(home, **tuned)
    known = {name: value for name, value in tuned.items() if name != "model"} | dict(model="small")
    for done, given in ((cut, options), (longer, known)):
        assert done.codes == [0], done.text
        notes = [row for row in rows_of_doctor(home, monkeypatch, **given) if row.what == "pairs"]
        assert notes and all(f"WARNING]: {row.found}: {row.remedy}" in done.text for row in notes), done.text
        assert done.text.count("WARNING]") == len(notes)
    assert "of the responses in train.jsonl are cut at --max_seq_len=8" in cut.text
    assert "a step takes 88 pairs and an epoch of train.jsonl has 44" in cut.text
    assert "prompts in train.jsonl have up to 12 tokens, and cut/last was trained on at most 8" in longer.text


def test_tokens_that_a_downloaded_model_has_seen_are_in_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5", "n_positions": 512}')
    assert seen_tokens(str(tmp_path)) == 512 and seen_tokens("") is None and seen_tokens("nowhere") is None
