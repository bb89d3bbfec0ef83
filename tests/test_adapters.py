"""Runs that train an adapter, through the real loop: resumed, moved, retried, loaded by PEFT, made by PEFT."""

import json
import re
import shutil

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from model.generate.sampling import GREEDY, Sampling
from model.serve.answering import answer_all, load_chat_model
from scripts.merge_lora import main as merge_lora
from tests.tiny import SHORT, command, furnish, journal, refused, train, weights_hash

LORA = dict(finetune_from_ckp_file="base", lora_rank=4, dropout=0.1, lora_dropout=0.1, learn_rate=5e-3)
IDS = torch.tensor([[5, 9, 20, 31, 1]])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a trained base and an adapter that was trained on it."""
    home = furnish(tmp_path_factory.mktemp("adapters"))
    answers = dict(max_new_tokens=99, no_repeat_ngram_size=7)
    for options in (dict(output_dir="base", **SHORT), dict(output_dir="calm", **LORA | answers)):
        done = train(home, **options)
        assert done.codes == [0], done.text
    return home


def logits_of(stock):
    with torch.no_grad():
        return stock.eval()(input_ids=IDS, decoder_input_ids=IDS).logits


def test_an_adapter_learns_and_checkpoints_hold_nothing_but_it(home):
    evals, start = journal(home / "calm", "eval"), journal(home / "calm", "start")[0]
    assert evals[-1]["loss"] < evals[0]["loss"] and start["optimizer"] == "adamw"
    for path in (home / "calm" / "checkpoints").glob("step_*/*.safetensors"):
        assert all(".lora_" in name for name in load_file(path))


def test_promise_3_an_adapter_killed_and_resumed_in_a_moved_directory_is_the_same_also_with_an_average(home):
    done = train(home, 1, "update:0:4:kill", output_dir="killed", average=0.2, **LORA)
    assert done.codes != [0]
    shutil.move(home / "killed", home / "moved")
    done = command(home, "train", "--output_dir=moved", "--is_keep_training=True")
    assert done.codes == [0], done.text
    assert weights_hash(home / "moved") == weights_hash(home / "calm")
    newest = home / "moved" / "checkpoints" / (home / "moved" / "checkpoints" / "LATEST").read_text()
    best = load_file(home / "moved" / "best" / "adapter_model.safetensors")
    is_average = journal(home / "moved", "eval")[-1]["averaged"]
    weights = load_file(newest / ("average.safetensors" if is_average else "model.safetensors"))
    assert {name.split("base_model.model.")[-1]: t.tolist() for name, t in best.items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


def test_promise_5_out_of_memory_leaves_no_trace_in_an_adapter(home):
    for name, fault in (("oom1", "backward_first:0:3:oom"), ("oom2", "update:0:5:oom")):
        done = train(home, 1, fault, output_dir=name, **LORA)
        assert done.codes == [0], done.text
        assert b'"kind":"oom"' in (home / name / "metrics.jsonl").read_bytes()
        assert weights_hash(home / name) == weights_hash(home / "calm")


def test_an_adapter_on_matrices_in_four_bits_killed_and_resumed_is_the_same_on_any_number_of_ranks(home):
    packed = LORA | SHORT | dict(base_precision="nf4")
    losses = []
    for world, name in ((1, "packed1"), (2, "packed2")):
        done = train(home, world, output_dir=name, **packed)
        assert done.codes == [0] * world, done.text
        adapter = r"fine-tuned from base; trained is an adapter of rank 4 with 2\.\d K weights, .*matrices in NF4$"
        assert re.search(adapter, done.text, re.MULTILINE), done.text
        losses.append([line["loss"] for line in journal(home / name, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    plain = [line["loss"] for line in journal(home / "calm", "train")][: len(losses[0])]
    assert losses[0] != plain and losses[0] == pytest.approx(plain, rel=0.02)
    train(home, 1, "update:0:4:kill", output_dir="packed_killed", **packed | dict(save_steps=1))
    done = command(home, "train", "--output_dir=packed_killed", "--is_keep_training=True")
    assert done.codes == [0], done.text
    assert weights_hash(home / "packed_killed") == weights_hash(home / "packed1")
    done = command(home, "train", "--output_dir=packed_killed", "--is_keep_training=True", "--base_precision=auto")
    assert refused(done, "was started with base_precision=nf4")


def test_the_snippet_of_an_adapter_s_card_answers(home, monkeypatch, capsys):
    card = ModelCard.load(home / "calm" / "best" / "README.md")
    assert card.data.library_name == "peft" and "LoRA of rank 4 on base" in card.text
    monkeypatch.chdir(home / "calm" / "best")
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL).group(1), {})
    assert capsys.readouterr().out.endswith("\n")


def test_the_exports_load_in_peft_and_merge_into_an_ordinary_directory(home, capsys):
    base = AutoModelForSeq2SeqLM.from_pretrained(home / "base" / "best")
    adapted = peft.PeftModel.from_pretrained(base, home / "calm" / "best")
    theirs = logits_of(adapted)
    assert (theirs - logits_of(AutoModelForSeq2SeqLM.from_pretrained(home / "base" / "best"))).abs().max() > 1e-3
    assert merge_lora([str(home / "calm"), str(home / "merged")]) == 0
    assert (logits_of(AutoModelForSeq2SeqLM.from_pretrained(home / "merged")) - theirs).abs().max() <= 1e-4
    assert {path.name for path in (home / "calm" / "best").iterdir()} >= {"tokenizer.json", "generation_config.json"}
    assert merge_lora([str(home / "calm"), str(home / "merged")]) == 2
    assert merge_lora([str(home / "base"), str(home / "elsewhere")]) == 2
    assert "exists already" in (text := capsys.readouterr().err) and "no adapter in" in text
    assert merge_lora([str(home / "nope"), str(home / "elsewhere")]) == 2
    assert f"{home / 'nope'}: no such folder" in capsys.readouterr().err


def test_chat_and_test_take_an_adapter(home):
    answering = load_chat_model(home / "calm", "cpu")
    assert len(answer_all(answering, [[5, 9, 1]], GREEDY, 4)) == 1
    assert (answering.sampling, answering.max_new_tokens) == (Sampling(no_repeat_ngram_size=7), 99)
    merged = answering.model
    plain = load_chat_model(home / "base", "cpu").model
    assert not torch.equal(merged.encoder.block[0].layer[0].SelfAttention.q.weight,
                           plain.encoder.block[0].layer[0].SelfAttention.q.weight)  # fmt: skip
    assert torch.equal(merged.shared.weight, plain.shared.weight)
    done = command(home, "test", "--output_dir=calm")
    assert done.codes == [0], done.text
    best = min(line["loss"] for line in journal(home / "calm", "eval"))
    assert f"test calm/best: loss {best:.4f}" in done.text


def made_by_peft(home, name, **options):
    """A directory in which PEFT saved an adapter on home's base, with a B that is not zero; and its logits."""
    base = AutoModelForSeq2SeqLM.from_pretrained(home / "base" / "best")
    settings = dict(r=4, lora_alpha=8, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**settings | options))
    adapted.save_pretrained(home / name)
    return logits_of(adapted)


@pytest.mark.parametrize("options", [{}, dict(use_rslora=True, layers_to_transform=[0], layers_pattern="block")])
def test_an_adapter_made_by_peft_goes_on_here(home, options):
    name = "_".join(["peft", *options])
    theirs = made_by_peft(home, name, **options)
    assert merge_lora([str(home / name), str(home / f"{name}_merged")]) == 0
    assert (logits_of(AutoModelForSeq2SeqLM.from_pretrained(home / f"{name}_merged")) - theirs).abs().max() <= 1e-4
    given = LORA | SHORT | dict(finetune_from_ckp_file=name)
    done = train(home, output_dir=f"{name}_on", **given)
    assert done.codes == [0], done.text
    before, after = (load_file(home / path / "adapter_model.safetensors") for path in (name, f"{name}_on/last"))
    assert before.keys() == after.keys() and not any(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((home / f"{name}_on" / "last" / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"]) == (8, bool(options))
    assert refused(train(home, output_dir="other", **given | dict(lora_rank=8)), "--lora_rank=4", "merge_lora.py")


@pytest.mark.parametrize("initialiser", [True, "gaussian", "orthogonal"])
def test_an_initialiser_that_leaves_the_base_alone_merges_into_peft_s_model(home, initialiser):
    name = f"drawn_{initialiser}"
    theirs = made_by_peft(home, name, init_lora_weights=initialiser)
    assert merge_lora([str(home / name), str(home / f"{name}_merged")]) == 0
    assert (logits_of(AutoModelForSeq2SeqLM.from_pretrained(home / f"{name}_merged")) - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(use_dora=True), "use_dora=True"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the base"),
        (dict(init_lora_weights="olora"), "init_lora_weights='olora', which changes the base"),
    ],
)
def test_what_an_adapter_made_by_peft_has_and_is_not_computed_here_is_refused(home, options, words, capsys):
    made_by_peft(home, "odd", **options)
    assert merge_lora([str(home / "odd"), str(home / "odd_merged")]) == 2
    assert words in capsys.readouterr().err and not (home / "odd_merged").exists()
    given = LORA | SHORT | dict(finetune_from_ckp_file="odd", output_dir="odd_on")
    assert "use_dora" not in words or refused(train(home, **given), words)


def test_a_field_that_is_not_known_is_refused_by_name_unless_it_is_empty(home, capsys):
    made_by_peft(home, "unknown")
    path = home / "unknown" / "adapter_config.json"
    values = json.loads(path.read_text())
    for number, empty in enumerate((None, False, {}, "")):
        path.write_text(json.dumps(values | dict(use_next_idea=empty)))
        assert merge_lora([str(home / "unknown"), str(home / f"unknown_{number}")]) == 0
    path.write_text(json.dumps(values | dict(use_next_idea=dict(x=1))))
    assert merge_lora([str(home / "unknown"), str(home / "unknown_merged")]) == 2
    assert "use_next_idea={'x': 1}: this field is not known here" in capsys.readouterr().err


def test_a_missing_or_changed_base_is_refused_by_name_and_a_moved_one_is_found_again(home):
    shutil.copytree(home / "base" / "best", home / "mine")
    given = LORA | SHORT | dict(finetune_from_ckp_file="mine", output_dir="on_mine")
    assert train(home, 1, "forward:0:2:int", **given).codes == [0]
    shutil.move(home / "mine", home / "theirs")
    again = "train", "--output_dir=on_mine", "--is_keep_training=True"
    assert refused(command(home, *again), "mine, and no model is there", "--finetune_from_ckp_file=DIR")
    shutil.copytree(home / "theirs", home / "mine")
    tensors = load_file(home / "mine" / "model.safetensors")
    tensors["shared.weight"].zero_()
    save_file(tensors, home / "mine" / "model.safetensors", dict(format="pt"))
    assert refused(command(home, *again), "mine has changed", "--finetune_from_ckp_file=DIR")
    done = command(home, *again, "--finetune_from_ckp_file=theirs")
    assert done.codes == [0], done.text


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(lora_rank=4), "and none is typed: type --finetune_from_ckp_file=DIR"),
        (dict(lora_rank=4, finetune_from_ckp_file="base/pretrain"), "base/pretrain holds none: type"),
        (dict(lora_rank=4, finetune_from_ckp_file="Qwen/Qwen0-7B"), "hf download Qwen/Qwen0-7B --local-dir"),
        (LORA | dict(lora_targets="q_proj"), "--lora_targets=q_proj: this network has no such linear layer"),
        (LORA | dict(lora_rank=0), "lora_dropout=0.1: belongs to an adapter"),
        (LORA | dict(trainable="decoder"), "leave --trainable out"),
        (LORA | dict(learn_rate=0.3), "adamw takes 1e-05 to 0.05"),
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(home, options, words):
    assert refused(train(home, output_dir="refused", **SHORT | options), words)
