"""Which optimizer, learning rate and dropout a run gets when none is typed, the same in train, plan and doctor."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from model.commands.doctor import model_rows
from model.commands.option_values import load_config
from model.commands.origin import find_origin
from model.commands.plan_report import preview
from model.commands.settled import settled, with_dropout, with_rate
from model.formats.adapters import export_adapter, export_merged, load_merged
from model.formats.model_card import CARD_FILE, CardFacts
from model.formats.weights import export_model, load_weights
from model.nn.lora import LoraConfig, attach, draw
from model.runtime.distributed import ALONE
from tests.tiny import SHORT, journal, train

MUON, ADAMW = ("muon", 1.5e-2, "muon"), ("adamw", 1e-3, "others")


@pytest.fixture(scope="module")
def made(home):
    """A folder with a run of Muon and a copy of its best/ whose weights AdamW trained."""
    done = train(home, output_dir="muon_run", **SHORT)
    assert done.codes == [0], done.text
    copied(home, home / "adamw_made", lambda text: text.replace('"muon"', '"adamw"'))
    return home


def choice(source, typed=(), **options):
    options = dict(finetune_from_ckp_file=str(source)) | options
    config = load_config("pretrain", options)
    config, why = settled(config, frozenset(typed), find_origin(ALONE, config, typed))
    return config.optimizer, config.learn_rate, why


def copied(made, target, edit):
    """A copy of an export in which `edit` changes the text of its config.json."""
    shutil.copytree(made / "muon_run" / "best", target)
    text = edit((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(text, encoding="utf-8")
    return target


def without_record(text):
    values = json.loads(text)
    assert values.pop("chat_trainer")["optimizer"]
    return json.dumps(values)


def test_an_export_says_which_optimizer_trained_it_and_transformers_keeps_that(made, tmp_path):
    for part in ("best", "last"):
        values = json.loads((made / "muon_run" / part / "config.json").read_text())
        assert values["chat_trainer"] == dict(optimizer="muon")
    known = AutoConfig.from_pretrained(made / "muon_run" / "best")
    assert known.chat_trainer == dict(optimizer="muon")
    AutoModelForSeq2SeqLM.from_pretrained(made / "muon_run" / "best").save_pretrained(tmp_path)
    assert load_weights(tmp_path).optimizer == "muon"


def test_weights_keep_the_optimizer_that_made_them_and_all_others_get_adamw(made, tmp_path):
    assert choice(made / "muon_run") == choice(made / "muon_run" / "last") == MUON
    assert choice(made / "muon_run" / "best" / "model.safetensors", model=str(made / "shape.json"),
                  tokenizer_dir=str(made / "muon_run" / "best")) == MUON  # fmt: skip
    assert choice(made / "adamw_made") == ADAMW
    downloaded = copied(made, tmp_path / "downloaded", without_record)
    (downloaded / CARD_FILE).write_text("# A model\n\n| optimizer | Adam |\n", encoding="utf-8")
    assert choice(downloaded) == ADAMW
    assert choice(downloaded, ["optimizer"], optimizer="muon") == ("muon", 1.5e-2, "typed")
    assert choice(downloaded, lora_rank=2) == ("adamw", 1e-3, "adapter")
    (downloaded / CARD_FILE).unlink()
    assert choice(downloaded) == ADAMW
    assert choice(downloaded, ["learn_rate"], learn_rate="3e-5") == ("adamw", 3e-5, "others")
    with pytest.raises(ValueError, match="^--learn_rate=3e-05: muon takes 0.001 to 0.1"):
        choice(made / "muon_run", ["learn_rate"], learn_rate="3e-5")


def test_exports_from_before_the_record_say_it_in_their_card_or_in_their_run(made, tmp_path):
    assert choice(copied(made, tmp_path / "moved", without_record)) == MUON
    shutil.copytree(made / "muon_run", tmp_path / "run", ignore=lambda *_: ["README.md", "checkpoints"])
    for part in ("best", "last"):
        path = tmp_path / "run" / part / "config.json"
        path.write_text(without_record(path.read_text()))
    assert choice(tmp_path / "run") == MUON
    (tmp_path / "run" / "config.json").write_text("{")
    assert choice(tmp_path / "run") == ADAMW


@pytest.mark.parametrize("optimizer", ["muon", ""])
def test_a_merged_adapter_changes_nothing(tmp_path, model, tokenizer, optimizer):
    export_model(model, tokenizer, tmp_path / "base", facts=CardFacts(optimizer=optimizer))
    lora = LoraConfig(rank=2, alpha=4.0, targets=("q",), base=str(tmp_path / "base"))
    draw(attach(model, lora), 1)
    tables = {"Training": {"trained": "LoRA of rank 2 on base", "optimizer": "muon, peak learning rate 0.015, wsd"}}
    export_adapter(model, tokenizer, tmp_path / "adapter", facts=CardFacts(tables=tables, optimizer="muon"))
    expected = MUON if optimizer else ADAMW
    assert choice(tmp_path / "adapter") == expected
    export_merged(load_merged(tmp_path / "adapter"), tokenizer, tmp_path / "merged")
    shutil.copy(tmp_path / "adapter" / CARD_FILE, tmp_path / "merged" / CARD_FILE)  # its optimizer was the adapter's
    assert choice(tmp_path / "merged") == expected


def test_train_plan_and_doctor_choose_and_say_the_same_and_a_resume_keeps_it(made, monkeypatch):
    (copied(made, made / "base", without_record) / CARD_FILE).unlink()
    options = dict(output_dir="ours", finetune_from_ckp_file="base", model=None, **SHORT)
    stopped = train(made, 1, "forward:0:3:int", **options)
    why = "the default for weights that this trainer's Muon did not train"
    assert stopped.codes == [0] and stopped.text.count(f"optimizer: adamw, {why}; learning rate up to 0.001") == 1
    monkeypatch.chdir(made)
    config = load_config("pretrain", dict(finetune_from_ckp_file="base", train_file="train.jsonl"))
    planned, (recipe, _, rows) = preview(config, ()), model_rows(config, (), False)
    assert planned["optimizer"] == dict(name="adamw", learn_rate=1e-3, why=why)
    (found,) = [row.found for row in rows if row.what == "optimizer"]
    assert found == f"adamw, {why}; peak learning rate 0.001" and recipe.spec.state_bytes == 8 * recipe.spec.trained
    shutil.copyfile(made / "muon_run" / "best" / "config.json", made / "base" / "config.json")
    ours = preview(config, ())
    assert ours["optimizer"]["name"] == "muon"
    assert ours["fixed_bytes"]["optimizer"] < planned["fixed_bytes"]["optimizer"]
    resumed = train(made, is_keep_training=True, optimizer="auto", **options)
    assert "optimizer: adamw, as at the run's first start; learning rate up to 0.001" in resumed.text, resumed.text
    assert [line["optimizer"] for line in journal(made / "ours", "start")] == ["adamw", "adamw"]
    absent = preview(load_config("sft", dict(train_file="train.jsonl")), ())["optimizer"]
    assert (absent["name"], absent["learn_rate"]) == ("muon", 1.5e-2)


def test_a_t5_from_scratch_that_reads_few_pairs_often_gets_dropout_and_nothing_else_does(home, made, monkeypatch):
    monkeypatch.chdir(home)

    def chosen(num_pairs, passes, **options):
        config = load_config("pretrain", dict(model="small", tokenizer_dir="model_save/tokenizer") | options)
        config, why = with_dropout(config, find_origin(ALONE, config, ()), num_pairs, passes)
        return config.dropout, why

    assert [chosen(90_000, passes) for passes in (3, 6, 8, 40)] == [(0.075, "few"), (0.15, "few"), *[(0.2, "few")] * 2]
    assert [chosen(400_000, passes) for passes in (6, 8)] == [(0.091, "few"), (0.122, "few")]
    assert chosen(90_000, 2.9) == (0, "seldom") and chosen(900_000, 6) == (0, "many")
    assert chosen(90_000, 6, dropout=0) == (0, "") and chosen(900_000, 6, dropout=0.3) == (0.3, "")
    source = dict(model="tiny", finetune_from_ckp_file=str(made / "muon_run" / "best"), tokenizer_dir="")
    assert chosen(90, 6, **source) == (0, "") and chosen(90, 6, model="mini") == (0, "")


def test_a_run_says_which_dropout_it_chose_and_keeps_it(home):
    done = train(home, output_dir="dropped", dropout=None, epochs=None, max_steps=2, warmup_steps=0)
    assert done.codes == [0] and "dropout: 0, because each pair is read only" in done.text, done.text
    done = train(home, output_dir="dropped_more", dropout=None, epochs=4, save_steps=1000)
    assert done.codes == [0] and "dropout: 0.1, because 44 pairs, each read 4 times" in done.text, done.text
    stored = json.loads((home / "dropped_more" / "config.json").read_text())["config"]
    assert stored["dropout"] == 0.1


def test_a_default_rate_relative_to_the_weights_falls_where_steps_are_many_and_no_other_does(home):
    config, new, known = load_config("pretrain", {}), SimpleNamespace(found=None), SimpleNamespace(found=True)

    def rate(num_steps, typed=(), origin=new, **options):
        return with_rate(replace(config, **options), typed, origin, num_steps).learn_rate

    assert [rate(n) for n in (None, 14_000, 80_000, 800_000)] == [0.03, 0.03, 0.0129, 0.00408]
    assert rate(80_000, lr_schedule="wsd") == 0.00849
    assert {rate(80_000, ["learn_rate"]), rate(80_000, origin=known), rate(80_000, optimizer="adamw")} == {0.03}
    for options, said in ((dict(learn_rate=0.09), "rise again"), (dict(learn_rate=None), "0.0258, not 0.03")):
        done = train(home, output_dir=f"long_{len(said)}", epochs=3636, early_stop=2, warmup_steps=0, **options)
        assert done.codes == [0] and said in done.text, done.text
