"""The documents agree with the code: options, presets, files, commands, figures."""

import contextlib
import io
import re
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
import torch

import config
from config import PRESETS, TrainConfig
from model.commands.option_values import load_config
from model.commands.plan_report import GIB, preview
from model.formats.weights import export_model
from model.run.run_dir import TOKENIZER_DIR

ROOT = Path(__file__).resolve().parents[1]
DOCS = ("architecture", "options", "benchmarks", "conversations", "faults", "judging")
RESULTS = [f"bench/results/{path.name}" for path in sorted((ROOT / "bench" / "results").glob("*.md"))]
PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in DOCS), *RESULTS]


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def table(page, heading):
    """Rows of the first table in `page` after `heading`, as lists of cells."""
    text = text_of(page)
    rows = re.search(r"\n\|.*\n\| ---.*\n((?:\|.*\n)+)", text[text.index(heading) :]).group(1)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def test_each_option_is_in_the_table_with_its_default():
    shown = {name.strip("`"): default for name, default, _ in table("docs/options.md", "# Options")}
    real = {f.name: "empty" if f.default == "" else f"`{f.default}`" for f in fields(TrainConfig)}
    assert shown == real


def test_each_preset_is_in_the_table_with_its_differences():
    shown = {name.strip("`"): differences for name, _, differences in table("docs/options.md", "## Presets")}
    real = {
        name: ", ".join(f"`{field}={value}`" for field, value in preset.items()) or "none"
        for name, preset in PRESETS.items()
    }
    assert shown == real


def test_each_optimizer_is_in_the_table_with_its_learning_rates():
    shown = {
        name.strip("`"): tuple(map(float, rates)) for name, *rates in table("docs/options.md", "## Learning rates")
    }
    assert shown == config.LEARN_RATES


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_can_be_loaded(name):
    assert load_config(name, {}).output_dir == f"model_save/{name}"


@pytest.mark.parametrize("page", PAGES)
def test_each_file_that_a_page_names_exists(page):
    text = text_of(page)
    named = set(re.findall(r"((?:model|scripts|bench|docs|tests)/[\w/]+\.(?:py|sh|md|png))", text))
    named |= set(re.findall(r"(?:\./|`)(\w+\.(?:sh|py))\b", text))
    named |= {str(Path(page).parent / link) for link in re.findall(r"\]\(([\w./]+)\)", text)}
    named |= {f"bench/{name}.py" for name in re.findall(r"bench\.(\w+)", text)}
    missing = [name for name in sorted(named) if not any((ROOT / place / name).is_file() for place in ("", "scripts"))]
    assert named and not missing


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_each_of_the_first_commands_writes_what_the_next_one_reads(page):
    block = re.search(r"```bash\n(python scripts/prepare_data.*?)```", text_of(page), re.DOTALL).group(1)
    prepare, tokenizer, train = (line.split() for line in block.splitlines()[:3])
    defaults = load_config("pretrain", {})
    assert prepare[-4:] == ["--output", defaults.train_file, "--validation_output", defaults.validation_file]
    assert tokenizer[2] == defaults.train_file and tokenizer[tokenizer.index("--output_dir") + 1] == TOKENIZER_DIR
    assert train[-2:] == ["./train_low_mem.py", "train"]


def test_the_answers_in_contributing_are_modules():
    answers = re.findall(r"`(model/[\w/]+\.py)`", text_of("CONTRIBUTING.md").split("## Ten questions")[1])
    assert len(answers) >= 9 and all((ROOT / path).is_file() for path in answers)


def test_the_snippet_of_readme_runs_on_an_exported_model(tmp_path, monkeypatch, model, tokenizer):
    snippet = re.search(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    export_model(model, tokenizer, tmp_path / "model_save" / "pretrain" / "best")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(snippet, {})
    assert printed.getvalue().endswith("\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the table is of a plan made without a GPU")
def test_the_table_of_gpus_is_what_plan_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for card, *cells in table("README.md", "## What to expect"):
        for (size, pairs), cell in zip(product(("small", "chatlm"), (64, 256)), cells, strict=True):
            options = dict(model=size, batch_size_per_gpu=pairs // 2, gpu_memory_limit_gb=card.split()[0])
            found = preview(load_config("pretrain", options), (), num_processes=1, vocab_size=29_298)
            predicted = f"{max(found['phases'].values()) / GIB:.1f} GiB, {found['forwards']:.0f}"
            predicted += ", computed again" * bool(found["plan"]["gradient_checkpointing"])
            predicted += ", CUDA graph" * found["plan"]["graphs"]
            assert cell.replace(" forwards", "") == predicted


def test_the_documents_stay_short():
    pages = ["README.md", "README.zh.md", *(ROOT / "docs").rglob("*.md")]
    assert len(text_of("README.md").splitlines()) <= 170
    assert (
        sum(len(text_of(page).splitlines()) for page in pages) <= 3200
    )  # the guides of preferences, other engines, MiniMind and judging are 400 of them
