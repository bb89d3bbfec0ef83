"""A token store that another process writes: the same bytes, the same errors, and no process that outlives its run."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from config import PREFERENCE_RATES
from model.commands import tokenising
from model.commands.objective import OBJECTIVES, objectives_for
from model.commands.option_values import load_config
from model.commands.tokenising import write_beside
from model.data.store_writer import ROWS_PER_BATCH
from model.data.token_store import Source, find_store, open_store
from model.runtime.module_process import ROOT
from model.train.objectives.pairs import Pairs
from tests.parts import make_pairs, open_pairs, write_parquet


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(tokenising, "LARGE_BYTES", 1)


@pytest.fixture
def source(tmp_path):
    return write_parquet(tmp_path / "pairs.parquet", make_pairs(50, seed=7) * (6 * ROWS_PER_BATCH // 50))


def children():
    """The processes that tokenise for this one, which has others: those that tests fork from."""
    return [child for child in psutil.Process().children() if "model.commands.tokenising" in child.cmdline()]


def bytes_of(store):
    return {path.name: path.read_bytes() for path in store.directory.iterdir()}


def test_another_process_writes_the_same_store(source, tokenizer, tmp_path):
    told, stores = [], []
    for name in ("here", "there"):
        options = dict(progress=told.append, write=write_beside) if name == "there" else {}
        stores.append(open_pairs(source, tokenizer, 24, tmp_path / name, **options))
    assert bytes_of(stores[0]) == bytes_of(stores[1])
    assert told == [*range(ROWS_PER_BATCH, len(stores[0]), ROWS_PER_BATCH), len(stores[0])]
    assert not children()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_large_file_of_every_objective_has_the_bytes_of_a_small_one(name, tokenizer, tmp_path):
    tokenizer = replace(tokenizer, eos_id=tokenizer.eos_id + 1)  # a chat template may end an answer with another token
    path = tmp_path / "rows.jsonl"
    row = dict(prompt="你好吗", response="很好")
    row = dict(prompt="你好吗", chosen="很好", rejected="不") if name in PREFERENCE_RATES else row
    path.write_text(json.dumps(row if name in (*PREFERENCE_RATES, "pairs") else dict(text="今天天气很好" * 9)) + "\n")
    objective = objectives_for(load_config("pretrain", dict(objective=name)), None, tokenizer)[name]
    source = Source((path,), objective, tokenizer, 24)
    small, large = open_store(source, tmp_path / "small"), open_store(source, tmp_path / "large", write=write_beside)
    assert len(large) > 0 and bytes_of(large) == bytes_of(small)
    other = replace(source, tokenizer=replace(tokenizer, eos_id=0))
    assert find_store(other, tmp_path / "large") is None


def test_the_other_process_does_not_import_torch():
    code = "import sys, model.commands.tokenising; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_stop_ends_the_other_process_and_leaves_no_draft(source, tokenizer, tmp_path):
    stops = iter([False, True])
    with pytest.raises(KeyboardInterrupt):
        open_pairs(source, tokenizer, 24, tmp_path / "tokens", stop=lambda: next(stops), write=write_beside)
    assert not children()
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_what_the_other_process_refuses_or_fails_at_is_raised_here(tmp_path, tokenizer):
    path = write_parquet(tmp_path / "empty.parquet", [("", "好")] * 5)
    with pytest.raises(ValueError, match=r"empty.parquet: none of its 5 rows"):
        open_pairs(path, tokenizer, 24, tmp_path / "tokens", write=write_beside)
    with pytest.raises(NotADirectoryError, match=re.escape(str(path / "there"))):
        key = dict(files=[dict(size=9)])
        source = Source((path,), Pairs(), tokenizer, 24)
        write_beside(source, key, path / "there" / "store", None, lambda: False)


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_file_that_changes_before_or_while_the_other_process_reads_it_gives_no_store(
    source, tokenizer, tmp_path, moment
):
    def change(*_):
        write_parquet(tmp_path / "other.parquet", make_pairs(50, seed=8)).replace(source)

    directory, asked = tmp_path / "tokens" / "store", Source((source,), Pairs(), tokenizer, 24)
    key = asked.key()
    if moment == "before":
        change()
    with pytest.raises(ValueError, match=f"{source}: the file changed while it was read"):
        write_beside(asked, key, directory, change, lambda: False)
    assert not directory.exists() and not children()


def test_a_killed_process_is_told(source, tokenizer, tmp_path):
    def kill(_):
        os.kill(children()[0].pid, signal.SIGKILL)

    with pytest.raises(ChildProcessError, match="ended with code -9"):
        open_pairs(source, tokenizer, 24, tmp_path / "tokens", progress=kill, write=write_beside)
