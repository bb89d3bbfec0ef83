"""Each text exists in each language, takes the same values in all of them, and is used."""

import json
import re
from dataclasses import fields
from pathlib import Path
from string import Formatter

import pytest

from config import TrainConfig
from model.commands.help_zh import HELP_ZH
from model.commands.summary import rate_text
from model.display.answer_words import ANSWERS
from model.display.answers import FORMATS
from model.display.catalogue import CATALOGUE, SCREEN, Texts, language_of
from model.display.data_words import DATA
from model.display.doctor_words import DOCTOR
from model.display.log_words import LOG
from model.display.model_table import comparison_lines
from model.display.page_words import PAGE
from model.display.plan_words import PLAN
from model.display.tool_words import TOOLS
from model.display.words import WORDS
from model.train.loader import Schedule
from model.train.lr_schedule import LearnRate
from model.train.objectives.dialogues import Dialogues
from model.train.objectives.pairs import Pairs
from model.train.objectives.preference_dialogues import DialogueForm
from model.train.objectives.preference_pairs import PairForm

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [ROOT / "model" / room for room in ("run", "display", "commands", "serve")]


def values_of(text):
    return sorted(name for _, name, _, _ in Formatter().parse(text) if name)


@pytest.mark.parametrize("language", CATALOGUE)
def test_no_key_is_missing_in_a_language_and_each_text_takes_the_same_values(language):
    assert CATALOGUE[language].keys() == CATALOGUE["en"].keys()
    for key, text in CATALOGUE[language].items():
        assert text.strip() and values_of(text) == values_of(CATALOGUE["en"][key]), key


def test_chinese_is_not_english():
    same = {key for key, text in CATALOGUE["zh"].items() if text == CATALOGUE["en"][key]}
    names = {f"measure.{name}" for name in ("bleu", "chrf", "rouge_l", "distinct_2")}
    assert same == names | {"cpu", "left.run", "page.top_p", "page.top_k", "page.min_p"}


@pytest.mark.parametrize("language", CATALOGUE)
def test_figures_of_models_beside_each_other_and_columns_of_data_each_have_a_name_of_their_own(language):
    text = Texts(language)
    names = [line.split("  ")[0] for line in comparison_lines({"model": dict.fromkeys(FORMATS, 0.5)}, text)[1:]]
    assert len({*names}) == len(FORMATS)
    kinds = Pairs, Dialogues, PairForm, DialogueForm
    columns = {name.removesuffix("_ids") for kind in kinds for name in kind.columns if name.endswith("_ids")}
    assert len({text(f"column.{name}") for name in columns}) == len(columns)


def test_each_option_has_a_chinese_help():
    assert HELP_ZH.keys() == {field.name for field in fields(TrainConfig)}
    assert all(re.search("[\u4e00-\u9fff]", text) or text == "tiny" for text in HELP_ZH.values())


def test_the_page_asks_for_no_text_that_the_catalogue_lacks():
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOMS[-1] / "page").iterdir())
    numbers = re.search(r"const NUMBERS = (\[.*?\]);", page).group(1)
    asked = {
        *re.findall(r"words\.(\w+)", page),
        *re.findall(r'data-(?:text|label)="(\w+)"', page),
        *json.loads(numbers),
    }
    asked |= {*re.findall(r'Row\("(\w+)"', page), *(f"refused_{status}" for status in (401, 404, 413, 429, 503))}
    assert {f"page.{name}" for name in asked - {"js"}} == {key for key in CATALOGUE["en"] if key.startswith("page.")}


def test_each_key_is_used():
    paths = [path for room in (*ROOMS, ROOT / "scripts") for path in room.glob("*.py")] + [ROOT / "train_low_mem.py"]
    users = [path for path in paths if path.stem != "catalogue" and not path.stem.endswith("words")]
    code = "".join(path.read_text(encoding="utf-8") for path in users) + 'f"page.{"'
    prefixes = {prefix for prefix in re.findall(r"""f["'](\w+)\.\{""", code)}
    unused = [key for key in CATALOGUE["en"] if f'"{key}"' not in code and key.split(".")[0] not in prefixes]
    assert not unused


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"CHAT_LANG": "zh"}, "zh"),
        ({"CHAT_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
    ],
)
def test_chat_lang_or_else_the_locale_chooses_the_language(environment, language):
    assert language_of(environment) == language


def test_a_key_that_the_catalogue_lacks_has_a_default():
    assert Texts("zh").get("state.tokenising a.jsonl", "tokenising a.jsonl") == "tokenising a.jsonl"


def test_a_warm_up_that_rounds_to_no_steps_is_not_told():
    schedules = [Schedule(100, 8, 0, LearnRate(0.03, "cosine", pairs, 100)) for pairs in (0, 2, 16)]
    at_once = "0.03 from the first step, "
    assert [rate_text(schedule, Texts("en")) for schedule in schedules] == [
        at_once, at_once, "up to 0.03 over the first 2 steps, then "
    ]  # fmt: skip


def test_no_part_of_the_catalogue_hides_a_text_of_another():
    assert len(CATALOGUE["en"]) == sum(
        len(part["en"]) for part in (SCREEN, WORDS, LOG, ANSWERS, TOOLS, DATA, DOCTOR, PLAN, PAGE)
    )
