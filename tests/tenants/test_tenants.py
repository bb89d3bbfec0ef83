"""Other families, Qwen and one for tests, and other objectives go through the same loop, with the same promises."""

import json
import os
import shutil
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from model.data.sequences import Sequences
from model.generate.engine import Limits, generate
from model.nn.base import Packing
from model.nn.registry import FAMILIES, family_named
from tests.parts import gradients_of
from tests.tenants.causal import CAUSAL, CausalConfig, CausalModel, collate
from tests.tiny import journal, start, wait_for, weights_hash, words
from train_low_mem import main

CONFIG = CausalConfig(vocab_size=60)


def main_with_tenants(line):
    """`main`, in a process that knows the tenants."""
    FAMILIES[CAUSAL.name] = CAUSAL
    return main(line)


@pytest.fixture(scope="module")
def tenants_home(home):
    (home / "causal.json").write_text(json.dumps(dict(family="causal")))
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    (home / "qwen.json").write_text(json.dumps(dict(family="qwen3", num_key_value_heads=2, **sizes)))
    for name in ("train", "valid"):
        rows = [json.loads(line) for line in (home / f"{name}.jsonl").read_text().splitlines()]
        lines = [dict(prompt=row["prompt"], chosen="今天天气", rejected=row["response"]) for row in rows]
        (home / f"{name}_preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


PREFERENCES = dict(
    train_file="train_preferences.jsonl", validation_file="valid_preferences.jsonl", sft_weight=0, any_learn_rate=True,
    best_metric="accuracy",
)  # fmt: skip
TENANTS = dict(
    qwen=dict(model="qwen.json"),
    dpo=dict(objective="dpo", **PREFERENCES),
    simpo=dict(objective="simpo", model="qwen.json", **PREFERENCES),
    both=dict(objective="dpo", model="causal.json", **PREFERENCES),
    text=dict(model="qwen.json", objective="text"),
    span=dict(objective="span"),
    mix=dict(mix="span:train.jsonl,prefix:train.jsonl*0.4,pairs:train.jsonl*0.8", train_file=None),
    dialogues=dict(model="qwen.json", mix="text:train.jsonl,prefix:train.jsonl*0.4,pairs:train.jsonl", train_file=None),
)  # fmt: skip
ON_TEXT = "text", "span"  # have no answers
OPTIONS = dict(optimizer="adamw", learn_rate=5e-3, save_steps=3, bleu_pairs=4, max_new_tokens=8)


def train(home, name, world, fault="", command="train", **changes):
    options = OPTIONS | TENANTS[name.split("_")[0]] | dict(output_dir=name) | changes
    return wait_for(start(home, world, fault, function=main_with_tenants, command=command, **options), home)


@pytest.fixture(scope="module", params=TENANTS)
def tenant(request, tenants_home):
    """(home, name of a tenant whose run on one rank has finished)."""
    done = train(tenants_home, request.param, 1)
    assert done.codes == [0], done.text
    return tenants_home, request.param


def test_a_tenant_trains_is_evaluated_and_answers(tenant):
    home, name = tenant
    evals, lines = journal(home / name, "eval"), journal(home / name, "train")
    assert len(evals) == 2 and "loss" in evals[-1] and ({"bleu", "chrf"} <= evals[-1].keys()) == (name not in ON_TEXT)
    assert np.mean([line["loss"] for line in lines[-3:]]) < lines[0]["loss"]
    if "accuracy" in evals[-1]:
        assert max(line["accuracy"] for line in evals) > 0.7
    if name in ("dpo", "both"):
        assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-4), "the policy starts as the reference"
        assert lines[0]["margin"] == pytest.approx(0, abs=1e-4)
    done = train(home, name, 1, command="test")
    assert done.codes == [0] and ("bleu" in done.text) == (name not in ON_TEXT), done.text


def test_a_tenant_has_the_same_losses_on_two_ranks(tenant):
    home, name = tenant
    done = train(home, f"{name}_two", 2)
    assert done.codes == [0, 0], done.text
    one, two = ([line["loss"] for line in journal(home / run, "train")] for run in (name, f"{name}_two"))
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("fault", ["forward:0:5:int", "forward:0:5:kill", "backward_first:0:5:oom"])
def test_a_tenant_s_weights_are_the_same_bits_after_a_stop_a_kill_and_an_out_of_memory(tenant, fault):
    home, name = tenant
    run = f"{name}_{fault.rpartition(':')[2]}"
    done = train(home, run, 1, fault)
    if "kill" in fault:  # the derived columns are computed again from the weights at the start
        for folder in (home / "model_save" / "tokens").glob("*/derived_*"):
            shutil.rmtree(folder)
    if "oom" not in fault:
        done = train(home, run, 1, is_keep_training="auto")
    else:
        assert [line["where"] for line in journal(home / run, "oom")] == ["step"]
    assert done.codes == [0], done.text
    assert weights_hash(home / run) == weights_hash(home / name)


def test_a_tenant_is_planned(tenant, capsys, monkeypatch):
    home, name = tenant
    monkeypatch.chdir(home)
    options = OPTIONS | TENANTS[name] | dict(gpu_memory_limit_gb=1, json=True)
    monkeypatch.setitem(FAMILIES, "causal", CAUSAL)
    assert main(words("plan", **options)) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] and values["lengths"]["source"].startswith("counted")


def test_a_run_of_another_objective_is_refused(tenants_home):
    train(tenants_home, "dpo_first", 1, epochs=1)
    others = dict(objective="orpo", is_keep_training=True)
    done = train(tenants_home, "dpo_first", 1, **others)
    assert done.codes == [2] and "was written with objective dpo, now orpo" in done.text, done.text


@pytest.mark.parametrize("kind", ["text", "span"])
def test_a_network_learns_text_and_then_pairs(tenants_home, kind):
    """From scratch on plain text, then fine-tuned on pairs; what a resumed run must not change is refused."""
    long = dict(epochs=8, save_steps=100, train_file="train.jsonl,valid.jsonl")
    learnt = train(tenants_home, f"{kind}_first", 1, **long)
    assert learnt.codes == [0] and " chunks of 54 texts; " in learnt.text, learnt.text
    done = train(tenants_home, f"{kind}_first", 1, is_keep_training=True, **long | dict(objective="prefix"))
    assert done.codes == [2] and f"was written with objective {kind}" in done.text, done.text
    scratch, losses = dict(model=TENANTS[kind].get("model", "shape.json")), []
    for number, source in enumerate((dict(model=None, finetune_from_ckp_file=f"{kind}_first/last"), scratch)):
        options = OPTIONS | source | dict(output_dir=f"{kind}_then_{number}")
        done = wait_for(start(tenants_home, function=main_with_tenants, **options), tenants_home)
        assert done.codes == [0], done.text
        losses.append(journal(tenants_home / f"{kind}_then_{number}", "eval")[-1]["loss"])
    assert losses[0] < losses[1], "what it read helps it with the pairs"


def test_an_unknown_objective_is_refused_before_a_run_begins(tenants_home):
    done = train(tenants_home, "qwen_unknown", 2, objective="denoise")
    assert done.codes == [2, 2] and "--objective=denoise: choose one of" in done.text, done.text
    assert "a new run" not in done.text


@pytest.mark.parametrize(
    "places, changes, reason",
    [
        (63, dict(), "a sequence has 64 tokens, and the network has places for 63: lower --max_seq_len"),
        (64, dict(max_new_tokens=33), "a question has 32 tokens and its answer up to --max_new_tokens=33"),
        (64, dict(max_new_tokens=33, bleu_pairs=0), ""),
        (40, TENANTS["both"] | dict(max_seq_len=20, bleu_pairs=0), ""),  # the two sequences of a row have more together
    ],
)
def test_what_is_longer_than_the_network_has_places_for_is_refused_before_the_first_step(
    tenants_home, places, changes, reason
):
    (tenants_home / "places.json").write_text(json.dumps(dict(family="causal", places=places)))
    name = f"qwen_places_{places}_{len(changes)}"
    done = train(tenants_home, name, 1, epochs=1, **changes | dict(model="places.json"))
    assert done.codes == [2 if reason else 0] and reason in done.text, done.text
    assert (tenants_home / name / "metrics.jsonl").exists() != bool(reason)


def main_where_rank_1_refuses_a_batch(line):
    """`main`; rank 1 alone meets a ValueError, when it makes its sixth batch."""
    calls = count()

    def refuse(sequences, packing):
        return family_named("nobody") if next(calls) == 5 and os.environ["RANK"] == "1" else collate(sequences, packing)

    FAMILIES[CAUSAL.name] = replace(CAUSAL, collate=refuse)
    return main(line)


def test_the_other_ranks_say_why_one_of_them_has_ended(tenants_home):
    options = OPTIONS | dict(model="causal.json", output_dir="one_refuses")
    done = wait_for(start(tenants_home, 2, function=main_where_rank_1_refuses_a_batch, **options), tenants_home)
    assert done.codes == [1, 2] and "rank 0: rank 1 ended: the family 'nobody' is not known" in done.text, done.text
    assert "Traceback" not in done.text and "frame #" not in done.text, done.text


def batch(lengths, seed=0):
    draw = np.random.default_rng(seed)
    columns = tuple(draw.integers(3, 60, sum(column)) for column in zip(*lengths, strict=True))
    return Sequences(columns, np.array(lengths), ids=np.arange(len(lengths)))


@pytest.mark.parametrize("dropout, checkpointing", [(0.0, 0), (0.3, 0), (0.3, 2)])
def test_packed_sequences_in_one_stream_have_the_gradient_of_each_alone(dropout, checkpointing):
    model, lengths = CausalModel(CONFIG, dropout).initialise(0), [(3, 5), (7, 2), (1, 9)]
    packing, whole = Packing(0, dropout=dropout > 0), batch(lengths)
    model.key_dropout(1, 2)
    model(collate(whole, packing)).backward()
    together = gradients_of(model)
    model.zero_grad()
    model.gradient_checkpointing = checkpointing
    starts = np.cumsum([(0, 0), *lengths], axis=0)
    for number, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        columns = tuple(column[a:b] for column, a, b in zip(whole.columns, first, last, strict=True))
        alone = Sequences(columns, np.array([lengths[number]]), ids=np.array([number]))
        model(collate(alone, packing)).backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, together[name], rtol=1e-4, atol=1e-6)


def test_a_tenant_with_dropout_trains_with_it_and_has_the_same_losses_on_two_ranks(tenants_home):
    first_losses = []
    for dropout, world in ((0, 1), (0.3, 1), (0.3, 2)):
        run = f"both_{dropout}_{world}"
        done = train(tenants_home, run, world, dropout=dropout, epochs=1, bleu_pairs=0)
        assert done.codes == [0] * world, done.text
        first_losses.append([line["loss"] for line in journal(tenants_home / run, "train")])
    without, one, two = first_losses
    assert two == pytest.approx(one, rel=1e-3)
    assert abs(one[0] - without[0]) > 1e-3


def test_generation_in_one_stream_follows_the_packed_network():
    model = CausalModel(CONFIG).initialise(0)
    with torch.no_grad():
        model.embedding.weight.mul_(8)
    inputs = [[5, 6, 7, 8], [9], [11, 12]]
    for own, answer in zip(inputs, generate(model, inputs, Limits(2, 4, 6, 0, -1), 6), strict=True):
        columns = (np.array(own), np.array(answer))
        stream = collate(Sequences(columns, np.array([[len(own), len(answer)]])), Packing(0))
        hidden, labels = model.hidden(stream)
        assert (hidden @ model.embedding.weight.T).argmax(1).tolist() == labels.tolist() == answer
