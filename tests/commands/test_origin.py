"""Runs on machines without a shared disk: what all of them need, and what only the first one needs."""

import json

import pytest

from model.data.tokenizer import PROBE
from model.data.tokenizer_training import train_tokenizer
from tests.ranks import wait_for
from tests.tiny import (
    NUM_PAIRS,
    OPTIONS,
    SHAPE,
    SHORT,
    furnish,
    ids_by_epoch,
    journal,
    refused,
    start,
    train,
    weights_hash,
)
from tests.train.test_fault_matrix import tear_the_fifth_update


@pytest.fixture
def nodes(tmp_path):
    """The folders of two machines with equal pairs, tokenizers and model shapes."""
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
        furnish(folder)
    return folders


def resume(nodes, name):
    """Ended of the resumed run `name`; only the first machine has its stored options."""
    return train(nodes, 2, output_dir=name, is_keep_training=True, **dict.fromkeys(OPTIONS))


def test_machines_without_a_shared_disk_start_stop_and_resume_like_ranks_of_one_machine(nodes):
    """Fine-tuning, a torn update and a stop; the second machine has another run's files in the same output_dir."""
    one, two = nodes
    train_tokenizer([PROBE[:200] * 2], 507, two / "other_tokenizer")
    for folder, options in (
        (one, dict(output_dir="source")),
        (two, dict(output_dir="run", tokenizer_dir="other_tokenizer")),
    ):
        done = train(folder, **SHORT | options)
        assert done.codes == [0], done.text
    rows = [json.loads(line) for line in (two / "train.jsonl").read_text().splitlines()]
    (two / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))  # the same pairs, written differently
    options = dict(finetune_from_ckp_file="source", model=None, dropout=0.1)
    uninterrupted = train(one, 2, output_dir="uninterrupted", **options)
    assert uninterrupted.codes == [0, 0], uninterrupted.text

    torn = start(nodes, 2, "forward:all:8:term", function=tear_the_fifth_update, output_dir="run", **options)
    done = wait_for(torn, nodes)
    assert done.codes == [0, 0] and "going back to the checkpoint" in done.text, done.text
    done = resume(nodes, "run")
    assert done.codes == [0, 0], done.text
    assert [line["step"] for line in journal(one / "run", "resume")] == [0, 4, 8]
    assert weights_hash(one / "run") == weights_hash(one / "uninterrupted")
    seen = [ids_by_epoch(node / "run") for node in nodes]
    assert [sorted(seen[0][epoch] + seen[1][epoch]) for epoch in (1, 2)] == [list(range(NUM_PAIRS))] * 2


def other_tokenizer(node):
    train_tokenizer([PROBE[:200] * 2], 507, node / "model_save" / "tokenizer")


def other_pad(node):
    path = node / "model_save" / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(pad_token="[UNK]")))


def other_epsilon(node):
    (node / "shape.json").write_text(json.dumps(SHAPE | dict(layer_norm_epsilon=1e-5)))


def other_order(node):
    lines = (node / "train.jsonl").read_text().splitlines()
    (node / "train.jsonl").write_text("\n".join(lines[::-1]))


@pytest.mark.parametrize(
    "differ, what, values",
    [
        (other_tokenizer, "the tokenizer", ("fingerprint=", "fingerprint=")),
        (other_pad, "the tokenizer", ("pad_id=0", "pad_id=6")),
        (other_epsilon, "the model's configuration", ("layer_norm_epsilon=1e-06", "layer_norm_epsilon=1e-05")),
        (other_order, "the pairs in train.jsonl", ("ids_sha256=", "ids_sha256=")),
    ],
)
def test_machines_that_differ_are_refused_before_the_first_step_with_the_values_of_each(nodes, differ, what, values):
    differ(nodes[1])
    done = train(nodes, 2, output_dir="run")
    assert done.codes == [1, 1], done.text
    assert f"the ranks disagree about {what}: rank 0 has {values[0]}" in done.text
    assert f"; rank 1 has {values[1]}" in done.text
    assert not (nodes[0] / "run").exists()


def test_an_error_of_rank_0_ends_every_machine_with_its_message(nodes):
    (nodes[0] / "sft" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (nodes[0] / "sft" / "config.json").write_text(json.dumps(dict(preset="sft", given={})))
    options = dict(output_dir="sft", is_keep_training=True, use_large_config=True)
    assert refused(train(nodes, 2, **options), "is a run of the preset sft, not pretrain_large")
    assert refused(resume(nodes, "nowhere"), "there is no checkpoint in nowhere")
    assert refused(train(nodes, 2, output_dir="run", finetune_from_ckp_file="nowhere"), "no model there")
