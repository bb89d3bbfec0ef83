"""The English and the Chinese pages say the same: headings, commands, tables, links; and what they show exists."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from config import TrainConfig
from model.commands.guide_flags import VALUES
from model.commands.option_names import OWN_NAMES
from model.commands.option_values import load_config
from model.commands.options import FLAGS, preset_name
from model.nn.registry import QWEN, load_model_config

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide"
PAIRS = [("README.md", "README.zh.md")] + [
    (f"docs/guide/en/{path.name}", f"docs/guide/zh/{path.name}") for path in sorted((GUIDE / "en").glob("*.md"))
]
PAGES = [page for pair in PAIRS for page in pair]
OTHER_PAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("docs", "bench/results")
    for path in sorted((ROOT / folder).glob("*.md"))
]
PLAN_WORDS = {"num_processes", "vocab_size", "json"}
MOST_LINES = 120


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(text):
    """The text without its blocks of code."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def commands_of(page):
    """The lines of the page's blocks of commands and of Python, without comments."""
    blocks = re.findall(r"```(?:bash|python)\n(.*?)```", text_of(page), re.DOTALL)
    return [re.sub(r"\s+# .*", "", line) for block in blocks for line in block.splitlines()]


def links_of(page):
    """Targets of the page's links, with the other language's pages as this one's, whatever the headings are called."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", prose_of(text_of(page)))]
    return [re.sub(r"/(en|zh)/", "/LANGUAGE/", re.sub(r"[._]zh\.", ".", target)) for target in targets]


def shape_of(page):
    """Level of each heading, number of cells of each row of a table, number of points of lists, in order."""
    found = []
    for line in prose_of(text_of(page)).splitlines():
        if match := re.match(r"#+ ", line):
            found.append(match.group())
        elif line.startswith("|"):
            found.append(len(re.findall(r"(?<!\\)\|", line)))
        elif re.match(r"(- |\d+\. )", line):
            found.append("point")
    return found


def codes_of(page):
    """What is set as code in each row of the tables, sorted; lines of output and what is in Chinese are left out."""
    rows = [line for line in prose_of(text_of(page)).splitlines() if line.startswith("|")]
    return [sorted(code for code in re.findall(r"`[^`]+`", row) if code.isascii() and "  " not in code) for row in rows]


def figures_of(page):
    """The decimal fractions of the page's prose and tables, but for counts in 亿, 万, k and M."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose_of(text_of(page)))
    return set(re.findall(r"\d+\.\d+(?![\d\s]*[亿万kM])", text))


def test_both_languages_have_the_same_pages():
    names = [sorted(path.name for path in (GUIDE / language).iterdir()) for language in ("en", "zh")]
    assert names[0] == names[1] and len(names[0]) >= 6


@pytest.mark.parametrize("part", [shape_of, commands_of, links_of, codes_of, figures_of])
@pytest.mark.parametrize("english, chinese", PAIRS)
def test_both_languages_have_the_same(english, chinese, part):
    assert part(english) == part(chinese)


@pytest.mark.parametrize("page", PAGES + OTHER_PAGES)
def test_each_link_leads_to_a_file_and_to_a_heading_that_are_there(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose_of(text_of(page))):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\s-]", "", text.lower()).replace(" ", "-") for text in headings], target


@pytest.mark.parametrize("page", [english for english, _ in PAIRS])
def test_each_command_has_only_options_that_there_are(page):
    known = {f.name for f in fields(TrainConfig)} | {*FLAGS}
    for line in commands_of(page):
        words = shlex.split(line.replace("\\", "").replace("'", ""), comments=True) if line.count('"') % 2 == 0 else []
        places = [place for place, word in enumerate(words) if word.endswith("train_low_mem.py")]
        if places:
            ours = words[places[0] :]
            typed = dict(word[2:].partition("=")[::2] for word in ours if re.match(r"--\w+=", word))
            assert typed.keys() <= known | (PLAN_WORDS if "plan" in words else set()), line
            flags = {name: value == "True" for name, value in typed.items() if name.startswith(("use_", "is_fine"))}
            load_config(
                preset_name(**flags), {name: typed[name] for name in typed if name not in {*FLAGS} | PLAN_WORDS}
            )
        if "scripts/train_lora.py" in words:
            assert {word[2:] for word in words if word.startswith("--")} <= known | {*OWN_NAMES, *VALUES}, line
            continue
        for script in re.findall(r"scripts/\w+\.py", line):
            source = text_of(script)
            options = [word.partition("=")[0] for word in words if word.startswith("--")]
            own = options if words[0] == "python" else []
            assert all(f'"{option}"' in source for option in own), line


@pytest.mark.parametrize("page", [page for page in PAGES if "guide" in page])
def test_a_page_of_the_guide_stays_short(page):
    assert len(text_of(page).splitlines()) <= MOST_LINES


def test_the_image_of_docker_is_built_from_the_pinned_packages_without_what_git_ignores():
    lines = text_of("scripts/Dockerfile").splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert installs and all("-c constraints.txt" in line for line in installs)
    extras = set(re.search(r"\[([\w,]+)\]", installs[-1]).group(1).split(","))
    assert extras <= set(re.findall(r"^(\w+) = \[", text_of("pyproject.toml"), re.MULTILINE))
    copied = re.search(r"^COPY (.*) \./$", "\n".join(lines), re.MULTILINE).group(1).split()
    assert all((ROOT / name).is_file() for name in copied)
    left_out = {line.removeprefix("**/") for line in text_of("scripts/Dockerfile.dockerignore").splitlines()}
    assert {line.strip("/") for line in text_of(".gitignore").splitlines() if line} <= left_out


@pytest.mark.parametrize("page", [chinese for _, chinese in PAIRS])
def test_chinese_prose_has_one_word_for_each_thing(page):
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose_of(text_of(page)))
    for word in ("token", "epoch", "基座", "rank 0", "少估"):  # 词元, 轮, 底座, 进程, 低估
        assert word not in prose, word
    assert not re.search(r"\d %", prose), "a percentage is written without a space"


def test_the_example_of_a_qwen_from_scratch_is_a_model_and_what_a_refusal_shows(tmp_path):
    text = (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*\"family\".*)\n```", text)
    (tmp_path / "qwen.json").write_text(example)
    assert load_model_config(str(tmp_path / "qwen.json")).model_type == "qwen3" and example == QWEN
