"""A module of this project as a process, started from a folder of the user's."""

from model.runtime.module_process import start_module


def test_a_folder_of_the_users_hides_no_module(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert start_module("model.runtime.module_process").wait(30) == 0
