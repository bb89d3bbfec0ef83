import re
from dataclasses import fields
from pathlib import Path

import pytest

from config import PRESETS, TrainConfig, load_config
from model.run.run_dir import TOKENIZER_DIR

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(heading):
    """Rows of the first table after a line that begins with `heading`, as lists of cells."""
    text = README[README.index(heading) :]
    rows = re.search(r"\n\|.*\n\| ---.*\n((?:\|.*\n)+)", text).group(1)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def test_each_option_stands_in_the_table_with_its_default():
    shown = {name.strip("`"): default for name, default, *_ in table("## Options")}
    real = {f.name: "empty" if f.default == "" else f"`{f.default}`" for f in fields(TrainConfig)}
    assert shown == real


def test_each_preset_stands_in_the_table_with_its_differences():
    shown = {name.strip("`"): differences for name, _, differences in table("A preset is")}
    real = {
        name: ", ".join(f"`{field}={value}`" for field, value in preset.items()) or "none"
        for name, preset in PRESETS.items()
    }
    assert shown == real


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_can_be_loaded(name):
    assert load_config(name, {}).output_dir == f"model_save/{name}"


def test_each_file_that_readme_names_exists():
    named = re.findall(r"((?:(?:model|scripts|bench|docs|tests)/|\./)[\w/]+\.(?:py|sh|md))", README)
    assert len(named) > 40
    for path in named:
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_first_commands_write_what_the_next_ones_read(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    block = re.search(r"```bash\n(python scripts/prepare_data.*?)```", text, re.DOTALL).group(1)
    prepare, tokenizer, train = (line.split() for line in block.splitlines()[:3])
    defaults = load_config("pretrain", {})
    assert prepare[-4:] == ["--output", defaults.train_file, "--validation_output", defaults.validation_file]
    assert tokenizer[2] == defaults.train_file and tokenizer[tokenizer.index("--output_dir") + 1] == TOKENIZER_DIR
    assert train[-2:] == ["./train_low_mem.py", "train"]


def test_each_room_says_what_it_is_for():
    shown = {cell.strip("`") for cell, _ in table("## How it works")}
    buckets = {str(path.relative_to(ROOT)) for path in (ROOT / "model").rglob("*.py") if path.name != "__init__.py"}
    assert buckets <= shown
