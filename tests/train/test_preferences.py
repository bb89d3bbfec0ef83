"""Preferences: losses and gradients against the formulas of TRL, and reading."""

import json
import threading
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.commands.objective import objectives_for
from model.data.token_store import Source, open_store
from model.memory.plan import MemoryPlan
from model.nn.base import Packing
from model.nn.decoder.family import DECODER
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.registry import family_of
from model.runtime.distributed import ALONE
from model.train import derive as deriving
from model.train.examples import Examples
from model.train.gradients import attempt_gradients
from model.train.loader import Loader
from model.train.objectives.preference_pairs import PairForm, repeated
from model.train.step import StepContext
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.parts import PLAN, farthest, gradients_of, make_config, make_model, make_pairs, schedule_of
from tests.tiny import refused, train

NUM_PAIRS = 12
KINDS = {
    "dpo": dict(objective="dpo"),
    "dpo, cautious": dict(objective="dpo", label_smoothing=0.2, sft_weight=0, beta=0.5),
    "dpo, loops": dict(objective="dpo", rejected_loops_weight=2.0),
    "dpo, mean": dict(objective="dpo", normalize_length=True, beta=1.5),
    "ipo": dict(objective="dpo", dpo_loss="ipo"),
    "orpo": dict(objective="orpo"),
    "simpo": dict(objective="simpo", gamma=0.7, label_smoothing=0.1),
}  # fmt: skip


def decoder_of(tokenizer, **options):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    model_config = DecoderModelConfig(
        **sizes, vocab_size=tokenizer.vocab_size, model_type="qwen3", initializer_range=0.2
    )
    return DecoderModel(model_config, **options).initialise(1)


@pytest.fixture(scope="module", params=["t5", "decoder"])
def parts(request, tokenizer, tmp_path_factory):
    """(function that makes a model, its tokenizer, file of preferences)."""
    folder = tmp_path_factory.mktemp(request.param)
    path, texts = folder / "rows.jsonl", [text for pair in make_pairs(2 * NUM_PAIRS) for text in pair]
    rows = [dict(prompt=p, chosen=2 * c, rejected=3 * r) for p, c, r in zip(*[iter(texts)] * 3, strict=False)][
        :NUM_PAIRS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if request.param == "t5":
        return lambda **options: make_model(tokenizer.vocab_size, **options), tokenizer, path
    qwen = make_qwen_tokenizer(folder)
    return lambda **options: decoder_of(qwen, **options), qwen, path


def open_examples(model, tokenizer, path, config):
    """Examples whose reference is a model with other weights."""
    family = family_of(model.config)
    objective = objectives_for(config, model.config, tokenizer)[config.objective]
    store = open_store(Source((path,), objective, tokenizer, 300), path.parent / "tokens")
    examples = Examples(store, objective, family, 0, dropout=model.dropout > 0)
    draw = np.random.default_rng(0)
    references = {name: draw.normal(-60, 5, len(store)).astype(np.float32) for name in objective.derived}
    return replace(examples, store=replace(store, values=references))


def trl_loss(kind, log_probs, references, tokens, config):
    """The loss of a pair, from sums of log-probabilities (2,) of the chosen and the rejected response.

    trl 0.28.0 trainer/dpo_trainer.py DPOTrainer.dpo_loss (sigmoid with label smoothing), trl 1.16.0
    trainer/dpo_trainer.py DPOTrainer._compute_loss (sigmoid, sigmoid_norm, ipo), experimental/orpo ORPOTrainer
    .odds_ratio_loss, experimental/cpo CPOTrainer.cpo_loss (simpo).
    """
    beta, smoothing = config.beta or dict(simpo=2.0).get(kind, 0.1), config.label_smoothing
    if kind == "orpo":
        chosen, rejected = log_probs / tokens
        odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        return -beta * F.logsigmoid(odds)
    if kind == "simpo":
        chosen, rejected = log_probs / tokens
        logits = chosen - rejected - config.gamma / beta
    else:
        scores = log_probs - references
        chosen, rejected = scores / tokens if config.normalize_length or config.dpo_loss == "ipo" else scores
        if config.dpo_loss == "ipo":
            return (chosen - rejected - 1 / (2 * beta)) ** 2
        logits = chosen - rejected
    return -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing


def one_by_one(model, examples, config):
    """(loss, gradients) of the step of all pairs: the formulas on the logits of a response at a time."""
    store, form = examples.store, examples.objective.form
    ids = np.arange(len(store))
    pairs, tokens = len(store), form.target_tokens(store, ids)
    model.zero_grad()
    total = 0
    for row in ids:
        sums, both = [], form.sequences(store, np.array([row]))
        targets = store.lengths[[row], 1:3].astype(int)
        if both.target_lengths is not None:
            both = repeated(both.columns[0], both.lengths[:, 0], both.columns[1], targets)
        starts = np.cumsum(np.vstack([[0, 0], both.lengths]), axis=0)
        for side in (0, 1):
            (a, c), (b, d) = starts[side], starts[side + 1]
            learnt = None if both.is_target is None else both.is_target[c:d]
            alone = replace(
                both, columns=(both.columns[0][a:b], both.columns[1][c:d]), lengths=both.lengths[side : side + 1],
                is_target=learnt,
            )  # fmt: skip
            hidden, labels = model.hidden(examples.family.collate(alone, Packing(0)))
            log_probs = (hidden @ model.output_weight.T).log_softmax(1)
            log_probs = log_probs[torch.arange(len(labels)), labels.clamp(min=0).long()][labels >= 0]
            sums.append(log_probs.sum())
        repeated_ones = repeats_in(both.columns[1][c:d].tolist(), learnt)
        unlikely = -(1 - log_probs[repeated_ones].exp()).log().sum() / len(log_probs)
        names = examples.objective.derived
        references = torch.tensor([float(store.values[name][row]) for name in names] or [0.0, 0.0])
        kind = config.objective
        loss = trl_loss(kind, torch.stack(sums), references, torch.tensor(tokens[row]), config) / pairs
        loss = loss + config.rejected_loops_weight * unlikely / pairs
        loss = loss - config.sft_weight * sums[0] / tokens[:, 0].sum()
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def repeats_in(ids, learnt):
    """Numbers, among the learnt ids, of those that end four ids which stand earlier in the list."""
    is_learnt = [True] * len(ids) if learnt is None else learnt.tolist()
    known, places = set(), np.cumsum(is_learnt) - 1
    found = []
    for stop in range(4, len(ids) + 1):
        run = tuple(ids[stop - 4 : stop])
        found += [int(places[stop - 1])] * (run in known and is_learnt[stop - 1])
        known.add(run)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_cut_in_micro_batches_and_dealt_to_two_ranks_has_loss_and_gradient_of_trl_s_formula(parts, kind):
    make, tokenizer, path = parts
    model, config = make(), make_config(**KINDS[kind])
    examples = open_examples(model, tokenizer, path, config)
    assert len(examples) == NUM_PAIRS
    loss, expected = one_by_one(model, examples, config)
    third = int(examples.bounds.sum()) // 3
    for world, micro_batch_tokens in ((1, third), (1, 10**6), (2, third)):
        total, sums, count = None, 0, 0
        for rank in range(world):
            ranks = replace(ALONE, rank=rank, world_size=world)
            loader = Loader(ranks, examples, schedule_of(config, NUM_PAIRS, NUM_PAIRS))
            plan = MemoryPlan(micro_batch_tokens, 32, 0, 0)
            attempt = attempt_gradients(StepContext(ranks, model, None, loader, config), plan, loader.work_at(0, 0))
            found, count = gradients_of(model), count + attempt.micro_batches
            total = found if total is None else {name: total[name] + found[name] for name in found}
            sums = sums + model.flat.sums[: len(examples.objective.metrics)].clone()
        assert (count > world) == (micro_batch_tokens < 10**6)
        assert farthest(total, expected) < 1e-5
        assert float(sums[0] + sums[-1]) == pytest.approx(loss, rel=1e-5)
        assert float(sums[2]) == pytest.approx(float(sums[3] - sums[4]), abs=1e-4)
        for place, name in enumerate(examples.objective.derived, start=7):
            targets = examples.objective.form.target_tokens(examples.store, np.arange(NUM_PAIRS))[:, place - 7].sum()
            moved = float(sums[place - 2]) - float(examples.store.values[name].sum() / targets)
            assert examples.objective.metrics[place].endswith("_log_ratio"), "log-probability less the reference's"
            assert float(sums[place]) == pytest.approx(moved, abs=1e-4)


def test_dropout_draws_one_mask_for_a_source_and_one_for_each_target_however_a_step_is_cut(parts):
    make, tokenizer, path = parts
    model, config = make(dropout=0.0 if family_of(make().config) is DECODER else 0.2), make_config(objective="orpo")
    examples = open_examples(model, tokenizer, path, config)
    loader, found = Loader(ALONE, examples, schedule_of(config, NUM_PAIRS, NUM_PAIRS)), []
    for micro_batch_tokens in (int(examples.bounds.sum()) // 3, 10**6):
        plan = MemoryPlan(micro_batch_tokens, 32, 0, 0)
        attempt_gradients(StepContext(ALONE, model, None, loader, config), plan, loader.work_at(0, 0))
        found.append(gradients_of(model))
    assert farthest(*found) < 1e-5
    assert examples.sequences(np.array([4, 0]), 1).ids.tolist() == [8, 9, 0, 1]


def test_a_t5_s_source_is_read_once_for_both_responses(tokenizer):
    lengths = np.array([[3, 4, 2], [5, 1, 6]])
    forms = [PairForm(shares_source=shares).network_lengths(lengths).tolist() for shares in (True, False)]
    assert forms == [[[3, 6], [5, 7]], [[6, 6], [10, 7]]]


@pytest.mark.parametrize("messages", [False, True])
def test_responses_as_texts_and_as_messages_give_the_same_ids(parts, messages, tmp_path):
    make, tokenizer, _ = parts
    model, config = make(), make_config(objective="dpo")
    objective = objectives_for(config, model.config, tokenizer)["dpo"]
    user, good, bad = ([dict(role=role, content=text)] for role, text in
                       (("user", "天气好吗"), ("assistant", "很好"), ("assistant", "不知道")))  # fmt: skip
    rows = [dict(prompt="天气好吗", chosen="很好", rejected="不知道", response="别的")]
    if messages:
        rows = [dict(prompt=user, chosen=good, rejected=bad), dict(chosen=user + good, rejected=user + bad)]
        rows += [dict(conversations=user, chosen=good[0], rejected=bad[0]), dict(messages=user + good, rejected=bad)]
    unusable = [dict(prompt="天气", chosen="很好", rejected=text) for text in ("", "很好")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + unusable))
    store = open_store(Source((path,), objective, tokenizer, 64), tmp_path / "tokens")
    assert "rows without a rejected response (1 row), rows with two equal responses (1 row)" in store.meta["ignored"]
    texts = {tuple(map(tokenizer.backend.decode, (column.tolist() for column in store.tokens(np.array([row]))[:3])))
             for row in range(len(store))}  # fmt: skip
    assert len(store) == len(rows) and len(texts) == 1
    _, chosen, rejected = texts.pop()
    assert "很好" in chosen and "不知道" in rejected
    inputs, references = objective.questions(store, np.arange(len(store)))
    assert len(inputs) == len(references) == len(rows)


def test_only_the_assistant_s_turns_of_a_response_are_learnt_and_a_thought_is_part_of_it(tmp_path):
    tokenizer = make_qwen_tokenizer(tmp_path)
    model = decoder_of(tokenizer)
    objective = objectives_for(make_config(objective="dpo"), model.config, tokenizer)["dpo"]
    user, more = dict(role="user", content="问"), dict(role="user", content="再问")
    answers = [dict(role="assistant", content=text) for text in ("甲", "乙", "丙")]
    rows = [
        dict(prompt=[user], chosen=[answers[0], more, answers[1]], rejected=[answers[2]]),
        dict(prompt=[user], chosen=[answers[0]], rejected=[answers[2] | dict(reasoning_content="想")]),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = open_store(Source((path,), objective, tokenizer, 200), tmp_path / "tokens")
    for row in range(2):
        both = objective.sequences(store_with_zeros(store, objective), np.array([row]), 0, 1)
        learnt = tokenizer.backend.decode(both.columns[1][both.is_target].tolist(), skip_special_tokens=False)
        assert all(text in learnt for text in ("甲", "丙")) and "再问" not in learnt, learnt
        assert both.is_target.sum() == objective.form.target_tokens(store, np.array([row])).sum()
    assert store.lengths[0, 3] == 3, "an answer, what is not learnt, an answer"


def store_with_zeros(store, objective):
    return replace(store, values={name: np.zeros(len(store), np.float32) for name in objective.derived})


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(beta=0.3), "--beta=0.3: the objective dpo or orpo or simpo uses it"),
        (dict(objective="dpo", gamma=0.3), "--gamma=0.3: the objective simpo uses it"),
        (dict(objective="dpo", z_loss=1e-4), "--z_loss=0.0001: the objective pairs or text"),
        (dict(objective="orpo", label_smoothing=0.1), "it is the share that is wrong"),
        (dict(objective="simpo", label_smoothing=0.5), "below 0.5"),
        (dict(objective="orpo", learn_rate=0.05), "adamw takes 1e-08 to 0.001"),
        (dict(best_metric="accuracy"), "--best_metric=accuracy: pairs prefers no response to another"),
        (dict(objective="dpo", train_file="kto.jsonl"), "none of its 4 rows has a prompt with a chosen and a rejected"),
    ],
)
def test_what_does_not_go_with_preferences_is_refused(home, options, words):
    kto = [dict(prompt="问", completion="答", label=bool(number % 2)) for number in range(4)]
    (home / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kto))
    assert refused(train(home, output_dir="refused", **dict(optimizer="adamw") | options), words)


def test_the_default_rate_is_the_objective_s():
    rates = [make_config(objective=name, finetune_from_ckp_file="base", lora_rank=4).learn_rate
             for name in ("pairs", "orpo", "dpo", "simpo")]  # fmt: skip
    assert rates == pytest.approx([1e-3, 2e-4, 5e-5, 5e-5])


def test_of_two_runs_that_need_one_reference_the_second_waits_and_computes_nothing(parts):
    make, tokenizer, path = parts
    model, done = make(), []
    examples = open_examples(model, tokenizer, path, make_config(objective="dpo"))
    folder = deriving.derived_directory(examples, "weights")
    arguments = ALONE, model, examples, PLAN, "weights"
    second = threading.Thread(target=deriving.derive, args=(*arguments, done.append))
    with ExitStack() as held:
        deriving._hold_lock(ALONE, folder, held)
        second.start()
        second.join(0.5)
        assert second.is_alive() and not folder.with_suffix(".part").exists()
        deriving._derive(ALONE, model, deriving.with_zeros(examples), PLAN, folder, lambda rows: None)
    second.join(30)
    assert not done and not folder.with_suffix(".part").exists()
    values = deriving.with_derived(examples, "weights").store.values["reference_chosen"]
    assert np.isfinite(values).all()
