"""Runs that learn preferences: the reference through kills, stops and lost columns, and best/ by accuracy."""

import json
import math
import shutil

import numpy as np
import pytest

from model.train import derive as deriving
from tests.ranks import wait_for
from tests.tiny import SHORT, journal, refused, start, train, weights_hash
from train_low_mem import main

PREFERRED = dict(train_file="train_p.jsonl", validation_file="valid_p.jsonl", objective="dpo", sft_weight=0.5)
RATES = dict(learn_rate=5e-3, any_learn_rate=True, optimizer="adamw")


def main_in_small_parts(line):
    """`main`, whose derived columns are computed 8 rows at a time."""
    deriving.rows_together, deriving.PART_SECONDS = lambda examples: 8, 0
    return main(line)


def run(home, name, world=1, fault="", **options):
    options = PREFERRED | RATES | dict(output_dir=name) | options
    return wait_for(start(home, world, fault, function=main_in_small_parts, **options), home)


@pytest.fixture(scope="module")
def preferring(home):
    """`home` with preferences, a base, and a run of an adapter on it."""
    for name in ("train", "valid"):
        rows = [json.loads(line) for line in (home / f"{name}.jsonl").read_text().splitlines()]
        lines = [dict(prompt=row["prompt"], chosen="今天天气", rejected=row["response"]) for row in rows]
        (home / f"{name}_p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(home, output_dir="base", **SHORT).codes == [0]
    return home


ADAPTER = dict(finetune_from_ckp_file="base", lora_rank=4)


@pytest.mark.parametrize(
    "options", [dict(finetune_from_ckp_file="base"), ADAPTER, ADAPTER | dict(base_precision="nf4")]
)
def test_the_reference_is_the_weights_at_the_run_s_start_killed_stopped_or_out_of_memory(preferring, options):
    """Killed while the reference is computed, which goes on where it was; or later, when its columns are lost, too."""
    home, tokens = preferring, preferring / "model_save" / "tokens"
    name = "_".join(["whole", *options])
    done = run(home, name, **options)
    assert done.codes == [0], done.text
    first = journal(home / name, "train")[0]
    assert first["loss"] == pytest.approx(math.log(2) - 0.5 * first["chosen_log_prob"], abs=1e-4)
    assert [first[name] for name in ("margin", "chosen_log_ratio", "rejected_log_ratio")] == pytest.approx(
        [0] * 3, abs=1e-4
    )

    def forget():
        for folder in tokens.glob("*/derived_*"):
            shutil.rmtree(folder)

    forget()
    killed = run(home, f"{name}_killed", fault="derive:0:3:kill", **options)
    assert killed.codes != [0]
    (part,) = tokens.glob("*/derived_*.part")
    computed = np.isfinite(np.load(part / "reference_chosen.npy"))
    assert computed[:16].all() and not computed[16:].any(), "what two parts gave is kept"
    stamp = (part / "reference_chosen.npy").stat().st_ino
    again = run(home, f"{name}_killed", fault="forward:0:4:kill", save_steps=1, **options)
    assert again.codes != [0] and any(path.stat().st_ino == stamp for path in tokens.glob("*/derived_*/*_chosen.npy"))
    forget()
    done = run(home, f"{name}_killed", is_keep_training="auto", **options)
    assert done.codes == [0], done.text
    assert weights_hash(home / f"{name}_killed") == weights_hash(home / name)
    forget()
    done = run(home, f"{name}_oom", fault="derive:0:2:real", **options)
    assert done.codes == [0] and "CHAT_FAULT derive:0:2:real fires" in done.text
    assert weights_hash(home / f"{name}_oom") == weights_hash(home / name)


def test_a_continued_adapter_is_its_own_reference_also_when_the_columns_are_lost_and_on_two_ranks(preferring):
    home = preferring
    assert run(home, "adapter", **ADAPTER).codes == [0]
    options = ADAPTER | dict(finetune_from_ckp_file="adapter/last")
    done = run(home, "continued", **options)
    assert done.codes == [0], done.text
    lines = journal(home / "continued", "train")
    assert abs(lines[0]["margin"]) < 1e-4 and abs(lines[-1]["margin"]) > 1e-2
    assert lines[0]["chosen_log_prob"] > journal(home / "adapter", "train")[0]["chosen_log_prob"] + 0.1
    assert run(home, "continued_again", fault="forward:0:4:kill", save_steps=1, **options).codes != [0]
    for folder in (home / "model_save" / "tokens").glob("*/derived_*"):
        shutil.rmtree(folder)
    done = run(home, "continued_again", is_keep_training="auto", **options)
    assert done.codes == [0], done.text
    assert weights_hash(home / "continued_again") == weights_hash(home / "continued")
    for folder in (home / "model_save" / "tokens").glob("*/derived_*"):
        shutil.rmtree(folder)
    done = run(home, "continued_two", 2, **options)
    assert done.codes == [0, 0], done.text
    for name in ("loss", "accuracy", "chosen_reward", "rejected_log_prob"):
        both = ([line[name] for line in journal(home / run, "train")] for run in ("continued", "continued_two"))
        assert next(both) == pytest.approx(next(both), rel=1e-3, abs=1e-4), name


def test_best_is_that_of_the_best_accuracy_and_test_gives_it_with_the_reference_of_the_run(preferring):
    home = preferring
    done = run(home, "accurate", finetune_from_ckp_file="base", best_metric="accuracy", epochs=3, bleu_pairs=2,
               max_new_tokens=4)  # fmt: skip
    assert done.codes == [0], done.text
    evals = journal(home / "accurate", "eval")
    best = max(evals, key=lambda line: line["accuracy"])
    assert {"loops", "ended"} <= best.keys() and best["evaluations_since_best"] == 0
    for folder in (home / "model_save" / "tokens").glob("*/derived_*"):
        shutil.rmtree(folder)
    done = train(home, command="test", output_dir="accurate", validation_file="valid_p.jsonl")
    assert done.codes == [0] and f"loss {best['loss']:.4f}" in done.text, done.text
    assert f"accuracy {best['accuracy']:.4f}" in done.text, done.text


def test_a_run_whose_start_was_replaced_refuses_to_compute_its_reference_anew(preferring):
    home = preferring
    assert train(home, output_dir="other", seed=5, **SHORT).codes == [0]
    shutil.copytree(home / "base" / "last", home / "start")
    options = dict(finetune_from_ckp_file="start")
    assert run(home, "replaced", fault="forward:0:4:kill", save_steps=1, **options).codes != [0]
    for folder in (home / "model_save" / "tokens").glob("*/derived_*"):
        shutil.rmtree(folder)
    shutil.copy(home / "other" / "last" / "model.safetensors", home / "start" / "model.safetensors")
    done = run(home, "replaced", is_keep_training="auto", **options)
    assert refused(done, "the reference of this run", "start gives other weights now: put these back")
