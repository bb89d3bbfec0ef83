import re

from huggingface_hub import ModelCard

from model.formats.model_card import CardFacts, adapter_card, ctranslate2_card, merged_card, model_card
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


def test_an_adapter_s_card_names_its_base_and_the_merged_model_s_says_what_the_adapter_was_trained_on():
    facts = CardFacts("run", "An adapter.", {"Data": {"trained on": "a"}}, "b", dict(bleu=6.814e-14, loss=1.23456))
    card = adapter_card(facts, "qwen3", False, "/cache/models--Qwen--Qwen3-0.6B/snapshots/ab12")
    data = ModelCard(card).data
    assert (data.base_model, data.tags, data.pipeline_tag) == ("Qwen/Qwen3-0.6B", ["qwen3"], "text-generation")
    assert "| BLEU, 0 to 100 | 0.00 |" in card and "| loss, nats a target token | 1.235 |" in card
    assert ModelCard(adapter_card(facts, "t5", True, "model_save/old/best")).data.base_model == "old"
    merged = merged_card(card, model_card(CardFacts(), "qwen3", False))
    data = ModelCard(merged).data
    assert (data.library_name, data.base_model) == ("transformers", "Qwen/Qwen3-0.6B")
    assert "| trained on | a |" in merged and "peft" not in merged
    assert merged.count("## Use") == merged.count("## Limits") == 1 and "BLEU" in merged


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
