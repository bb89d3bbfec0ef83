"""scripts/train_tokenizer.py as a process: what it trains on, prints and refuses."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

from datasets import Dataset

from model.data.tokenizer import PROBE, load_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_tokenizer.py"


def run_script(*arguments, cwd):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_the_script_trains_on_pairs_and_lines_and_prints_a_summary(tmp_path):
    draw = random.Random(0)
    texts = ["".join(draw.choices(PROBE, k=20)) for _ in range(1200)]
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress("\n".join(texts[:400]).encode("gb18030")))
    pairs = zip(texts[400:800], texts[800:], strict=True)
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    done = run_script("empty", ".", "--output_dir", "new/out", cwd=tmp_path)
    assert done.returncode == 2 and "empty: the folder holds no" in done.stderr and not (tmp_path / "new").exists()
    Dataset.from_json(str(tmp_path / "pairs.jsonl")).save_to_disk(tmp_path / "saved")
    done = run_script("lines.txt.gz", "saved[train]", "--output_dir", "out", "--vocab_size", 807, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("vocabulary", "807 tokens", "characters per token", "time"))
    assert load_tokenizer(tmp_path / "out").vocab_size == 807
    merges = json.loads((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    assert f"multi-character       {len(merges)} tokens" in done.stdout


def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 \xff".encode("latin-1"))
    for arguments in (["missing.txt"], ["latin.txt"], ["missing.jsonl"]):
        done = run_script(*arguments, "--output_dir", "out", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert arguments[0] in done.stderr


def test_an_existing_tokenizer_is_replaced_only_with_overwrite_by_one_of_the_kind_asked_for(tmp_path):
    (tmp_path / "lines.txt").write_text(PROBE, encoding="utf-8")
    (tmp_path / "out").mkdir()
    there = tmp_path / "out" / "tokenizer.json"
    there.write_text("old")
    words = ["lines.txt", "--output_dir", "out", "--vocab_size", 457]
    done = run_script(*words, cwd=tmp_path)
    assert done.returncode == 2 and "--output_dir=out" in done.stderr and "--overwrite" in done.stderr
    assert there.read_text() == "old"
    assert run_script(*words, "--overwrite", "--kind", "byte_level", cwd=tmp_path).returncode == 0
    written = load_tokenizer(tmp_path / "out")
    assert written.vocab_size == 457 and written.backend.token_to_id("<|im_end|>") == written.eos_id


def test_an_output_dir_that_cannot_be_made_is_refused_before_the_files_are_read(tmp_path):
    (tmp_path / "file").touch()
    for output_dir in ("file", "file/below"):
        done = run_script("missing.txt", "--output_dir", output_dir, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"{output_dir}: the directory cannot be made" in done.stderr
