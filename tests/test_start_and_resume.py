"""Starts of a run in its directory: new, resumed, after the end, moved, and after something is missing."""

import json
import os
import shutil
from functools import partial

import pytest
from tokenizers import Tokenizer

import train_low_mem
from model.commands import exporting
from model.data import token_store
from model.data import tokenizer as tokenizer_module
from model.data.token_store import Source, find_store
from model.data.tokenizer import load_tokenizer
from model.run.run_dir import TOKENIZER_DIR, TOKENS_DIR
from model.train.objectives.pairs import Pairs
from tests.data.files import save_unigram
from tests.ranks import wait_for
from tests.run.test_checkpoint import change_state
from tests.tiny import NUM_PAIRS, OPTIONS, SHORT, command, ids_by_epoch, journal, refused, start, train, weights_hash


def test_a_new_run_in_a_directory_with_checkpoints_is_refused_and_the_message_names_both_options(home):
    done = train(home, output_dir="once", **SHORT)
    assert done.codes == [0], done.text
    before = weights_hash(home / "once")
    assert refused(train(home, output_dir="once", **SHORT), "--is_keep_training=True", "--overwrite=True")
    assert weights_hash(home / "once") == before


def test_overwrite_moves_the_old_run_aside(home):
    for learn_rate in (1e-2, 2e-2):
        done = train(home, output_dir="twice", learn_rate=learn_rate, overwrite=True, **SHORT)
        assert done.codes == [0], done.text
    (old,) = home.glob("twice.*.old")
    rates = [json.loads((path / "config.json").read_text())["config"]["learn_rate"] for path in (old, home / "twice")]
    assert rates == [1e-2, 2e-2]
    assert (old / "last" / "model.safetensors").is_file()


def test_a_resume_without_a_checkpoint_is_refused_and_the_message_names_auto(home):
    assert refused(train(home, output_dir="fresh", is_keep_training=True), "--is_keep_training=auto")


def test_auto_starts_a_new_run_and_resumes_an_old_one(home):
    done = train(home, 1, "forward:0:4:int", output_dir="auto", is_keep_training="auto", **SHORT)
    assert done.codes == [0], done.text
    done = train(home, 1, output_dir="auto", is_keep_training="auto", **SHORT)
    assert done.codes == [0], done.text
    assert [line["step"] for line in journal(home / "auto", "resume")] == [0, 4]
    assert ids_by_epoch(home / "auto") == {1: list(range(NUM_PAIRS))}


def test_a_finished_run_says_so_and_trains_on_with_more_epochs(home):
    for extra in ({}, dict(is_keep_training=True)):
        done = train(home, 2, output_dir="finished", **SHORT, **extra)
        assert done.codes == [0, 0], done.text
    assert "finished is finished: 1 epochs done, 1 asked for; raise --epochs" in done.text
    done = train(home, 2, output_dir="finished", is_keep_training=True, **SHORT | dict(epochs=2))
    assert done.codes == [0, 0], done.text
    assert ids_by_epoch(home / "finished") == dict.fromkeys((1, 2), list(range(NUM_PAIRS)))


def test_a_finished_run_without_its_export_writes_it_at_the_next_start(home):
    done = train(home, output_dir="unexported", **SHORT)
    assert done.codes == [0], done.text
    expected = weights_hash(home / "unexported")
    shutil.rmtree(home / "unexported" / "last")
    done = train(home, output_dir="unexported", is_keep_training=True, **SHORT)
    assert done.codes == [0] and "is finished" in done.text
    assert weights_hash(home / "unexported") == expected


def test_a_stop_in_the_last_step_ends_a_finished_run_and_no_journal_says_asked_for_good(home):
    options = SHORT | dict(output_dir="late", validation_file="")
    done = train(home, 1, "forward:0:6:int", **options)
    assert done.codes == [0] and "finished at step 6" in done.text, done.text
    (stop,) = journal(home / "late", "stop")
    assert (stop["reason"], stop["step"]) == ("finished", 6)
    with open(home / "late" / "metrics.jsonl", "a") as file:  # as a stop between the last save and the end leaves it
        file.write(json.dumps(stop | dict(reason="asked")) + "\n")
    for _ in range(2):
        assert train(home, is_keep_training=True, **options).codes == [0]
        assert [line["reason"] for line in journal(home / "late", "stop")] == ["finished", "asked", "finished"]


def test_a_run_directory_that_was_moved_or_copied_resumes_where_it_is_now(home):
    done = train(home, 1, "forward:0:2:int", output_dir="exp1", **SHORT)
    assert done.codes == [0] and "exp1: a new run" in done.text, done.text
    *_, said, typed = done.text.splitlines()
    assert said.endswith("to go on, type:")
    assert typed.endswith("python train_low_mem.py train --output_dir=exp1 --is_keep_training=True")
    (home / "exp1").rename(home / "model_save" / "pretrain")
    done = command(home, "train", "--is_keep_training=auto")
    assert done.codes == [0] and "model_save/pretrain: resuming" in done.text, done.text
    assert not (home / "exp1").exists()
    assert ids_by_epoch(home / "model_save" / "pretrain") == {1: list(range(NUM_PAIRS))}
    (home / "model_save" / "pretrain").rename(home / "first")
    shutil.copytree(home / "first", home / "model_save" / "sft")
    before = weights_hash(home / "first")
    done = command(home, "train", "--output_dir=model_save/sft", "--is_keep_training=True", "--epochs=2")
    assert done.codes == [0], done.text
    assert weights_hash(home / "first") == before != weights_hash(home / "model_save" / "sft")
    assert sorted(path.name for path in home.glob("first*")) == ["first"]


def main_without_best(words):
    """`main`, in which best/ is deleted after each evaluation."""
    evaluate = train_low_mem.evaluate

    def evaluate_and_delete(run, *args):
        outcome = evaluate(run, *args)
        shutil.rmtree(run.dir / "best")
        return outcome

    train_low_mem.evaluate = evaluate_and_delete
    return train_low_mem.main(words)


def test_a_missing_best_model_is_written_by_the_next_evaluation_and_after_the_end(home):
    worse = dict(
        output_dir="lost", optimizer="adamw", learn_rate=1, any_learn_rate=True, warmup_steps=0, eval_steps=1, **SHORT
    )
    done = wait_for(start(home, function=main_without_best, **worse), home)
    assert done.codes == [0], done.text
    losses = [line["loss"] for line in journal(home / "lost", "eval")]
    assert losses != sorted(losses, reverse=True), "some evaluation is not the best so far"
    assert refused(train(home, command="test", output_dir="lost"), "--is_keep_training=True")
    done = train(home, is_keep_training=True, **worse)
    assert done.codes == [0] and "lost/best is missing" in done.text, done.text
    assert (home / "lost" / "best" / "model.safetensors").exists()
    assert f"best_val_loss:{losses[-1]:.4f}" in done.text
    done = train(home, is_keep_training=True, **worse)
    assert done.codes == [0] and "lost is finished" in done.text


def test_a_plan_for_a_gpu_is_replaced_on_a_cpu(home):
    options = dict(output_dir="from_a_gpu", is_keep_training="auto", **SHORT)
    assert train(home, 1, "forward:0:2:int", **options).codes == [0]
    own = json.loads((home / "from_a_gpu" / "plan.json").read_text())["micro_batch_tokens"]
    (path,) = (home / "from_a_gpu" / "checkpoints").glob("step_*")
    change_state(path, {"device": "cuda", "plan.micro_batch_tokens": 262_144, "plan.predicted_peak_bytes": 2**35})
    done = train(home, 1, **options)
    assert done.codes == [0], done.text
    plan = json.loads((home / "from_a_gpu" / "plan.json").read_text())
    assert plan["micro_batch_tokens"] == own and plan["predicted_peak_bytes"] < 2**30


def main_on_full_disk(directory, words):
    """`main` on a disk that is full for exports named `directory`."""
    write = exporting.try_export
    exporting.try_export = lambda *args: "no room" if args[2].name == directory else write(*args)
    return train_low_mem.main(words)


def test_a_finished_run_with_its_export_writes_no_other(home):
    for directory in ("nothing", "last"):
        main = partial(main_on_full_disk, directory)
        done = wait_for(start(home, function=main, output_dir="exported", is_keep_training="auto", **SHORT), home)
        assert done.codes == [0], done.text
    assert "exported is finished" in done.text


def test_a_failed_export_of_best_at_the_end_fails_the_run_and_the_next_start_exports_it(home):
    done = wait_for(start(home, function=partial(main_on_full_disk, "best"), output_dir="no_best", **SHORT), home)
    assert done.codes == [1] and "no_best/best could not be written" in done.text
    done = train(home, output_dir="no_best", is_keep_training=True, **SHORT)
    assert done.codes == [0], done.text
    assert (home / "no_best" / "best" / "model.safetensors").exists()


@pytest.mark.parametrize("change", (dict(validation_file="train.jsonl"), dict(max_seq_len=8)))
def test_with_other_validation_pairs_the_best_model_is_chosen_again(home, change):
    name = f"judged_{list(change)[0]}"
    for fault, options in (("forward:0:8:int", {}), ("", change | dict(learn_rate=1e-9, any_learn_rate=True))):
        done = train(home, 1, fault, output_dir=name, is_keep_training="auto", epochs=3, save_steps=1000, **options)
        assert done.codes == [0], done.text
    assert "best/ is chosen anew" in done.text
    assert ("44 of 44 validation pairs are also in the training file" in done.text) == ("validation_file" in change)
    message = "max_seq_len was 32, and is 8: of the training pairs only their number, 44, is compared"
    assert (message in done.text) == ("max_seq_len" in change)
    losses = {line["step"]: line["loss"] for line in journal(home / name, "eval")}
    assert f"best_val_loss:{min(losses[12], losses[18]):.4f}" in done.text and losses[6] not in (losses[12], losses[18])


def test_a_run_stopped_at_its_last_step_is_evaluated_once_and_then_finished(home):
    last = -(-NUM_PAIRS // OPTIONS["global_batch_size"])
    for fault in (f"forward:0:{last}:int", "", ""):
        done = train(home, 1, fault, output_dir="last_step", is_keep_training="auto", **SHORT)
        assert done.codes == [0], done.text
    assert "last_step is finished" in done.text
    assert [line["step"] for line in journal(home / "last_step", "eval")] == [last]


def test_a_typed_warm_up_that_is_not_shorter_than_the_run_is_refused_before_the_run(home):
    done = train(home, output_dir="all_warm_up", warmup_steps=11)
    assert refused(done, "the warm-up of 11 steps must be shorter than the run of 11", "--warmup_steps=1")
    assert not (home / "all_warm_up").exists()


def test_warm_up_can_be_changed_at_a_resume_and_is_counted_in_steps_of_the_first_start(home):
    for fault, warmup_steps, batch in (("forward:0:2:int", 3, 8), ("", 4, 4)):
        sizes = dict(global_batch_size=batch, warmup_steps=warmup_steps)
        done = train(home, 1, fault, output_dir="warm", is_keep_training="auto", **SHORT | sizes)
        assert done.codes == [0], done.text
    assert "muon, as at the run's first start; learning rate up to 0.03 over the first 8 steps" in done.text
    assert [(line["learn_rate"], line["warmup_pairs"]) for line in journal(home / "warm", "start")] == [
        (0.03, 24),
        (0.03, 32),
    ]
    line = next(line for line in journal(home / "warm", "train") if line["step"] == 3)
    assert line["learn_rate"] == pytest.approx(0.03 * (16 + 2) / (4 * 8))


def test_a_run_resumes_with_its_own_tokenizer_and_shape_after_the_given_ones_are_deleted(home):
    shutil.copytree(home / "model_save" / "tokenizer", home / "given")
    shutil.copy(home / "shape.json", home / "given")
    given = dict(tokenizer_dir="given", model="given/shape.json")
    done = train(home, 1, "forward:0:2:int", output_dir="kept_own", **given, **SHORT)
    assert done.codes == [0], done.text
    shutil.rmtree(home / "given")
    done = command(home, "train", "--output_dir=kept_own", "--is_keep_training=True")
    assert done.codes == [0], done.text


def test_a_resumed_run_keeps_the_options_of_its_start(home):
    done = train(home, 1, "forward:0:2:int", output_dir="kept", dropout=0.25, **SHORT)
    assert done.codes == [0], done.text
    done = command(home, "train", "--output_dir=kept", "--is_keep_training=True")
    assert done.codes == [0], done.text
    stored = json.loads((home / "kept" / "config.json").read_text())["config"]
    assert (stored["dropout"], stored["model"], stored["global_batch_size"]) == (0.25, "shape.json", 8)


def test_a_run_resumes_only_with_the_same_pairs_in_the_same_order_even_from_a_rewritten_file(home):
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    for fault, order in (("forward:0:2:int", 1), ("", -1), ("", 1)):  # the file is rewritten each time
        (home / "mine.jsonl").write_text("\n".join(map(json.dumps, rows[::order])))
        done = train(home, 1, fault, output_dir="paired", train_file="mine.jsonl", is_keep_training="auto", **SHORT)
        if order < 0:
            assert refused(done, "other training pairs, or in another order", "--train_file=", "--output_dir")
        else:
            assert done.codes == [0], done.text
    assert ids_by_epoch(home / "paired") == {1: list(range(NUM_PAIRS))}


def main_as_before(words):
    """`main` of versions whose token stores had format 4: control tokens that a text spelled were tokens."""

    def parsing(state):
        encoder = Tokenizer.from_str(json.dumps(state))
        encoder.encode_special_tokens = True
        return encoder

    tokenizer_module.text_encoder, token_store.FORMAT = parsing, 4
    return train_low_mem.main(words)


def test_a_run_of_older_token_stores_resumes_if_its_ids_are_equal_and_is_else_refused_with_the_reason(home):
    save_unigram(home / "t5")
    pairs = (home / "train.jsonl").read_text(encoding="utf-8")
    (home / "spelled.jsonl").write_text(pairs + '{"prompt": "hi</s> user: go", "response": "yes</s>"}\n' * 2)
    for name in ("train", "spelled"):
        options = SHORT | dict(output_dir=f"of_{name}", train_file=f"{name}.jsonl", tokenizer_dir="t5")
        done = wait_for(start(home, 1, "forward:0:2:int", function=main_as_before, **options), home)
        assert done.codes == [0], done.text
        done = train(home, is_keep_training=True, **options)
        if name == "train":
            assert done.codes == [0] and ids_by_epoch(home / "of_train") == {1: list(range(NUM_PAIRS))}, done.text
        else:
            assert refused(done, "control tokens such as </s> or <think> in a text as tokens", "--output_dir")


def test_a_run_resumes_from_a_checkpoint_without_ids_sha256_and_keeps_its_best_model(home):
    done = train(home, 1, "forward:0:8:int", output_dir="older")
    assert done.codes == [0], done.text
    source = Source((home / "valid.jsonl",), Pairs(), load_tokenizer(home / TOKENIZER_DIR), 32)
    valid = find_store(source, home / TOKENS_DIR)
    older = dict.fromkeys(("format", "ids_sha256", "max_seq_len"), ...) | dict(validation=valid.file_identity)
    change_state(home / "older" / "checkpoints" / "step_00000008", older)
    done = train(home, 1, output_dir="older", is_keep_training=True)
    assert done.codes == [0], done.text
    assert "does not hold a hash of its pairs: of the training pairs only their number, 44" in done.text
    assert "chosen anew" not in done.text
    assert ids_by_epoch(home / "older") == {1: list(range(NUM_PAIRS)), 2: list(range(NUM_PAIRS))}


def test_an_output_dir_whose_name_is_not_utf_8_is_refused_and_such_a_data_file_is_read(home):
    odd = os.fsdecode(b"caf\xe9")
    assert refused(train(home, output_dir=odd), "--output_dir='caf\\udce9': its name is not UTF-8")
    shutil.copy(home / "train.jsonl", home / f"{odd}.jsonl")
    for _ in range(2):  # the second start reads the config.json of the first
        done = train(home, 2, output_dir="oddly", train_file=f"{odd}.jsonl", is_keep_training="auto", **SHORT)
        assert done.codes == [0, 0] and "Traceback" not in done.text, done.text
