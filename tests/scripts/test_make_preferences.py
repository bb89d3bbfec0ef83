"""scripts/make_preferences.py: what it writes, that it goes on after a stop, and what it refuses."""

import errno
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from model.data.preference_rows import read_preferences
from model.serve import preference_making
from model.serve.preference_making import Own
from tests.parts import make_pairs

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_preferences.py"
SPEC = importlib.util.spec_from_file_location("make_preferences_script", SCRIPT)
SPEC.loader.exec_module(script := importlib.util.module_from_spec(SPEC))


@pytest.fixture
def questions(tmp_path):
    """A file of 20 pairs, a dialogue, and rows that give no preference."""
    rows = [dict(prompt=prompt, response=response) for prompt, response in make_pairs(20, longest=8)]
    said = [("system", "你好"), ("user", "天气"), ("assistant", "好"), ("user", "明天"), ("assistant", "下雨")]
    rows += [dict(messages=[dict(role=role, content=text) for role, text in said])]
    rows += [dict(prompt="天气", response=""), dict(prompt="天气" * 50, response="好")]
    rows += [dict(messages=[dict(role="user", content="问"), dict(role="assistant", content="答", reasoning="想")])]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make(exported, questions, output, *words):
    options = ["--max_new_tokens", "12", "--max_prompt_tokens", "40", *words]
    return script.main([str(exported), str(questions), "--output", str(output), *options])


def test_the_right_answer_is_chosen_and_the_model_s_own_is_rejected(exported, questions, tmp_path, capsys):
    assert make(exported, questions, tmp_path / "out.jsonl") == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    pairs = [json.loads(line) for line in questions.read_text().splitlines()]
    asked = {row["prompt"]: row["response"] for row in pairs[:20]}
    empty = int(re.search(r"left out: (\d+) rows whose question the model answers with nothing", said)[1])
    assert len(rows) == 21 - empty > 5 and f"{len(rows)} preferences" in said and "end by themselves" in said
    assert all(asked[row["prompt"]] == row["chosen"] for row in rows if isinstance(row["prompt"], str))
    spoken = [row["prompt"] for row in rows if isinstance(row["prompt"], list)]
    assert [[message["content"] for message in prompt] for prompt in spoken] == [["你好", "天气", "好", "明天"]]
    assert all(row["rejected"] and row.keys() == {"prompt", "chosen", "rejected"} for row in rows)
    for what in ("1 rows without an answer", "1 rows with thoughts", "1 rows whose question is empty or above"):
        assert f"left out: {what}" in said
    assert len(list(read_preferences(tmp_path / "out.jsonl", ("", ""), Counter()))) == len(rows)
    assert make(exported, questions, tmp_path / "out.jsonl") == 2 and "exists already" in capsys.readouterr().err


def test_it_goes_on_where_it_was_stopped_and_only_with_the_same_command(
    exported, questions, tmp_path, monkeypatch, capsys
):
    assert make(exported, questions, tmp_path / "whole.jsonl") == 0
    monkeypatch.setattr(preference_making, "FIRST_ROWS", 8)
    own, calls = preference_making.answered, []

    def stopped(chat, rows, asking):
        calls.append(len(rows))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(chat, rows, asking)

    monkeypatch.setattr(preference_making, "answered", stopped)
    assert make(exported, questions, tmp_path / "out.jsonl") == 0
    assert not (tmp_path / "out.jsonl").exists() and "the same command goes on" in capsys.readouterr().err
    draft = tmp_path / "out.jsonl.part"
    with open(draft, "a", encoding="utf-8") as file:
        file.write('{"prompt": "half a li')
    assert make(exported, questions, tmp_path / "out.jsonl", "--samples", "2") == 2
    assert "was begun with another model, file or option" in capsys.readouterr().err
    assert make(exported, questions, tmp_path / "out.jsonl") == 0
    assert sum(calls) - calls[1] == 24, "what was answered before the stop is not answered again"
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not draft.exists()


def test_of_several_answers_the_one_that_loops_is_the_worst_then_the_endless_one_then_the_length_that_is_farthest(
    exported, questions, tmp_path
):
    loops, endless, short, good = (
        Own("ab" * 9, True, True),
        Own("abcd", False, False),
        Own("", False, True),
        Own("abc", False, True),
    )
    worst_first = sorted((good, short, loops, endless), key=lambda own: own.badness("abcd"), reverse=True)
    assert worst_first == [loops, endless, short, good]
    texts = []
    for number, words in enumerate((["--samples", "3"], ["--samples", "3"], ["--samples", "3", "--seed", "9"])):
        assert make(exported, questions, tmp_path / f"{number}.jsonl", *words) == 0
        texts.append((tmp_path / f"{number}.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_what_the_model_says_itself_and_what_does_not_fit_are_left_out_or_refused(
    exported, questions, tmp_path, monkeypatch, capsys
):
    first = json.loads(questions.read_text().splitlines()[0])["response"]
    worse = [Own(first, False, True)]
    monkeypatch.setattr(preference_making, "_own_answers", lambda chat, inputs, asking: [worse] * len(inputs))
    assert make(exported, questions, tmp_path / "out.jsonl", "--rows", "1") == 2
    said = capsys.readouterr()
    assert "left out: 1 rows whose answer the model gives itself" in said.out and not (tmp_path / "out.jsonl").exists()
    assert "questions.jsonl gave a preference" in said.err and "give more rows" in said.err
    for words, part in (
        (["--samples", "2", "--temperature", "0"], "greedy answers are all the same"),
        (["--output", str(tmp_path / "x.csv")], "name a .jsonl file"),
    ):
        assert make(exported, questions, tmp_path / "other.jsonl", *words) == 2
        assert part in capsys.readouterr().err
    assert make(exported, tmp_path / "nothing.jsonl", tmp_path / "other.jsonl") == 2
    assert "nothing.jsonl: no such file" in capsys.readouterr().err
    assert make(tmp_path / "nothing", questions, tmp_path / "other.jsonl") == 2
    assert "no model in" in capsys.readouterr().err


def test_half_as_many_answers_are_generated_together_after_an_out_of_memory(exported, questions, tmp_path, monkeypatch):
    import torch

    own, slots = preference_making.generate, []

    def fails_at_first(model, inputs, limits, *rest):
        slots.append(limits.slots)
        if limits.slots > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return own(model, inputs, limits, *rest)

    monkeypatch.setattr(preference_making, "generate", fails_at_first)
    assert make(exported, questions, tmp_path / "out.jsonl", "--slots", "20") == 0
    assert slots == [20, 10, 5] and (tmp_path / "out.jsonl").stat().st_size


def test_a_draft_that_cannot_be_gone_on_with_says_what_to_do(exported, questions, tmp_path, monkeypatch, capsys):
    draft = tmp_path / "out.jsonl.part"
    for hostile, part in (
        (draft.mkdir, "is no file"),
        (lambda: draft.write_bytes(b"\xb3\n"), "was begun with another"),
    ):
        hostile()
        assert make(exported, questions, tmp_path / "out.jsonl") == 2
        assert f"{draft} {part}" in capsys.readouterr().err
        draft.rmdir() if draft.is_dir() else draft.write_bytes(b"")  # as a full disk leaves it

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(preference_making.os, "fsync", full)
        assert make(exported, questions, tmp_path / "out.jsonl") == 1
    assert "cannot be written (No space left on device): solve that, and type the command" in capsys.readouterr().err
    assert make(exported, questions, tmp_path / "out.jsonl") == 0
    (tmp_path / "folder.jsonl").mkdir()
    assert make(exported, questions, tmp_path / "folder.jsonl", "--overwrite") == 2
