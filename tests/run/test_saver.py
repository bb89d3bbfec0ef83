"""Saves happen while training goes on; a disk or memory error costs at most one checkpoint."""

import threading
import time
from dataclasses import asdict, replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from model.formats.model_card import CardFacts
from model.run import checkpoint
from model.run import saver as saver_module
from model.run.checkpoint import TrainState, checkpoint_paths, read_checkpoint
from model.run.journal import Journal, read_journal
from model.run.saver import Saver, check_equal_weights, checksum, try_export
from model.runtime import fault_injection, watchdog
from model.runtime.distributed import start_ranks, stop_ranks
from model.runtime.peers import awake_seconds
from tests.parts import ALONE, PLAN, make_model
from tests.ranks import run_ranks

STATE = TrainState(step=5, plan=asdict(PLAN))


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "metrics.jsonl") as journal:
        yield journal


@pytest.fixture
def saver(tmp_path, journal):
    with Saver(ALONE, tmp_path, 2, journal) as saver:
        yield saver


def lines(tmp_path):
    return [line for line in read_journal(tmp_path / "metrics.jsonl") if line["kind"] == "save"]


def hold(monkeypatch):
    """Block every save until the returned event is set."""
    go = threading.Event()
    monkeypatch.setattr(fault_injection, "fire", lambda site, step: go.wait(20) and False)
    return go


def test_a_save_writes_the_weights_of_its_step_even_if_they_change_meanwhile(
    tmp_path, saver, model, optimizer, monkeypatch
):
    go = hold(monkeypatch)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    saver.save(replace(STATE, shape=asdict(model.config)), model, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
            optimizer.state[p]["exp_avg"].add_(1)
    assert not checkpoint_paths(tmp_path), "the save is still blocked, and training went on"
    go.set()
    saver.join()
    read = read_checkpoint(tmp_path / "checkpoints" / "step_00000005")
    assert all(torch.equal(read.tensors[name], weights[name]) for name in weights)
    assert all(torch.equal(read.optimizer[f"{name}/exp_avg"], moments[name]) for name in moments)


def test_a_save_waits_for_the_previous_one(tmp_path, saver, model, optimizer, monkeypatch):
    go = hold(monkeypatch)
    saver.save(STATE, model, optimizer)
    threading.Timer(0.3, go.set).start()
    started = time.monotonic()
    saver.save(replace(STATE, step=6), model, optimizer)
    assert time.monotonic() - started >= 0.25
    saver.join()
    assert [line["step"] for line in lines(tmp_path)] == [5, 6]


def test_each_save_defers_signals_from_its_own_start(saver, model, optimizer, monkeypatch):
    go = {5: threading.Event(), 6: threading.Event()}
    monkeypatch.setattr(fault_injection, "fire", lambda site, step: go[step].wait(20) and False)
    saver.save(STATE, model, optimizer)
    threading.Timer(1, go[5].set).start()
    saver.save(replace(STATE, step=6), model, optimizer)
    (since,) = watchdog._saving
    go[6].set()
    assert awake_seconds() - since < 0.5


def test_a_state_that_is_saved_already_is_not_written_again(tmp_path, saver, model, optimizer):
    for _ in range(2):
        saver.save(STATE, model, optimizer)
    saver.join()
    assert len(lines(tmp_path)) == 1


def test_an_evaluation_s_result_is_written_beside_tensors_that_are_saved_already(tmp_path, saver, model, optimizer):
    state = replace(STATE, shape=asdict(model.config))
    path = tmp_path / "checkpoints" / "step_00000005"
    saver.save(state, model, optimizer)
    saver.join()
    tensors = (path / "model.safetensors").stat().st_ino
    saver.save(replace(state, evaluated_step=5, best_loss=1.5, best_step=5), model, optimizer)
    saver.join()
    read = read_checkpoint(path)
    assert (read.state.evaluated_step, read.state.best_loss) == (5, 1.5)
    assert (path / "model.safetensors").stat().st_ino == tensors and len(lines(tmp_path)) == 1


def test_an_export_and_an_evaluation_s_result_do_not_wait_for_the_rest_of_a_save(
    tmp_path, saver, model, tokenizer, optimizer, monkeypatch
):
    go, state = hold(monkeypatch), replace(STATE, shape=asdict(model.config))
    saver.save(state, model, optimizer)
    assert try_export(model, tokenizer, tmp_path / "best", {}, CardFacts(), saver.weights_files(state)) == ""
    saver.save(replace(state, evaluated_step=5), model, optimizer)
    assert not checkpoint_paths(tmp_path), "the save is still blocked"
    go.set()
    saver.join()
    (path,) = checkpoint_paths(tmp_path)
    files = [path / "model.safetensors", tmp_path / "best" / "model.safetensors", saver.weights_files(state)[1]]
    assert len({file.stat().st_ino for file in files}) == 1 and not saver.weights_files(state)[0].exists()
    assert read_checkpoint(path).state.evaluated_step == 5 and len(lines(tmp_path)) == 1
    assert saver.weights_files(replace(state, step=6)) == ()


def test_an_evaluation_s_result_is_saved_with_the_tensors_of_a_save_that_failed(
    tmp_path, saver, model, optimizer, monkeypatch
):
    state = replace(STATE, shape=asdict(model.config))
    monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults("save:0:5:enospc"))
    saver.save(state, model, optimizer)
    saver.save(replace(state, evaluated_step=5), model, optimizer)
    saver.join()
    assert saver.failure == "" and [("error" in line) for line in lines(tmp_path)] == [True, False]
    assert read_checkpoint(checkpoint_paths(tmp_path)[0]).state.evaluated_step == 5


def test_without_hard_links_an_evaluation_s_result_is_saved_with_its_tensors(
    tmp_path, saver, model, optimizer, monkeypatch
):
    state = replace(STATE, shape=asdict(model.config))
    saver.save(state, model, optimizer)
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no hard links here")))
    saver.save(replace(state, evaluated_step=5), model, optimizer)
    saver.join()
    assert read_checkpoint(tmp_path / "checkpoints" / "step_00000005").state.evaluated_step == 5
    assert len(lines(tmp_path)) == 2


def test_the_journal_has_the_seconds_of_the_snapshot_and_of_the_write(tmp_path, saver, model, optimizer):
    saver.save(STATE, model, optimizer)
    saver.join()
    (line,) = lines(tmp_path)
    assert line["path"].endswith("step_00000005") and line["bytes"] > 3 * sum(p.nbytes for p in model.parameters())
    assert 0 < line["snapshot_seconds"] < line["write_seconds"]


@pytest.mark.parametrize("fault", ["enospc", "eio", "oom:2", "cpu:2"])
def test_a_failed_save_is_logged_and_journalled_and_the_next_one_tries_again(
    tmp_path, saver, model, optimizer, monkeypatch, caplog, fault
):
    saver.save(STATE, model, optimizer)
    monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults(f"save:0:6:{fault}"))
    saver.save(replace(STATE, step=6), model, optimizer)
    saver.join()
    assert "injected" in saver.failure
    assert "no checkpoint of step 6" in caplog.text
    assert [path.name for path in checkpoint_paths(tmp_path)] == ["step_00000005"]
    saver.save(replace(STATE, step=7, shape=asdict(model.config)), model, optimizer)
    saver.join()
    assert saver.failure == ""
    assert [("error" in line, line["step"]) for line in lines(tmp_path)] == [(False, 5), (True, 6), (False, 7)]
    assert read_checkpoint(checkpoint_paths(tmp_path)[0]).state.step == 7


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_ends_in_an_unexpected_error_counts_as_failed(tmp_path, saver, model, optimizer, monkeypatch):
    fail_once(monkeypatch, "save_checkpoint", KeyError("optimizer.safetensors"))
    saver.save(STATE, model, optimizer)
    saver.join()
    assert "step 5 ended without a result" in saver.failure


@pytest.mark.parametrize("kind", ["oom", "cpu", "real"])
def test_a_save_that_runs_out_of_memory_once_is_retried(tmp_path, saver, model, optimizer, monkeypatch, kind):
    monkeypatch.setattr(fault_injection, "_faults", fault_injection.parse_faults(f"save:0:5:{kind}"))
    saver.save(replace(STATE, shape=asdict(model.config)), model, optimizer)
    saver.join()
    assert saver.failure == ""
    assert read_checkpoint(checkpoint_paths(tmp_path)[0]).state.step == 5
    events = [(line["kind"], line.get("where")) for line in read_journal(tmp_path / "metrics.jsonl")]
    assert events == [("oom", "save"), ("save", None)]


def test_a_snapshot_that_runs_out_of_memory_once_is_retried(tmp_path, saver, model, optimizer, monkeypatch):
    fail_once(monkeypatch, "snapshot_of", MemoryError("host"))
    saver.save(STATE, model, optimizer)
    saver.join()
    assert saver.failure == "" and len(checkpoint_paths(tmp_path)) == 1


def test_an_export_that_runs_out_of_memory_once_is_retried(tmp_path, model, tokenizer, monkeypatch):
    fail_once(monkeypatch, "export_model", torch.OutOfMemoryError("CUDA out of memory"))
    assert try_export(model, tokenizer, tmp_path / "best", {}, CardFacts()) == ""
    assert (tmp_path / "best" / "model.safetensors").exists()


def fail_once(monkeypatch, name, error):
    """Let the function `name` of saver raise `error` at its first call."""
    original, calls = getattr(saver_module, name), []

    def fail(*args):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return original(*args)

    monkeypatch.setattr(saver_module, name, fail)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OSError("disk"), MemoryError("host")])
def test_a_failed_export_is_logged_and_does_not_end_the_run(tmp_path, model, tokenizer, monkeypatch, caplog, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(saver_module, "export_model", fail)
    assert try_export(model, tokenizer, tmp_path / "best", {}, CardFacts()) == str(error)
    assert str(error) in caplog.text


def test_free_disk_space_is_checked_before_anything_is_written(tmp_path, saver, model, optimizer, monkeypatch):
    monkeypatch.setattr(checkpoint, "SPARE_BYTES", 2**62)
    saver.save(STATE, model, optimizer)
    saver.join()
    assert "bytes and the disk has" in saver.failure and "make room" in saver.failure
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_checksum_changes_with_one_bit_of_one_weight(model):
    before = checksum(model)
    bits = model.shared.weight.detach().view(torch.int32)
    for bit in (0, 17, 31):
        bits[3, 5] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert checksum(model) != before
        bits[3, 5] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert checksum(model) == before
    check_equal_weights(ALONE, model, 1)


@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_the_checksum_includes_the_last_weight_for_even_and_odd_counts(bit):
    for count, dtype in product((1, 2, 5, 6), (torch.float32, torch.bfloat16)):
        held = torch.ones(count, dtype=dtype)
        weights = SimpleNamespace(flat=SimpleNamespace(weights=[torch.ones(3), held]))
        before = checksum(weights)
        held.view(torch.uint8)[-1 - bit // 8 % dtype.itemsize] ^= 1 << bit % 8
        assert checksum(weights) != before


def test_the_checksum_allocates_less_than_4096_bytes():
    weights = SimpleNamespace(flat=SimpleNamespace(weights=[torch.ones(2**20)]))
    with torch.profiler.profile(profile_memory=True) as profiler:
        checksum(weights)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events()) < 4096


def weights_that_differ():
    ranks = start_ranks("gloo", 60)
    model = make_model(100)
    check_equal_weights(ranks, model, 6)
    if ranks.rank == 1:
        with torch.no_grad():
            model.shared.weight[0, 0] += 1e-6
    try:
        check_equal_weights(ranks, model, 7)
    except RuntimeError as error:
        print(error)
        return 5
    finally:
        stop_ranks()


def test_weights_that_differ_between_ranks_end_the_run_and_the_minority_is_named(tmp_path):
    done = run_ranks(3, weights_that_differ, folder=tmp_path)
    assert done.codes == [5, 5, 5], done.text
    assert done.text.count("the weights differ between ranks after step 7") == 3
    assert "suspect: ranks [1]" in done.text
