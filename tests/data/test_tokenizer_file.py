import copy
import json
import shutil

import pytest

from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_file import MAX_REPLACEMENT_CHARS, MAX_VOCAB_SIZE, load_backend


@pytest.fixture
def changed(tokenizer, tmp_path):
    """The tokenizer of a directory whose tokenizer.json was changed by a function of its content."""

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
        (lambda content: content["model"]["vocab"].update(q=5), "an id twice"),
        (lambda content: content["model"].update(vocab=[1]), "cannot be used"),
        (lambda content: content["model"]["merges"].append(["no", "such"]), "out of vocabulary"),
        (lambda content: content["pre_tokenizer"].update(pattern=dict(Regex="((")), "parenthesis"),
        (growing, "longest replacement 65 characters"),
    ],
)
def test_a_stranger_s_tokenizer_is_refused_with_the_reason(changed, change, part):
    with pytest.raises(ValueError, match=part):
        changed(change)


def test_a_tokenizer_that_drops_merges_at_random_cuts_a_text_the_same_way_each_time(changed):
    tokenizer = changed(lambda content: content["model"].update(dropout=0.5))
    assert len({tuple(tokenizer.encode(PROBE)) for _ in range(5)}) == 1


def test_where_only_a_sentencepiece_model_lies_its_conversion_is_named(tmp_path):
    (tmp_path / "spiece.model").touch()
    with pytest.raises(ValueError, match=r"no tokenizer at .*convert spiece.model \(SentencePiece\) to tokenizer.json"):
        load_backend(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\ud83d", "[]", ""])
def test_a_file_that_is_no_object_is_refused_however_deep(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
