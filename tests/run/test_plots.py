"""Plots are drawn if matplotlib is installed, and never end a run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from model.run import plots
from model.run.journal import Journal
from model.run.plots import plot_run

ROOT = Path(__file__).resolve().parents[2]


def test_a_plot_is_drawn_if_matplotlib_is_installed_and_skipped_if_not(tmp_path):
    with Journal(tmp_path / "metrics.jsonl") as journal:
        for step in range(1, 4):
            journal.write("train", step=step, loss=3.0 / step if step < 3 else float("nan"), learn_rate=1e-4)
        journal.write("eval", step=3, loss=2.0)
    plotted = plot_run(tmp_path)
    if importlib.util.find_spec("matplotlib") is None:
        assert plotted is None
    else:
        assert plotted == tmp_path / "plots" / "loss.png" and plotted.read_bytes()[:4] == b"\x89PNG"


def test_missing_matplotlib_is_logged_once(tmp_path):
    with Journal(tmp_path / "metrics.jsonl") as journal:
        journal.write("start")
    code = "import sys; sys.modules['matplotlib'] = None\nfrom model.run.plots import plot_run\nimport logging\n"
    code += f"logging.basicConfig(level='INFO')\nassert [plot_run({str(tmp_path)!r}) for _ in 'ab'] == [None, None]"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("matplotlib is not installed") == 1


def test_a_plot_that_fails_is_logged_and_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def damaged(_):
        raise ValueError("metrics.jsonl line 3 is damaged")

    monkeypatch.setattr(plots, "plot_run", damaged)
    plots.try_plot(tmp_path)
    assert "no plots: metrics.jsonl line 3 is damaged" in caplog.text
