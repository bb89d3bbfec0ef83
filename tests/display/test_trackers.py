"""Trackers hold what the journal holds: TensorBoard's files are read back by its own reader, W&B's by its own."""

import json
import time

import pytest

from model.display.trackers import _read_counts, check_installed, numbers_of
from model.run.journal import read_journal
from tests.tiny import refused, train


def tensorboard_values(run_dir):
    """{tag: [(step, value)]} as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=dict(scalars=0)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if "/" in tag
    }


def wandb_values(run_dir):
    """{tag: [(step, value)]} of the transaction logs of all offline runs in `run_dir`, and the ids of the runs."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    found, ids = {}, set()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return found, ids


def journal_values(run_dir):
    found = {}
    for record in read_journal(run_dir / "metrics.jsonl"):
        for name, value in numbers_of(record).items():
            found.setdefault(name, []).append((record["step"], value))
    return found


def approximately(values):
    return {tag: [(step, pytest.approx(value, rel=1e-6)) for step, value in points] for tag, points in values.items()}


def test_a_killed_and_resumed_run_is_one_run_in_both_trackers_with_the_journal_s_names_steps_and_values(home):
    options = dict(output_dir="tracked", tracker="tensorboard,wandb", epochs=2, save_steps=3)
    environment = dict(WANDB_MODE="offline", WANDB_DIR=str(home))
    first = train(home, fault="optimizer:0:9:kill", env=environment, **options)
    assert first.codes == [-9], first.text
    wait_until_sent(home / "tracked")
    assert train(home, env=environment, is_keep_training=True, **options).codes == [0]
    run_dir, expected = home / "tracked", journal_values(home / "tracked")
    assert [step for step, _ in expected["train/loss"]] == list(range(1, 13)) and expected["eval/loss"]
    assert tensorboard_values(run_dir) == approximately(expected)
    found, ids = wandb_values(run_dir)
    assert len(ids) == 1, "both processes belong to one run"
    assert found["train/loss"][-1] == (12, pytest.approx(expected["train/loss"][-1][1]))
    assert {step for step, _ in found["train/loss"]} == set(range(1, 13)) and found.keys() == expected.keys()
    counts = json.loads((run_dir / "trackers.json").read_text())
    assert counts["tensorboard"] == counts["wandb"] >= 12


def wait_until_sent(run_dir):
    """Return when the killed run's process has sent the last whole line."""
    deadline, num_lines = time.monotonic() + 60, (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    while set(_read_counts(run_dir).values()) != {num_lines}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_before_the_run(home):
    assert refused(train(home, output_dir="none", tracker="tensorbord"), "'tensorbord' is none of tensorboard, wandb")
    with pytest.raises(ValueError, match="--tracker=wandb,nowhere: type pip install"):
        check_installed("wandb,nowhere")


def test_each_number_of_a_line_has_its_kind_and_name_and_nothing_else_is_sent():
    line = dict(kind="eval", time=9.0, step=4, loss=2.5, bleu=None, is_best=True, why="text")
    assert numbers_of(line) == {"eval/loss": 2.5}
    assert numbers_of(dict(kind="start", time=1.0, world=2)) == numbers_of(dict(kind="resume", step=1, time=2.0)) == {}
