"""Options that people of other trainers expect, through real runs: length, data, evaluation, prefix, early end."""

import json
import math
import re
from collections import Counter
from itertools import product

import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from model.data.token_store import read_store
from model.display.catalogue import CATALOGUE
from model.generate.sampling import Sampling
from model.run.train_state import state_of
from model.serve.answering import load_chat_model, prompt_ids
from tests.data.files import read_pairs
from tests.english import english_of
from tests.tiny import NUM_PAIRS, journal, refused, train, weights_hash

LONG = dict(save_steps=1000, logging_steps=2)


def test_max_steps_ends_a_run_within_an_epoch_and_a_resume_ends_at_the_same_weights(home):
    options = dict(max_steps=7, epochs=None, warmup_steps=None, warmup_ratio=0.25, **LONG)
    done = train(home, output_dir="seven", reduce_dtype="bf16", gpu_memory_limit_gb=16, **options)
    assert done.codes == [0], done.text
    assert "length: 7 steps of 8 pairs, 1.182 epochs of 44 pairs" in done.text
    assert re.search(r"; about \S+ for 7 steps$", done.text, re.MULTILINE), done.text
    for unused in ("--reduce_dtype=bf16 has no effect: one", "--gpu_memory_limit_gb=16 has no effect: there"):
        assert done.text.count(unused) == 1 and "sent in bf16" not in done.text
    assert "finished at step 7, 52 pairs seen" in done.text
    part = r" \d.*s \(\d+ %\)"
    spent = f"s in all: start-up{part}, steps{part}, evaluation{part}, saves{part}, rest{part}$"
    assert re.search(spent, done.text, re.MULTILINE), done.text
    assert train(home, 1, "forward:0:3:int", output_dir="resumed_seven", **options).codes == [0]
    again = train(home, output_dir="resumed_seven", is_keep_training=True, **options)
    assert again.codes == [0], again.text
    assert "has no effect" not in again.text and " for 4 steps\n" in again.text, again.text
    assert weights_hash(home / "seven") == weights_hash(home / "resumed_seven")
    more = train(home, output_dir="seven", is_keep_training=True, **options)
    assert "7 steps done, 7 asked for; raise --max_steps" in more.text
    assert refused(train(home, output_dir="both", max_steps=7), "--max_steps=7 and --epochs=2: give only one")


def test_a_run_of_many_passes_by_max_steps_gets_the_dropout_that_one_by_epochs_gets(home):
    options = dict(dropout=-1, global_batch_size=NUM_PAIRS, warmup_steps=None, validation_file="", **LONG)
    runs = dict(by_steps=dict(max_steps=4, epochs=None), by_epochs=dict(epochs=4))
    for name, length in runs.items():
        done = train(home, output_dir=name, **options | length)
        assert done.codes == [0], done.text
        assert "dropout: 0.1" in done.text, done.text
    assert weights_hash(home / "by_steps") == weights_hash(home / "by_epochs")


def test_weights_say_how_often_a_row_comes_and_a_resume_keeps_them(home):
    options = dict(train_file="train.jsonl*2,valid.jsonl:0.5", **LONG)
    done = train(home, 1, "forward:0:5:int", output_dir="mixed", **options)
    assert done.codes == [0], done.text
    other = train(
        home, output_dir="mixed", is_keep_training=True, **options | dict(train_file="train.jsonl,valid.jsonl")
    )
    assert refused(other, "weights of the training files", "88/44 5/10")
    done = train(home, output_dir="mixed", is_keep_training=True, **options)
    assert done.codes == [0], done.text
    counts = {1: Counter(), 2: Counter()}
    for line in map(json.loads, (home / "mixed" / "samples_rank0.jsonl").read_text().splitlines()):
        counts[line["epoch"]].update(line["ids"])
    for epoch in (1, 2):
        assert [counts[epoch][row] for row in range(NUM_PAIRS)] == [2] * NUM_PAIRS
    assert [counts[1][row] + counts[2][row] for row in range(NUM_PAIRS, NUM_PAIRS + 10)] == [1] * 10
    assert journal(home / "mixed", "start")[0]["epoch_pairs"] == 2 * NUM_PAIRS + 5
    assert "train.jsonl*2, valid.jsonl*0.5" in done.text


CHOICES = dict(law=5, logic=4)  # questions of each subject


def write_choices(folder):
    """Write C-Eval's files of the subjects of CHOICES to val/ and dev/ of `folder`."""
    for part, name in product(("val", "dev"), CHOICES):
        (folder / part).mkdir(parents=True, exist_ok=True)
        rows = [f"{place},问{place}天气,甲,乙,丙,丁,{'ABCD'[place % 4]}" for place in range(CHOICES[name])]
        text = "\n".join(["id,question,A,B,C,D,answer", *rows])
        (folder / part / f"{name}_{part}.csv").write_text(text + "\n", encoding="utf-8")


def test_a_run_without_validation_has_no_best_and_is_tested_on_last(home):
    options = dict(validation_file="", epochs=1, **LONG)
    done = train(home, output_dir="unseen", **options)
    assert done.codes == [0], done.text
    assert "nothing is evaluated" in done.text and "scripts/chat.py unseen/last" in done.text
    assert not (home / "unseen" / "best").exists() and not journal(home / "unseen", "eval")
    assert "unseen is finished" in train(home, output_dir="unseen", is_keep_training=True, **options).text
    asked = dict(command="test", output_dir="unseen", validation_file=None, test_file="valid.jsonl")
    tested = train(home, env=dict(CHAT_LANG="zh"), **asked)
    said = re.search("测试 unseen/last：(损失 .*)", tested.text)[1]
    assert "每字损失" in said and not re.search("[a-z]+_[a-z]+", said), said
    write_choices(home / "choices")
    asked = dict(command="test", output_dir="unseen", validation_file=None, num_shots=1)
    tested = train(home, world=2, choices_file="choices/val", **asked)
    assert "test law: " in tested.text and "test logic: " in tested.text, tested.text
    right = sum(float(share) * count / 100 for share, count in (
        (re.search(rf"test {name}: ([\d.]+) % of", tested.text)[1], count) for name, count in CHOICES.items()
    ))  # fmt: skip
    assert f"accuracy {100 * right / sum(CHOICES.values()):.1f} % of 9 questions" in tested.text
    assert refused(train(home, choices_file="choices/val", test_file="valid.jsonl", **asked), "give only one of them")
    assert refused(train(home, output_dir="unseen2", validation_file="", early_stop=2, eval_steps=3),
                   "early_stop=2: validation_file is empty", "eval_steps=3")  # fmt: skip


def test_early_stop_warns_then_ends_the_run_also_across_a_resume(home):
    """The rate makes each epoch after the first ones worse."""
    options = dict(
        epochs=40, learn_rate=0.1, warmup_steps=0, patience=2, early_stop=3, logging_steps=3, save_steps=1000
    )
    done = train(home, output_dir="early", **options)
    assert done.codes == [0], done.text
    (stop,), lines = journal(home / "early", "stop"), journal(home / "early", "eval")
    assert (stop["reason"], stop["early"]) == ("finished", True) and len(lines) < 40
    assert [line["evaluations_since_best"] for line in lines[-4:]] == [0, 1, 2, 3]
    trained = [
        line for line in journal(home / "early", "train") if lines[-2]["step"] < line["step"] <= lines[-1]["step"]
    ]
    mean = sum(t["loss"] * t["target_tokens"] for t in trained) / sum(t["target_tokens"] for t in trained)
    assert math.isclose(lines[-1]["overfit_gap"], lines[-1]["loss"] - mean, rel_tol=1e-4)
    for text in ("for 2 evaluations, the best was", "--dropout=0.1", "as --early_stop=3 says", "early_stop ended it"):
        assert text in done.text
    assert (home / "early" / "best").exists() and (home / "early" / "last").exists()
    fault = f"forward:0:{lines[-2]['step'] + 2}:int"
    assert train(home, 1, fault, output_dir="early2", **options).codes == [0]
    assert train(home, output_dir="early2", is_keep_training=True, **options).codes == [0]
    assert journal(home / "early2", "stop")[-1]["step"] == stop["step"]
    again = train(home, output_dir="early", is_keep_training=True, env=dict(CHAT_LANG="zh"), **options)
    assert "early 已经完成：连续 3 次评估没有更好的模型；" in again.text and not english_of(again.text)


PREFIX = "的一 是："
PREFIXED = dict(
    output_dir="prefixed", epochs=3, prompt_prefix=PREFIX, best_metric="chrf", bleu_pairs=4, max_new_tokens=6,
    no_repeat_ngram_size=3, **LONG,
)  # fmt: skip


@pytest.fixture(scope="module")
def prefixed(home):
    """The directory and the text, in Chinese, of a run with a prefix whose evaluations generate answers."""
    done = train(home, env=dict(CHAT_LANG="zh"), **PREFIXED)
    assert done.codes == [0], done.text
    return home / "prefixed", done.text


def test_a_prefix_is_in_training_and_in_the_exported_model(home, prefixed):
    run_dir, text = prefixed
    question = next(read_pairs(home / "train.jsonl"))[0]
    chat = load_chat_model(run_dir, "cpu")
    ids = prompt_ids(chat, [("user", question)], 64)
    assert ids == [*chat.tokenizer.encode(PREFIX + question), chat.tokenizer.eos_id]
    stores = [read_store(path.parent) for path in home.glob("model_save/tokens/*/meta.json")]
    trained_on = ids if len(ids) <= 32 else [*ids[:31], ids[-1]]  # max_seq_len
    assert any(store.tokens(np.array([0]))[0].tolist() == trained_on for store in stores)
    turns = [("system", "天"), ("user", question), ("assistant", "好"), ("user", "人")]
    template = AutoTokenizer.from_pretrained(run_dir / "best").apply_chat_template
    messages = [dict(role=role, content=text) for role, text in turns]
    assert template(messages, tokenize=True, return_dict=False) == prompt_ids(chat, turns, 256)
    changed = train(home, is_keep_training=True, **PREFIXED | dict(prompt_prefix="别的"))
    assert refused(changed, f"has trained with prompt_prefix={PREFIX}")
    for key in ("first.tokenizer", "first.random", "next.chat"):  # the words before the first value
        assert CATALOGUE["zh"][key].split("{")[0] in text
    assert "plots/" not in text, "plots=False draws none"


@pytest.mark.parametrize("kind", ["best", "last"])
def test_an_export_says_how_the_run_answers_and_is_loaded_with_it(prefixed, kind):
    directory = prefixed[0] / kind
    typed = {name: PREFIXED[name] for name in ("no_repeat_ngram_size", "max_new_tokens")} | dict(prefix=PREFIX)
    said = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    assert said.items() >= (typed | dict(do_sample=False, repetition_penalty=1.0)).items()
    assert said["chat_trainer"] == dict(single_turn=True), "no pair of its data has anything before it"
    assert GenerationConfig.from_pretrained(directory).max_new_tokens == typed["max_new_tokens"]
    chat = load_chat_model(directory, "cpu")
    assert chat.single_turn
    assert chat.sampling == Sampling(no_repeat_ngram_size=typed["no_repeat_ngram_size"])
    assert (chat.max_new_tokens, chat.prefix) == (typed["max_new_tokens"], PREFIX)


def test_best_follows_the_metric_and_evaluations_say_how_long_they_and_their_answers_took(prefixed):
    run_dir, _ = prefixed
    lines = journal(run_dir, "eval")
    path = max((run_dir / "checkpoints").glob("step_*"))
    state = state_of(json.loads((path / "state.json").read_text()))
    assert state.best_metric == "chrf"
    assert math.isclose(state.best_score, max(line["chrf"] for line in lines), rel_tol=1e-6)
    assert len(lines) == 3 and all(0 < line["answer_seconds"] < line["seconds"] for line in lines)
