import re

import pytest
from huggingface_hub import ModelCard

from model.formats.model_card import (
    CardFacts,
    adapter_card,
    ctranslate2_card,
    hub_name,
    merged_card,
    model_card,
    model_name,
    with_base,
)
from model.formats.weights import export_model

FACTS = CardFacts("run: \"a|b\" # 'c'", "A model.", {"Data": {"trained on": "a|b\nc"}}, "问答.jsonl", dict(loss=1.25))


def test_hugging_face_reads_the_metadata_whatever_the_names_are():
    data = ModelCard(model_card(FACTS, "t5", True)).data
    assert (data.library_name, data.pipeline_tag, data.tags) == ("transformers", "text2text-generation", ["t5"])
    (result,) = data.eval_results
    assert (data.model_name, result.dataset_name) == (FACTS.title, "问答.jsonl")
    assert (result.metric_type, result.metric_value) == ("loss", 1.25)


def test_a_model_without_scores_has_metadata_too():
    data = ModelCard(model_card(CardFacts(), "t5", True)).data
    assert data.library_name == "transformers" and data.eval_results is None


def test_a_decoder_s_adapter_is_tagged_as_what_it_is_with_its_base_and_without_rounding_as_a_score():
    cached = "models--Qwen--Qwen3-0.6B/snapshots/1"
    facts = CardFacts(scores=dict(bleu=6.814e-14), file="v.jsonl", base=hub_name(cached))
    assert (hub_name("models/Qwen3-0.6B"), model_name(cached)) == ("", facts.base)
    card = adapter_card(facts, "qwen3", False, "base")
    data = ModelCard(card).data
    assert (data.pipeline_tag, data.tags, data.base_model) == ("text-generation", ["qwen3"], "Qwen/Qwen3-0.6B")
    assert data.eval_results[0].metric_value == 0 and "| BLEU, 0 to 100 | 0 |" in card
    assert [model_name(path) for path in ("/home/me/Qwen3-0.6B", "model_save/sft/best")] == ["Qwen3-0.6B", "sft"]


@pytest.mark.parametrize(
    "base", ["base_model: old\n", "base_model:\n- one/old\n- two/old\nbase_model_relation: merge\n", ""]
)
def test_a_base_on_a_hub_takes_the_place_of_those_that_a_card_names(base):
    card = model_card(FACTS, "t5", True).replace("tags:", f"{base}tags:", 1)
    named = ModelCard(with_base(card, "ada/base"))
    assert named.data.base_model == "ada/base" and named.data.tags == ["t5"] and named.data.eval_results
    assert named.text == ModelCard(card).text
    plain = ModelCard(with_base("# Mine\n\nbase_model: is no field here\n", "ada/base"))
    assert plain.data.base_model == "ada/base" and plain.text.strip() == "# Mine\n\nbase_model: is no field here"


def test_a_merged_card_keeps_the_training_and_has_one_use():
    card = merged_card(adapter_card(FACTS, "t5", True, "base"), True)
    assert ModelCard(card).data.library_name == "transformers" and "## Data" in card
    assert card.count("## Use") == card.count("## Limits") == 1 and "peft" not in card


def test_a_cell_stays_a_cell():
    assert "| trained on | a\\|b c |" in model_card(FACTS, "t5", True)


def test_the_card_for_ctranslate2_has_one_use_and_keeps_the_rest():
    card = ctranslate2_card(model_card(FACTS, "t5", True), "int8", True)
    assert ModelCard(card).data.library_name == "ctranslate2"
    assert card.count("## Use") == 1 and "Translator" in card and "AutoModel" not in card
    assert "## Limits" in card and "## Data" in card
    assert "Generator" in ctranslate2_card("", "int8", False)


def test_the_snippet_of_the_card_answers(tmp_path, monkeypatch, capsys, model, tokenizer):
    export_model(model, tokenizer, tmp_path / "best")
    monkeypatch.chdir(tmp_path / "best")
    run_snippet((tmp_path / "best" / "README.md").read_text(encoding="utf-8"))
    assert capsys.readouterr().out.endswith("\n")


def run_snippet(card):
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1), {})
