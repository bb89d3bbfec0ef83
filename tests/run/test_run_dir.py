"""One run at a time may use a run directory, and it never writes through a link."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ujson

from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.run import run_dir
from model.run.checkpoint import checkpoint_paths
from model.run.run_dir import admit, claim, cut_sample_ids, only_writer
from model.runtime import atomic_io
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.parts import ALONE
from tests.ranks import kill_all, wait_for
from tests.tiny import NUM_PAIRS, furnish, ids_by_epoch, journal, start, train
from train_low_mem import main


@pytest.fixture
def old_run(tmp_path, tokenizer):
    """A run directory with its tokenizer and one checkpoint, an empty directory."""
    claim(tmp_path / "run", "", False, tokenizer).close()
    (tmp_path / "run" / "checkpoints" / "step_00000007").mkdir(parents=True)
    return tmp_path / "run"


def test_a_second_run_in_a_directory_is_refused_until_the_first_process_dies(old_run, tokenizer):
    if (child := os.fork()) == 0:
        held = claim(old_run, "step_00000007", False, tokenizer)  # noqa: F841  closing the file would release the lock
        (old_run / "claimed").touch()
        time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 10
    while not (old_run / "claimed").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        for refused in (
            lambda: admit(old_run, True, False),
            lambda: admit(old_run, False, True),
            lambda: claim(old_run, "step_00000007", False, tokenizer),
        ):
            with pytest.raises(ValueError, match=rf"another run is using .*run \(process {child} on .*output_dir"):
                refused()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert admit(old_run, True, False) == "step_00000007"
    claim(old_run, "step_00000007", False, tokenizer).close()


def test_a_run_is_refused_if_another_run_used_the_directory_during_its_setup(old_run, tokenizer):
    admitted = admit(old_run, True, False)
    (old_run / "checkpoints" / "step_00000008").mkdir()
    with pytest.raises(ValueError, match="another run has used"):
        claim(old_run, admitted, False, tokenizer)


def test_a_run_holds_the_lock_of_its_directory_until_it_ends(tmp_path, tokenizer):
    with only_writer(ALONE, tmp_path / "run", "", False, tokenizer):
        with pytest.raises(ValueError, match="another run is using"):
            claim(tmp_path / "run", "", False, tokenizer)
    claim(tmp_path / "run", "", False, tokenizer).close()


def test_a_checkpoint_that_a_kill_left_aside_is_restored_and_resumed_from(old_run):
    checkpoints = old_run / "checkpoints"
    (checkpoints / "step_00000007").rename(checkpoints / ".step_00000007.01234567.aside")
    assert admit(old_run, True, False) == "step_00000007"
    assert os.listdir(checkpoints) == ["step_00000007"]


def test_overwrite_moves_the_old_run_aside_and_copies_the_tokenizer(old_run, tokenizer):
    assert admit(old_run, False, True) == ""
    assert checkpoint_paths(old_run), "admit moves nothing"
    claim(old_run, "", True, tokenizer).close()
    (aside,) = old_run.parent.glob("run.*.old")
    assert checkpoint_paths(aside) and not checkpoint_paths(old_run)
    assert (old_run / "tokenizer" / "tokenizer.json").exists()


def test_a_tokenizer_that_was_replaced_since_the_run_read_it_is_refused(tmp_path, tokenizer):
    there = tmp_path / "there"
    copy_tokenizer(tokenizer.directory, there)
    read = load_tokenizer(there)
    make_qwen_tokenizer(there)
    with pytest.raises(ValueError, match="there has changed since this run read it"):
        claim(tmp_path / "run", "", False, read)
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_overwrite_refuses_to_move_aside_the_tokenizer_that_the_run_reads(old_run, tokenizer):
    with pytest.raises(ValueError, match="would move aside .*tokenizer.*copy it elsewhere"):
        claim(old_run, "", True, replace(tokenizer, directory=old_run / "tokenizer"))
    assert checkpoint_paths(old_run)


def test_a_start_after_an_aborted_one_replaces_its_tokenizer(tmp_path, tokenizer):
    claim(tmp_path / "run", "", False, tokenizer).close()
    (tmp_path / "run" / "tokenizer" / "special_tokens_map.json").write_text("{}")
    claim(tmp_path / "run", "", False, tokenizer).close()
    assert not (tmp_path / "run" / "tokenizer" / "special_tokens_map.json").exists()


def test_a_directory_of_other_files_is_refused(tmp_path):
    for name in ("lost+found", "tokenizer", "nohup.out", "train.log"):
        (tmp_path / name).mkdir()
    assert admit(tmp_path, "auto", False) == ""
    (tmp_path / "run.lock").unlink()
    for name in ("model.safetensors", "config.json"):  # of a model, which a run would overwrite
        (tmp_path / name).touch()
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"not a run directory, it holds {name}.*: name a run directory"):
                admit(tmp_path, "auto", overwrite)


@pytest.mark.parametrize("mistake", [dict(train_file="nowhere.jsonl"), dict(tokenizer_dir="nowhere")])
def test_overwrite_leaves_the_old_run_in_place_if_data_or_tokenizer_cannot_be_read(home, mistake):
    if not (home / "kept").exists():
        assert train(home, output_dir="kept", epochs=1).codes == [0]
    before = sorted((home / "kept").rglob("*"))
    done = train(home, output_dir="kept", overwrite=True, **mistake)
    assert done.codes == [2], done.text
    assert sorted((home / "kept").rglob("*")) == before
    assert not list(home.glob("kept.*.old"))


def test_of_two_runs_that_start_in_one_directory_at_the_same_time_one_is_refused(home):
    first = start(home, fault="forward:0:3:slow", output_dir="both", epochs=1)
    second = start(home, fault="forward:0:3:slow", output_dir="both", epochs=1)
    for process in (*first, *second):
        process.join(60)
    codes = sorted(process.exitcode for process in (*first, *second))
    kill_all([*first, *second])
    assert codes == [0, 2]
    assert len(journal(home / "both", "start")) == 1
    assert [line["step"] for line in journal(home / "both", "train")] == [1, 2, 3, 4, 5, 6]


def test_a_run_directory_that_cannot_be_written_is_refused_with_a_message(home):
    (home / "file").touch()
    for directory in ("file/run", "file"):
        (process,) = start(home, output_dir=directory)
        done = wait_for([process], home)
        assert done.codes == [2], done.text
        assert f"{directory} cannot be written" in done.text and "Traceback" not in done.text


OUTPUT_NAMES = (
    "run.lock", "config.json", "plan.json", "metrics.jsonl", "samples_rank0.jsonl", "checkpoints/LATEST",
    "checkpoints/step_00000009", "checkpoints", "best", "last", "tokenizer", "plots",
)  # fmt: skip


@pytest.mark.parametrize("name", OUTPUT_NAMES)
def test_a_link_in_place_of_a_run_output_is_refused_by_name_and_not_followed(old_run, tokenizer, tmp_path, name):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("kept")
    link = old_run / name
    if link.exists():
        link.rename(tmp_path / "moved")
    is_directory = "." not in name and "LATEST" not in name
    link.symlink_to(tmp_path / "theirs" if is_directory else tmp_path / "theirs" / "file")
    with pytest.raises(ValueError, match=f"{link} is a link to .*: delete it, or put in its place"):
        admit(old_run, "auto", False)
    with pytest.raises(ValueError, match="link"):
        claim(old_run, "step_00000007", False, tokenizer)
    assert (tmp_path / "theirs" / "file").read_text() == "kept"


def test_cutting_sample_ids_follows_no_link_and_names_the_file_of_a_damaged_line(tmp_path):
    theirs, path = tmp_path / "theirs", tmp_path / "run" / "samples_rank0.jsonl"
    path.parent.mkdir()
    theirs.write_text("kept")
    path.symlink_to(theirs)
    with pytest.raises(OSError):
        cut_sample_ids(path.parent, 3)
    assert theirs.read_text() == "kept"
    path.unlink()
    for line in ("{}", "[]", '{"step": "x"}', "\x1b"):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match="samples_rank0.jsonl has a line that no run writes .*delete the file"):
            cut_sample_ids(path.parent, 3)


def test_a_run_directory_may_be_a_link_and_overwrite_moves_the_old_run_aside_beside_its_target(tmp_path, tokenizer):
    disk, run_dir = tmp_path / "disk" / "run", tmp_path / "run"
    disk.mkdir(parents=True)
    run_dir.symlink_to(disk)
    claim(run_dir, admit(run_dir, "auto", False), False, tokenizer).close()
    (disk / "checkpoints" / "step_00000007").mkdir(parents=True)
    claim(run_dir, admit(run_dir, False, True), True, tokenizer).close()
    (aside,) = disk.parent.glob("run.*.old")
    assert checkpoint_paths(aside) and not checkpoint_paths(run_dir)
    assert run_dir.is_symlink() and (disk / "tokenizer" / "tokenizer.json").exists()


def test_sample_ids_are_cut_back_to_a_step_and_an_incomplete_line_is_removed(tmp_path):
    path = Path(tmp_path / "samples_rank0.jsonl")
    lines = [ujson.dumps(dict(step=step, ids=list(range(9000)))) for step in range(1, 8)]
    complete = "".join(line + "\n" for line in lines)
    for step, kept in ((7, 7), (4, 4), (0, 0)):
        path.write_text(complete + '{"step": 8, "ids": [')
        cut_sample_ids(tmp_path, step)
        assert path.read_text() == "".join(line + "\n" for line in lines[:kept])


def open_while_the_main_rank_cuts(words):
    """`main` with delays: rank 0 cuts sample ids late, and rank 1 would open its file meanwhile if it did not wait."""
    cut, end_of_last_line = run_dir.cut_sample_ids, atomic_io.end_of_last_line
    run_dir.cut_sample_ids = lambda *args: (time.sleep(1), cut(*args))[1]
    if os.environ["RANK"] == "1":
        atomic_io.end_of_last_line = lambda *args: (end_of_last_line(*args), time.sleep(2))[0]
    return main(words)


def test_no_rank_writes_sample_ids_before_those_of_undone_steps_are_cut(tmp_path):
    furnish(tmp_path)
    options = dict(output_dir="run", is_keep_training="auto", save_steps=3, epochs=1)
    train(tmp_path, 2, "forward:all:6:kill", **options)
    done = wait_for(start(tmp_path, 2, function=open_while_the_main_rank_cuts, **options), tmp_path)
    assert done.codes == [0, 0], done.text
    assert ids_by_epoch(tmp_path / "run") == {1: list(range(NUM_PAIRS))}
