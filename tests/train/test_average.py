"""The average of the weights: what it is, in a run, across resumes and numbers of ranks, and when memory runs out."""

import functools
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from model.commands import evaluation
from model.commands.option_values import load_config
from model.memory.estimate import disk_bytes, fixed_bytes
from model.memory.plan import NothingFits
from model.run.checkpoint import TrainState, load_average, read_checkpoint, save_checkpoint, snapshot_of
from model.runtime import fault_injection
from model.train.average import WeightAverage
from model.train.evaluate import measure
from model.train.optim import make_optimizer
from tests.parts import PLAN, evaluation_of, make_config, make_model, make_spec
from tests.tiny import SHORT, journal, refused, train

OPTIONS = dict(average=0.2, epochs=2, save_steps=4, optimizer="muon", dropout=0.1)


@contextmanager
def waiting_refused():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def averaged_weights(steps, share, device="cpu"):
    """(WeightAverage after so many steps, the weights of each step)."""
    model, draw = make_model(60).to(device), torch.Generator().manual_seed(0)
    average, weights, scale = WeightAverage(model.flat, share), [], torch.tensor(0.3, device=device)
    for step in range(1, steps + 1):
        model.flat.masters.copy_(torch.randn(model.flat.masters.shape, generator=draw))
        with waiting_refused() if device == "cuda" else nullcontext():
            average.update(step, scale)
        weights.append(model.flat.masters.clone())
    return average, weights


def test_the_average_with_a_share_of_a_half_is_the_mean_of_all_steps():
    average, weights = averaged_weights(20, 0.5)
    torch.testing.assert_close(average.values, torch.stack(weights).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_the_mean_age_of_the_average_is_its_share_of_the_steps_so_far(share):
    age = 0.0
    for step in range(1, 2001):  # the age of what is there grows by 1, then it is mixed with what has the age 0
        age = (age + 1) * (1 - 1 / step) ** (1 / share - 1)
        if step in (500, 2000):
            assert age / step == pytest.approx(share, rel=0.05)


@pytest.mark.gpu
def test_on_a_gpu_the_average_is_that_of_the_cpu_does_not_wait_for_the_device_and_changes_places_without_memory():
    (average, (*_, weights)), (on_cpu, _) = averaged_weights(20, 0.1, "cuda"), averaged_weights(20, 0.1)
    torch.testing.assert_close(average.values.cpu(), on_cpu.values, rtol=1e-5, atol=1e-6)
    before = average.values.clone()
    torch.cuda.reset_peak_memory_stats()
    with average.in_place_of_weights():
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
        assert torch.equal(average.flat.masters, before)
    assert torch.equal(average.flat.masters, weights)


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_an_update_whose_scale_is_not_above_0_leaves_the_average(scale):
    average, _ = averaged_weights(3, 0.1)
    before = average.values.clone()
    average.flat.masters.add_(1)
    average.update(4, torch.tensor(scale))
    assert torch.equal(average.values, before)


def test_weights_and_average_change_places_without_memory_and_come_back_bit_for_bit_after_an_error():
    average, (*_, weights) = averaged_weights(3, 0.3)
    values, address = average.values.clone(), average.flat.masters.data_ptr()
    with pytest.raises(RuntimeError, match="out of memory"), average.in_place_of_weights():
        assert torch.equal(average.flat.masters, values) and average.flat.masters.data_ptr() == address
        raise RuntimeError("out of memory")
    assert torch.equal(average.flat.masters, weights) and torch.equal(average.values, values)


@pytest.mark.parametrize("part", ["all", "decoder"])
def test_a_checkpoint_has_the_average_under_the_names_of_all_weights_and_loads_it_bit_for_bit(tmp_path, part):
    model = make_model(60).freeze_all_but(part)
    model.make_flat()
    optimizer = make_optimizer(model, make_config(average=0.1))
    optimizer.average.values.add_(1)
    state = TrainState(step=3, shape=asdict(model.config))
    found = read_checkpoint(save_checkpoint(tmp_path, state, snapshot_of(model, optimizer), keep=2))
    assert found.average.keys() == model.state_dict().keys()
    others = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert bool(others) == (part == "decoder")
    assert all(torch.equal(found.average[name], found.tensors[name]) == (name in others) for name in found.average)
    expected, other = optimizer.average.values.clone(), WeightAverage(model.flat, 0.1)
    load_average(other, model, found.average)
    for one, another in zip(other.tensors(), optimizer.average.tensors(), strict=True):
        assert torch.equal(one, another)
    load_average(other, model, {})
    assert torch.equal(other.values, model.flat.masters) and torch.equal(optimizer.average.values, expected)


def test_memory_and_disk_are_predicted_with_the_average():
    shape = make_model(60).config
    plain, averaged = (make_spec(make_config(average=x), shape, torch.bfloat16) for x in (0.0, 0.1))
    assert fixed_bytes(averaged) == fixed_bytes(plain) | dict(average=4 * plain.trained)
    assert disk_bytes(averaged, 2) - disk_bytes(plain, 2) == 3 * 4 * plain.saved


def test_an_average_that_nothing_evaluates_and_one_older_than_half_of_the_run_are_refused():
    for options, message in ((dict(validation_file=""), "nothing is evaluated"), ({}, "at most 0.5")):
        with pytest.raises(ValueError, match=message):
            load_config("pretrain", dict(average=0.1 if options else 0.6) | options)


@pytest.fixture(scope="module")
def calm(home):
    """Function of the number of ranks that gives the directory of a run without faults."""

    @functools.cache
    def run(world):
        done = train(home, world, output_dir=f"calm{world}", **OPTIONS)
        assert done.codes == [0] * world, done.text
        return home / f"calm{world}"

    return run


def newest(run_dir):
    name = (run_dir / "checkpoints" / "LATEST").read_text()
    return {file: load_file(run_dir / "checkpoints" / name / f"{file}.safetensors") for file in ("model", "average")}


def equal(one, other):
    return all(torch.equal(tensor, other[file][name]) for file in one for name, tensor in one[file].items())


def test_best_is_a_link_to_the_average_of_a_checkpoint_where_that_is_better_and_last_to_the_weights(calm):
    lines = journal(calm(1), "eval")
    for line in lines:
        assert line["loss"] == min(line["weights_loss"], line["average_loss"])
        assert line["averaged"] == (line["average_loss"] < line["weights_loss"])
    checkpoints = [path for path in (calm(1) / "checkpoints").glob("step_*/*.safetensors")]
    for name, averaged in (("best", lines[-1]["averaged"]), ("last", False)):
        file = calm(1) / name / "model.safetensors"
        (source,) = [path.name for path in checkpoints if path.stat().st_ino == file.stat().st_ino]
        assert source == ("average.safetensors" if averaged else "model.safetensors")


@pytest.mark.parametrize("world", (1, 2))
def test_a_run_stopped_and_resumed_has_the_bits_of_weights_and_average(home, calm, world):
    name = f"resumed{world}"
    for fault in ("forward:0:5:kill", "evaluate:0:6:kill", "forward:0:9:term", ""):
        done = train(home, world, fault, output_dir=name, is_keep_training="auto", **OPTIONS)
    assert done.codes == [0] * world, done.text
    assert equal(newest(home / name), newest(calm(world)))
    assert journal(home / name, "eval")[-1]["average_loss"] == journal(calm(world), "eval")[-1]["average_loss"]


def test_the_average_on_two_ranks_is_that_of_one(calm):
    one, two = (newest(calm(world))["average"] for world in (1, 2))
    raw = newest(calm(1))["model"]
    gap = sum((one[name] - two[name]).norm() ** 2 for name in one) ** 0.5
    assert gap < 0.05 * sum((one[name] - raw[name]).norm() ** 2 for name in one) ** 0.5


@pytest.mark.parametrize("count", [0, 2, 1000])
def test_memory_that_runs_out_while_the_average_is_in_place_leaves_the_weights(monkeypatch, store, tokenizer, count):
    model, seen = make_model(tokenizer.vocab_size), []
    average = WeightAverage(model.flat, 0.1)
    average.values.mul_(0.5)
    before = model.flat.masters.clone(), average.values.clone()

    def measure_short_of_memory(*args):
        monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults(f"evaluate:0:5:oom:{count}"))
        seen.append(model.flat.masters.clone())
        return measure(*args)

    monkeypatch.setattr(evaluation, "measure", measure_short_of_memory if count else measure)
    given = evaluation_of(model, store, tokenizer), average, PLAN, 5
    with pytest.raises(NothingFits) if count == 1000 else nullcontext():
        measured, losses = evaluation.measure_better(*given, lambda kind, **values: seen.append(kind))
        assert measured[0]["loss"] == min(losses["weights_loss"], losses["average_loss"])
        assert ("oom" in seen) == bool(count)
    assert not count or torch.equal(seen[0], before[1])
    assert torch.equal(model.flat.masters, before[0]) and torch.equal(average.values, before[1])


def test_memory_that_runs_out_in_evaluations_of_a_run_with_an_average_changes_no_bit(home, calm):
    done = train(home, 2, "evaluate:1:6:oom:3,evaluate:0:12:oom:2", output_dir="short", **OPTIONS)
    assert done.codes == [0, 0], done.text
    assert {line["where"] for line in journal(home / "short", "oom")} == {"evaluate"}
    assert equal(newest(home / "short"), newest(calm(2)))


def test_evaluations_that_never_fit_leave_a_checkpoint_from_which_weights_and_average_go_on(home, calm):
    done = train(home, 1, "evaluate:0:6:oom:1000", output_dir="never", **OPTIONS)
    assert done.codes == [1], done.text
    done = train(home, 1, output_dir="never", is_keep_training=True, **OPTIONS)
    assert done.codes == [0] and equal(newest(home / "never"), newest(calm(1))), done.text


def test_a_run_goes_on_with_an_average_that_it_began_without(home):
    assert train(home, 1, "forward:0:3:term", output_dir="later", **SHORT).codes == [0]
    done = train(home, 1, output_dir="later", is_keep_training=True, average=0.1, **SHORT)
    assert done.codes == [0] and "holds no average of the weights: it begins with them" in done.text, done.text


def test_a_wrong_average_is_refused_by_the_command_line(home):
    assert refused(train(home, 1, output_dir="none", average=0.7), "average=0.7: must be at most 0.5")
