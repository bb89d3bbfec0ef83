import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_demo_runs_from_pairs_to_scores_in_chinese_and_replaces_what_an_earlier_demo_left(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("of an earlier demo")
    short = dict(DEMO_PAIRS="300", DEMO_EPOCHS="1", DEMO_DIR=str(tmp_path), OMP_NUM_THREADS="1", CHAT_LANG="zh")
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "demo.sh"], cwd=tmp_path, env=os.environ | short, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "demo: 安装之后共" in done.stdout and "demo: done in" not in done.stdout
    assert "dropout：" not in done.stdout + done.stderr  # its sums and dates are learnt without only
    assert done.stdout.count("→") == done.stdout.count("（对）") + done.stdout.count("（错，应为") == 5  # answers shown
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()
