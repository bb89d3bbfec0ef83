import json

import pytest

from model.commands.data_report import print_report, read_contents, report_lines, shared_line


def write(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def train(tmp_path):
    rows = [dict(prompt="你" * n, response="好" * 2 * n) for n in range(1, 101)]
    rows.append(dict(prompt="再问", response="再答", history=[["先问", "先答"]]))
    return write(tmp_path / "train.jsonl", [*rows, rows[0]])


def test_lengths_cuts_bytes_and_duplicates_are_counted(train, tokenizer):
    (head, *lines) = report_lines(read_contents(train, tokenizer, near=False), tokenizer, 101)
    assert head == f"{train}: 102 pairs in 102 conversations, 1 with earlier turns or a system text"
    assert lines[0] == "  prompt characters: p50 49, p90 90, p95 95, p99 99, p100 100"
    assert lines[1] == "  response characters: p50 98, p90 180, p95 190, p99 198, p100 200"
    assert "  exact duplicates: 1 of 102 (0.98%)" in lines
    cut = [sum(len(tokenizer.encode(text * n)) + 1 > 101 for n in (*range(1, 101), 1)) for text in ("你", "好好")]
    assert (
        cut[1] and f"  cut at max_seq_len=101: {cut[0] / 102:.2%} of prompts, {cut[1] / 102:.2%} of responses" in lines
    )


def test_a_character_without_a_token_is_shown_as_split_to_bytes(tmp_path, tokenizer):
    assert [c in tokenizer.backend.get_vocab() for c in "龘你"] == [False, True]
    path = write(tmp_path / "rare.jsonl", [dict(prompt="龘龘你你", response="你")])
    lines = report_lines(read_contents(path, tokenizer, near=False), tokenizer, 256)
    assert "  characters split to bytes: 2 of 5 (40.00%), 1 different ones; most often 龘×2" in lines


def test_prompts_shared_with_the_other_file_are_counted(train, tmp_path):
    valid = write(tmp_path / "valid.jsonl", [dict(prompt="你", response="别的"), dict(prompt="没有", response="好")])
    contents = [read_contents(path, None, near=False) for path in (valid, train)]
    assert shared_line(*contents) == f"{valid}: 1 of 2 (50.00%) have a prompt that is also in {train}"


def test_the_report_draws_the_lengths_and_names_what_it_could_not_count(train, tmp_path, capsys):
    print_report([train], tmp_path / "none", 256)
    printed = capsys.readouterr().out
    assert (tmp_path / "train_lengths.png").read_bytes()[:4] == b"\x89PNG"
    assert "tokens: not counted" in printed and "near duplicates: " in printed
