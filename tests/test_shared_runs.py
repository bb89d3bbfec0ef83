"""Runs whose ranks share masters and optimizer state keep the promises of docs/architecture.md."""

import random

import pytest
import torch

from tests.faulty_runs import SITES, calm_run, faulty_run, killed_run
from tests.tiny import furnish, journal, train, weights_hash

SHARED = dict(share_state="True", dropout=0.1)
EQUAL = ("step", "pairs_seen", "learn_rate", "target_tokens", "tokens")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of machines without a shared disk."""
    return tuple(furnish(tmp_path_factory.mktemp(f"machine{number}")) for number in range(3))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_promises_2_and_3_a_run_that_goes_on_with_1_2_and_3_ranks_has_the_steps_of_one_that_shares_nothing(
    places, optimizer
):
    home, name = places[0], f"elastic_{optimizer}"
    alone = train(home, 1, output_dir=f"alone_{optimizer}", optimizer=optimizer, dropout=0.1)
    assert alone.codes == [0], alone.text
    for folder, world, step in ((home, 1, 3), (home, 2, 6), (places, 3, 9), (home, 2, None)):
        fault = f"forward:all:{step}:term" if step else ""
        options = dict(output_dir=name, optimizer=optimizer, is_keep_training="auto") | SHARED
        done = train(folder, world, fault, **options)
        assert done.codes == [0] * world, done.text
    moved, own = journal(home / name, "train"), journal(home / f"alone_{optimizer}", "train")
    assert [line["world"] for line in journal(home / name, "start")] == [1, 2, 3, 2]
    for ours, theirs in zip(moved, own, strict=True):
        assert [ours[field] for field in EQUAL] == [theirs[field] for field in EQUAL]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("machine, optimizer", [(1, "adamw"), (2, "muon")])
def test_promise_4_out_of_memory_at_every_site_on_the_last_rank_changes_no_bit(places, machine, optimizer):
    home, options = places[machine], SHARED | dict(optimizer=optimizer)
    record = faulty_run(home, (2, "last", "oom"), *calm_run(home, 2, options), options)
    assert not record["wrong"], record
    assert len(record["sites"]) == len(SITES) - 1, record


def test_a_save_without_host_memory_loses_a_checkpoint_on_no_rank_and_a_rank_that_dies_ends_all(places):
    home = places[0]
    for name, world, fault in (("calm", 2, ""), ("scarce", 2, "save:0:4:oom,save:0:7:enospc")):
        done = train(home, world, fault, output_dir=name, **SHARED)
        assert done.codes == [0, 0], done.text
    assert weights_hash(home / "scarce") == weights_hash(home / "calm")
    (failed,) = [line for line in journal(home / "scarce", "save") if "error" in line]
    assert failed["step"] == 7
    done = train(home, 2, "optimizer:last:5:kill", output_dir="dead", **SHARED)
    assert -9 in done.codes and 0 not in done.codes, done.text
    done = train(home, 2, output_dir="dead", is_keep_training=True, dropout=0.1)  # the run remembers that it shares
    assert done.codes == [0, 0], done.text
    assert weights_hash(home / "dead") == weights_hash(home / "calm")


def test_promise_3_weights_in_bf16_go_on_with_the_same_bits_and_share_their_state(places):
    home, bf16 = places[1], dict(master_dtype="bf16", mixed_precision="bf16", optimizer="adamw", dropout=0.1)
    bf16["micro_batch_tokens"] = 64  # several in a step: their gradients are added in bf16 too
    done = train(home, 1, output_dir="whole", **bf16)
    assert done.codes == [0], done.text
    for fault in ("reduce:0:4:kill", "loss:0:5:nan,save:0:7:kill", "forward:0:9:oom"):
        done = train(home, 1, fault, output_dir="rounded", is_keep_training="auto", **bf16)
        assert done.codes == [-9 if "kill" in fault else 0], done.text
    assert weights_hash(home / "rounded") == weights_hash(home / "whole")
    for world, fault in ((2, "forward:all:5:term"), (1, "forward:all:9:term"), (2, "")):
        options = bf16 | dict(output_dir="halves", share_state="True", is_keep_training="auto")
        done = train(home, world, fault, **options)
        assert done.codes == [0] * world, done.text
    float32 = train(home, 1, output_dir="float32", **bf16 | dict(master_dtype="float32"))
    assert float32.codes == [0], float32.text
    losses = [journal(home / name, "train")[-1]["loss"] for name in ("whole", "halves", "float32")]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.01)
    done = train(home, 1, output_dir="float32", is_keep_training=True, **bf16)
    assert done.codes == [2] and "this run was started with master_dtype=float32" in done.text


@pytest.mark.parametrize("precision, masters", [("no", "float32"), ("bf16", "bf16")])
def test_promises_3_and_4_a_run_whose_state_is_in_host_memory_is_the_run_that_it_would_be_without(
    places, precision, masters
):
    home, common = places[2], dict(optimizer="adamw", dropout=0.1, mixed_precision=precision, master_dtype=masters)
    names = [f"{kind}_{precision}_{masters}" for kind in ("device", "host", "killed", "moved")]
    for name, offload in zip(names, ("none", "optimizer"), strict=False):
        done = train(home, 1, output_dir=name, offload=offload, **common)
        assert done.codes == [0], done.text
    device, host, killed, moved = (home / name for name in names)
    for fault in ("optimizer:0:3:oom,save:0:5:oom,update:0:6:oom,save:0:8:kill", ""):
        done = train(home, 1, fault, output_dir=killed.name, offload="optimizer", is_keep_training="auto", **common)
        assert done.codes == [-9 if fault else 0], done.text
    assert weights_hash(killed) == weights_hash(host)
    for world, offload, fault in ((1, "optimizer", "forward:all:4:term"), (1, "none", "forward:all:7:term"),
                                  (2, "optimizer", "")):  # fmt: skip
        options = common | dict(output_dir=moved.name, offload=offload, is_keep_training="auto")
        done = train(home, world, fault, **options)
        assert done.codes == [0] * world, done.text
    ends = [journal(path, "train")[-1] for path in (device, host, moved)]
    assert [end["loss"] for end in ends] == pytest.approx(
        [ends[0]["loss"]] * 3, rel=1e-6 if precision == "no" else 0.01
    )


def test_promise_3_an_adapter_with_state_and_inputs_in_host_memory_has_the_bits_of_one_without_and_goes_on_with_two(
    places,
):
    home = places[0]
    base = train(home, 1, output_dir="base", max_steps=1, epochs=None, warmup_steps=0)
    assert base.codes == [0], base.text
    adapter = dict(finetune_from_ckp_file="base/last", lora_rank=4, base_precision="nf4", is_keep_training="auto")
    host = dict(offload="optimizer", activation_offload=True, gradient_checkpointing=True)
    faults = "backward_first:0:4:oom,update:0:6:oom,save:0:8:kill"
    for name, offloads, fault in (("lora", {}, ""), ("lora_host", host, faults), ("lora_host", host, "")):
        done = train(home, 1, fault, output_dir=name, **adapter | offloads)
        assert done.codes == [-9 if fault else 0], done.text
    assert weights_hash(home / "lora_host") == weights_hash(home / "lora")
    for world, fault in ((1, "forward:all:5:term"), (2, "")):
        done = train(home, world, fault, output_dir="lora_moved", offload="optimizer", **adapter)
        assert done.codes == [0] * world, done.text
    ends = [journal(home / name, "train")[-1] for name in ("lora", "lora_moved")]
    assert ends[1]["step"] == ends[0]["step"] and ends[1]["loss"] == pytest.approx(ends[0]["loss"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("machine, optimizer", [(1, "adamw"), (2, "muon")])
def test_promises_3_and_4_on_two_gpus_faults_at_every_site_and_kills_change_no_bit(places, machine, optimizer):
    home, options = places[machine], dict(share_state="True", optimizer=optimizer)
    record = faulty_run(home, (2, "last", "oom"), *calm_run(home, 2, options), options)
    assert not record["wrong"], record
    options |= dict(model="tiny", deterministic=True, epochs=10, save_steps=1)
    record = killed_run(home, f"cut_{optimizer}", 2, random.Random(2), kills=3, **options)
    assert record["wrong"] == "" and record["kills"] >= 2, record
