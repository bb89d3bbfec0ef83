"""The exit codes of main: 2 for a user's error raised in any package; a library's own error leaves main as it is."""

import json
import traceback
from pathlib import Path

import pytest
import torch

import train_low_mem
from model.commands import origin
from model.runtime import distributed
from model.runtime.distributed import Ranks
from tests.ranks import ROOT
from tests.tiny import words


@pytest.fixture
def folder(home, monkeypatch):
    """The tiny run's folder, where main runs in this process: its signals, threads and log stay as pytest has them."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(train_low_mem, "watch_signals", lambda: None)
    monkeypatch.setattr(train_low_mem, "start_ranks", lambda *_: Ranks(0, 1, 0, torch.device("cpu"), "none", None))
    monkeypatch.setattr(train_low_mem, "open_log", lambda *_: None)
    return home


@pytest.fixture
def raised_in(monkeypatch):
    """The files whose lines raised a ValueError: in rank 0's part of from_main, where there was one, then for main."""
    files, extract_tb, outcome = [], traceback.extract_tb, distributed._outcome

    def record(trace):
        frames = extract_tb(trace)
        files.append(Path(frames[-1].filename))
        return frames

    def captured_outcome(function, *args):
        def call():
            try:
                return function(*args)
            except ValueError as error:
                record(error.__traceback__)
                raise

        return outcome(call)

    monkeypatch.setattr(distributed, "_outcome", captured_outcome)
    monkeypatch.setattr(traceback, "extract_tb", record)
    return files


@pytest.mark.parametrize(
    ("package", "command", "options", "part"),
    [
        ("runtime", "plan", dict(tokenizer_dir="broken"), "tokenizer.json is not JSON"),
        ("data", "plan", dict(train_file="table.xls"), "unknown suffix '.xls'"),
        ("formats", "plan", dict(finetune_from_ckp_file="empty"), "no model there"),
        ("memory", "plan", dict(micro_batch_tokens=9), "micro_batch_tokens=9"),
        ("commands", "plan", dict(warmup_steps=1000), "--warmup_steps="),
        ("run", "train", dict(is_keep_training=True), "there is no checkpoint in"),
        ("commands", "plan", dict(learn_rte=1), "did you mean --learn_rate?"),
        ("commands", "plan", dict(num_processes="two"), "--num_processes=two"),
    ],
)
def test_a_user_error_raised_in_any_package_exits_2_without_a_traceback(
    folder, raised_in, capsys, package, command, options, part
):
    for name in ("broken", "empty"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "broken" / "tokenizer.json").write_text("{")
    (folder / "table.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    assert train_low_mem.main(words(command, **options)) == 2
    file, place = raised_in[0], ROOT / "model" / package
    assert place in (file, *file.parents), raised_in
    shown = capsys.readouterr().err
    assert part in shown and "Traceback" not in shown and file.name not in shown, shown


def test_a_value_error_of_a_library_is_our_mistake_and_leaves_main_as_it_is(folder, raised_in, monkeypatch, capsys):
    """Python prints its traceback then; the code that called the library lies in model/."""
    monkeypatch.setattr(origin, "load_tokenizer", lambda folder: json.loads("{"))
    with pytest.raises(json.JSONDecodeError) as error:
        train_low_mem.main(words("plan"))
    assert origin.__file__ in [str(entry.path) for entry in error.traceback]
    assert raised_in == [Path(json.decoder.__file__)]
    assert capsys.readouterr().err == ""
