"""The log file has one line per message, names the run of each line, and is never written through a link."""

import re

import pytest

from model.display import log_file as log_module
from model.display.console import train_line
from model.display.log_file import open_log


@pytest.fixture
def log_folder(tmp_path):
    yield tmp_path / "logs"
    for handler in list(log_module.LOGGER.handlers):
        log_module.LOGGER.removeHandler(handler)
        handler.close()
    log_module.LOGGER.propagate = True  # open_log clears it


def test_log_lines_have_the_documented_form(log_folder, capsys):
    log = open_log(log_folder, "small", "runs/a %s")
    log.info(train_line({"epoch": 1, "step": 20, "loss": 3.14159, "learn_rate": 1e-4, "peak_bytes": 13 * 2**30}))
    (path,) = log_folder.iterdir()
    assert re.fullmatch(r"chat_trainer_small_\d{8}\.log", path.name)
    line = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[INFO\]: training loss: epoch:1, step:20, loss:3.1416, .*\n"
    echoed = capsys.readouterr().err
    assert re.fullmatch(line, echoed)
    assert path.read_text() == "[a %s] " + echoed


def test_each_line_of_a_shared_log_names_its_run(log_folder):
    for run_dir in ("runs/a", "b\x1b[31m/"):
        log = open_log(log_folder, "small", run_dir)
        try:
            raise OSError("no room")
        except OSError:
            log.debug("\x1b[2Jthis ended the run", exc_info=True)
    (path,) = log_folder.iterdir()
    names = [line[: line.index("] ") + 1] for line in path.read_text().splitlines()]
    assert names == ["[a]"] * (len(names) // 2) + ["[b\\x1b[31m]"] * (len(names) // 2) and len(names) >= 8
    assert r"[DEBUG]: \x1b[2Jthis ended" in path.read_text()


def test_a_log_that_is_opened_twice_has_each_line_once(log_folder, capsys):
    open_log(log_folder, "small", "runs/a").info("first")
    open_log(log_folder, "small", "runs/a").info("second")
    (path,) = log_folder.iterdir()
    assert [line.split(": ")[1] for line in path.read_text().splitlines()] == ["first", "second"]
    assert capsys.readouterr().err.count("second") == 1


def test_a_log_file_that_is_a_link_is_not_written_through(log_folder, tmp_path):
    open_log(log_folder, "small", "run").info("first")
    (path,) = log_folder.iterdir()
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    before = (tmp_path / "theirs").read_text()
    with pytest.raises(ValueError, match=r"chat_trainer_small_.*log is a link to .*: delete it"):
        open_log(log_folder, "small", "run")
    assert (tmp_path / "theirs").read_text() == before
