"""The demo's pairs are right, of many kinds and reproducible; held-out questions are unseen but answerable."""

import re
import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scripts.demo_data import FACTS, RULES, WEEKDAYS, make_splits

ROOT = Path(__file__).resolve().parents[2]
MILLIMETRES = {"毫米": 1, "厘米": 10, "分米": 100, "米": 1000, "千米": 1_000_000}
OTHER_UNITS = {"克": 1, "千克": 1000, "分": 1, "角": 10, "元": 100, "年": 1, "世纪": 100, "毫升": 1, "升": 1000}


@pytest.fixture(scope="module")
def splits():
    return make_splits(pairs=9000, seed=0)


@pytest.fixture(scope="module")
def questions(splits):
    return [question for split in splits.values() for question in split]


def numbers(prompt):
    return [int(digits) for digits in re.findall(r"\d+", prompt)]


def write(folder, *options):
    command = [sys.executable, str(ROOT / "scripts/demo_data.py"), "--output_dir", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)


def test_equal_seeds_write_equal_bytes_and_different_seeds_different_ones(tmp_path):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert write(tmp_path / name, "--pairs", "400", "--seed", seed).returncode == 0
    for split in ("train", "valid", "test"):
        file_bytes = [(tmp_path / name / f"{split}.parquet").read_bytes() for name in "abc"]
        assert file_bytes[0] == file_bytes[1] != file_bytes[2]
        assert pq.read_schema(tmp_path / "a" / f"{split}.parquet").names == ["prompt", "response", "kind"]


def test_too_few_pairs_are_refused_with_the_smallest_number_allowed(tmp_path):
    result = write(tmp_path / "out", "--pairs", "5")
    assert result.returncode == 2
    assert re.fullmatch(r"--pairs 5 .* use at least \d+\n", result.stderr)
    least = re.search(r"\d+$", result.stderr.strip()).group()
    assert write(tmp_path / "out", "--pairs", least).returncode == 0


@pytest.mark.parametrize("pairs", [280, 400, 9000])
def test_every_split_has_every_kind_and_no_kind_exceeds_30_percent(pairs):
    for split in make_splits(pairs, seed=1).values():
        kinds = Counter(question.kind for question in split)
        assert set(kinds) == {*RULES, *FACTS} and len(kinds) >= 5
        assert max(kinds.values()) <= 0.3 * len(split)


@pytest.mark.parametrize("pairs", [280, 9000])
def test_no_prompt_occurs_twice_in_or_across_the_splits(pairs):
    prompts = [question.prompt for split in make_splits(pairs, seed=2).values() for question in split]
    assert len(prompts) == len(set(prompts))
    assert max(map(len, prompts)) < 25


@pytest.mark.parametrize("pairs", [280, 9000])
def test_train_has_each_held_out_fact_in_other_words_and_no_held_out_subject_of_a_rule(pairs):
    splits = make_splits(pairs, seed=2)
    answers = {(question.kind, question.subject): question.response for question in splits["train"]}
    for question in [*splits["valid"], *splits["test"]]:
        if question.kind in FACTS:
            assert answers[question.kind, question.subject] == question.response
        else:
            assert (question.kind, question.subject) not in answers


def test_held_out_questions_use_no_character_that_train_lacks(splits):
    seen = set("".join(question.prompt + question.response for question in splits["train"]))
    for question in [*splits["valid"], *splits["test"]]:
        assert set(question.prompt + question.response) <= seen


def test_sums_differences_and_comparisons_are_right(questions):
    for question in questions:
        if question.kind in ("arithmetic", "comparison"):
            a, b = numbers(question.prompt)
            sign = re.search(r"加|\+|和是|减|-|差|大|小", question.prompt).group()
            answer = {
                **dict.fromkeys(("加", "+", "和是"), a + b),
                **dict.fromkeys(("减", "-", "差"), a - b),
                "大": max(a, b),
                "小": min(a, b),
            }[sign]
            assert question.response == str(answer), question


def test_weekdays_and_months_agree_with_the_calendar(questions):
    monday, january = date(2024, 1, 1), date(2023, 1, 1)
    for question in (question for question in questions if question.kind == "calendar"):
        if "星期" in question.prompt:
            start = WEEKDAYS.index(re.search(r"星期(\w)", question.prompt).group(1))
            days = numbers(question.prompt)[0] * (-1 if re.search("前|倒", question.prompt) else 1)
            answer = f"星期{WEEKDAYS[(monday + timedelta(days=start + days)).weekday()]}"
        else:
            month, later = numbers(question.prompt)
            middle = january + timedelta(days=round((month - 1 + later + 0.5) * 365.2425 / 12))
            answer = f"{middle.month}月"
        assert question.response == answer, question


def test_reversed_texts_and_picked_characters_are_right(questions):
    place = {"第一": 0, "第二": 1, "第三": 2, "最后一": -1}
    for question in questions:
        if question.kind in ("reversal", "position"):
            items = re.search("“(.+)”", question.prompt).group(1).split("、")
        if question.kind == "reversal":
            assert question.response.split("、") == items[::-1], question
        if question.kind == "position":
            index = place[re.search("(第.|最后一)个", question.prompt).group(1)]
            assert question.response == items[index], question


def test_converted_amounts_are_the_same_quantity(questions):
    for question in (question for question in questions if question.kind == "units"):
        large, small = re.search(r"\d+(\w+?)(?:是多少|等于几|换算成|合多少)(\w+)", question.prompt).groups()
        sizes = MILLIMETRES if small in MILLIMETRES else OTHER_UNITS
        assert question.response == f"{numbers(question.prompt)[0] * sizes[large] // sizes[small]}{small}", question


def test_each_fact_has_one_answer(questions):
    answers = {}
    for question in questions:
        if question.kind in FACTS:
            assert answers.setdefault((question.kind, question.subject), question.response) == question.response
