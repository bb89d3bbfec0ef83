"""Untrusted tokenizer files: defects and attacks are refused with a reason."""

import copy
import json
import shutil

import pytest

from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_file import MAX_REPLACEMENT_CHARS, MAX_VOCAB_SIZE, load_backend


@pytest.fixture
def changed(tokenizer, tmp_path):
    """A function that loads the tokenizer after changing the content of its tokenizer.json."""

    def load(change):
        shutil.copytree(tokenizer.directory, tmp_path, dirs_exist_ok=True)
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content = copy.deepcopy(content)
        change(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return load_tokenizer(tmp_path)

    return load


def growing(content):
    content["normalizer"] = dict(type="Replace", pattern=dict(Regex="."), content="x" * (MAX_REPLACEMENT_CHARS + 1))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda content: content["model"]["vocab"].update(q=MAX_VOCAB_SIZE), "above 1,048,575"),
        (lambda content: content["model"]["vocab"].update(q=5), "the same id twice"),
        (lambda content: content["model"].update(vocab=[1]), "cannot be used"),
        (lambda content: content["model"]["merges"].append(["no", "such"]), "out of vocabulary"),
        (lambda content: content["pre_tokenizer"].update(pattern=dict(Regex="((")), "parenthesis"),
        (growing, "longest replacement 65 characters"),
    ],
)
def test_an_unusable_tokenizer_file_is_refused_with_the_reason(changed, change, part):
    with pytest.raises(ValueError, match=part):
        changed(change)


def test_a_tokenizer_with_bpe_dropout_encodes_a_text_the_same_way_each_time(changed):
    tokenizer = changed(lambda content: content["model"].update(dropout=0.5))
    assert len({tuple(tokenizer.encode(PROBE)) for _ in range(5)}) == 1


def test_a_directory_with_only_a_sentencepiece_model_is_refused_with_how_to_convert_it(tmp_path):
    (tmp_path / "spiece.model").touch()
    with pytest.raises(ValueError, match="no tokenizer at .*python scripts/convert_tokenizer.py"):
        load_backend(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\ud83d", "[]", ""])
def test_a_file_without_a_json_object_is_refused_however_deep_its_brackets(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
