"""Signals that ask for a stop, and threads that fail: real processes, since signals and exits are theirs."""

import os
import signal
import subprocess
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from model.runtime import watchdog
from model.runtime.distributed import gather_json, start_ranks
from model.runtime.watchdog import SIGNALS, leave_ranks, stop_asked, training_begins
from tests.ranks import fork_ranks, run_ranks, send, wait_for, wait_for_word


def sit_and_think(seconds):
    time.sleep(seconds)


def think_on_when_asked_to_stop():
    watchdog.REPEAT_SECONDS = 0.5
    training_begins()
    print("ready", flush=True)
    while not stop_asked():
        time.sleep(0.01)
    print("asked", flush=True)
    sit_and_think(60)


def test_a_suspension_after_a_request_to_stop_is_no_second_request_but_a_signal_is(tmp_path):
    processes = fork_ranks(1, think_on_when_asked_to_stop, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt")
    send(processes)
    wait_for_word("asked", tmp_path / "rank0.txt")
    send(processes, signal.SIGSTOP)
    time.sleep(1.5)  # longer than BEAT_SECONDS
    send(processes, signal.SIGCONT)
    time.sleep(0.7)
    assert processes[0].is_alive()
    send(processes)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes == [1] and "quitting" in done.text, done.text


def sit_with_a_watchdog_that_fails():
    watchdog.BEAT_SECONDS = "a second"
    sit_and_think(60)


def test_a_watchdog_that_fails_ends_the_process_with_the_reason_and_the_stacks(tmp_path):
    done = run_ranks(1, sit_with_a_watchdog_that_fails, folder=tmp_path, seconds=10)
    assert done.codes == [1], done.text
    assert "TypeError: " in done.text and "the watchdog failed" in done.text and "sit_and_think" in done.text


def wait_for_stop():
    ranks = start_ranks("gloo", 60)
    gather_json(ranks, "ready")
    print("ready", flush=True)
    training_begins()
    if ranks.rank == 0:  # in a library call, where Python runs no handler
        dist.all_reduce(torch.zeros(1), group=ranks.cpu_group)
    else:
        while not stop_asked():
            time.sleep(0.01)
        dist.all_reduce(torch.zeros(1), group=ranks.cpu_group)
    return 0 if stop_asked() else 3


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_a_rank_inside_a_library_call_reaches_the_others(tmp_path, number):
    processes = fork_ranks(2, wait_for_stop, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt", tmp_path / "rank1.txt")
    send(processes[:1], number)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes == [0, 0], done.text


def wait_to_be_stopped():
    training_begins()
    print("ready", flush=True)
    deadline = time.monotonic() + 10
    while not stop_asked():
        if time.monotonic() > deadline:
            return 3
        time.sleep(0.01)
    return 0


def compile_a_kernel():
    """A process in which LLVM has replaced the signal handlers, as in every run on a GPU."""
    from tests.nn.kernels.test_kernel_targets import compiling_for, launch_cross_entropy

    os.environ["TRITON_CACHE_DIR"] = os.getcwd()
    with pytest.MonkeyPatch.context() as patch, compiling_for(80, patch) as kernels:
        launch_cross_entropy()
    assert kernels
    return wait_to_be_stopped()


def unblock_signals_and_wait():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # as in a thread that started before watch_signals
    return wait_to_be_stopped()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("function", (compile_a_kernel, unblock_signals_and_wait))
def test_a_signal_asks_for_a_stop_whatever_a_library_does_to_the_handlers(tmp_path, function, number):
    processes = fork_ranks(1, function, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt")
    send(processes, number)
    done = wait_for(processes, tmp_path, 20)
    assert done.codes == [0], done.text
    assert f"{number.name}: stopping after this step" in done.text


def sit_with_a_broken_stderr():
    """stderr is a pipe without a reader, as with `2>&1 | tee file` after Ctrl+C has ended tee."""
    watchdog.REPEAT_SECONDS = 0.5
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    training_begins()
    print("sits", flush=True)
    while not stop_asked():
        time.sleep(0.01)
    print("stops", flush=True)
    sit_and_think(60)


def test_a_repeated_signal_quits_even_if_stderr_is_broken(tmp_path):
    processes = fork_ranks(1, sit_with_a_broken_stderr, folder=tmp_path)
    for word in ("sits", "stops"):
        wait_for_word(word, tmp_path / "rank0.txt")
        send(processes, signal.SIGINT)
        time.sleep(1)
    assert wait_for(processes, tmp_path, 10).codes == [1]


def wait_for_an_assembler():
    with subprocess.Popen(["sleep", "1"]) as assembler:
        print("ready", flush=True)
    return assembler.returncode


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_all_descendants_does_not_kill_a_program_that_a_rank_runs(tmp_path, number):
    processes = fork_ranks(1, wait_for_an_assembler, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt")
    (assembler,) = psutil.Process(processes[0].pid).children()
    assembler.send_signal(number)
    assert wait_for(processes, tmp_path, 20).codes == [0]


def test_the_first_signal_before_training_ends_a_process_that_does_not_end_by_itself(tmp_path):
    (process,) = fork_ranks(1, sit, folder=tmp_path)
    wait_for_word("sits", tmp_path / "rank0.txt")
    send([process], signal.SIGTERM)
    done = wait_for([process], tmp_path, 10)
    assert done.codes == [0]
    assert "SIGTERM: stopping before the first step" in done.text


def sit():
    watchdog.GRACE_SECONDS = 1.0
    print("sits", flush=True)
    sit_and_think(60)


@pytest.mark.parametrize(("failure", "code"), (("", 0), ("out of memory", 1)))
def test_a_stopped_rank_that_is_slow_to_end_keeps_its_exit_code(tmp_path, failure, code):
    (process,) = fork_ranks(1, leave_and_sit, failure, folder=tmp_path)
    wait_for_word("sits", tmp_path / "rank0.txt")
    send([process], signal.SIGTERM)
    assert wait_for([process], tmp_path, 10).codes == [code]


def leave_and_sit(failure):
    os.environ["WORLD_SIZE"] = "2"
    leave_ranks(failure)
    sit()
