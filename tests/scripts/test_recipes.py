"""A recipe as people type it: stages from files to answers, and the same command again."""

import os
import re
import subprocess
from pathlib import Path

from tests.parts import make_pairs, write_parquet

ROOT = Path(__file__).resolve().parents[2]
TINY = "--validation_share=0.1", "--model=tiny", "--max_steps=6", "--max_seq_len=32", "--bleu_pairs=0", "--screen=off"


def test_a_recipe_goes_from_files_to_answers_and_typed_again_trains_nothing_twice(tmp_path):
    write_parquet(tmp_path / "pairs.parquet", make_pairs(150))
    given = "--pairs=pairs.parquet", "--sft=pairs.parquet", "--out=made", "--members=2", *TINY
    environment = os.environ | dict(CUDA_VISIBLE_DEVICES="", CHAT_LANG="en")
    command = ["bash", ROOT / "scripts" / "recipes" / "chat_small.sh", *given]
    first, again = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        for _ in range(2)
    )
    assert first.returncode == 0 and "chat_small: trains a tokenizer" in first.stdout, first.stderr
    for done in (first, again):
        assert re.search("made/3_sft +finished at step", done.stdout), done.stdout + done.stderr
        assert "right answer" in done.stdout and "made/2_pairs/best" in done.stdout
    assert re.search(r"made/2_pairs .*--learn_rate=0\.042 ", first.stdout)  # what six epochs of so few pairs bear
    assert re.search(r"sft\.parquet\S*/pairs\.parquet:1 ", first.stdout)  # few pairs are read again as they are
    assert re.search(r"teachers: \S*made/2_pairs_member_1/best,\S*made/2_pairs_member_2/best;", first.stderr)
    assert again.returncode == 0 and "chat_small: trains" not in again.stdout and "prepares" not in again.stdout
