"""Signals and other ranks, as the thread beside the work sees them: real processes, since only they hang and die."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from model.runtime import peers, watchdog
from model.runtime.distributed import gather_json, start_ranks, stop_ranks, vote
from model.runtime.watchdog import SIGNALS, leave_ranks, stop_asked, training_begins
from tests.ranks import fork_ranks, run_ranks, send, wait_for

TIMEOUT_S = 10


def wait_for_word(word, *paths):
    """Wait until each file has `word` in it."""
    deadline = time.monotonic() + 60
    while not all(path.exists() and word in path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"no {word} in {paths}"
        time.sleep(0.01)


def hang(rank, dead_seconds=peers.DEAD_SECONDS, kill=False):
    """Ranks of which one never comes to the vote, or is killed while the others are busy with something else."""
    peers.DEAD_SECONDS = dead_seconds
    ranks = start_ranks("gloo", TIMEOUT_S)
    vote(ranks, 0)
    if ranks.rank == rank:
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        print("hangs_at", time.time(), flush=True)
        sit_and_think(60)
    elif kill:
        time.sleep(60)
    vote(ranks, 0)
    return 0


def sit_and_think(seconds):
    time.sleep(seconds)


def test_a_rank_that_hangs_ends_all_in_time_is_named_and_every_stack_is_shown(tmp_path):
    rank = 0  # which keeps the store that the ranks hear of each other by
    done = run_ranks(3, hang, rank, folder=tmp_path, seconds=60)
    assert done.codes == [1, 1, 1], done.text
    (hung_at,) = [float(line.split()[1]) for line in done.text.splitlines() if line.startswith("hangs_at")]
    for other in range(3):
        path = tmp_path / f"rank{other}.txt"
        text = path.read_text()
        assert path.stat().st_mtime - hung_at < TIMEOUT_S, "a verdict takes a few beats to reach all"
        assert f"rank {rank} hangs: silent for" in text and "outside any collective" in text
        assert ("sit_and_think" in text) == (other == rank), "the stack tells where it hangs"
        assert "Thread 0x" in text


def test_a_rank_that_dies_while_the_others_are_busy_ends_them(tmp_path):
    done = run_ranks(3, hang, 1, 3.0, True, folder=tmp_path, seconds=30)
    assert done.codes == [1, -9, 1], done.text
    assert "rank 1 has died: no heartbeat for 3 s" in done.text


def die_before_joining():
    """Rank 0 is killed before there is a place to meet at."""
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    print("comes_at", time.time(), flush=True)
    start_ranks("gloo", TIMEOUT_S)


def test_a_rank_whose_partner_never_comes_ends_in_time_and_says_so(tmp_path):
    done = run_ranks(2, die_before_joining, folder=tmp_path, seconds=40)
    assert done.codes == [-9, 1], done.text
    came_at = float(done.text.split("comes_at")[1].split()[0])
    assert (tmp_path / "rank1.txt").stat().st_mtime - came_at < TIMEOUT_S + 2
    assert f"not all processes came within --ddp_timeout_s={TIMEOUT_S}; where each thread" in done.text


def hold_the_lock_of_the_interpreter():
    """Rank 1 sits in a call that lets no other thread of its process run."""
    ranks = start_ranks("gloo", TIMEOUT_S)
    vote(ranks, 0)
    if ranks.rank == 1:
        sys.setswitchinterval(1000)
        while True:
            pass
    vote(ranks, 0)


def test_a_rank_that_lets_no_thread_run_is_named_and_ends(tmp_path):
    done = run_ranks(2, hold_the_lock_of_the_interpreter, folder=tmp_path, seconds=40)
    assert done.codes == [1, -peers.SHOW], done.text
    assert "rank 1 hangs" in (tmp_path / "rank0.txt").read_text()
    assert "hold_the_lock_of_the_interpreter" in (tmp_path / "rank1.txt").read_text()


def wait_long():
    ranks = start_ranks("gloo", TIMEOUT_S)
    if ranks.rank == 1:
        for _ in range(26):
            time.sleep(0.25)
            stop_asked()
    vote(ranks, 0)
    stop_ranks()
    return 0


def test_a_rank_that_keeps_the_others_waiting_but_lives_is_waited_for(tmp_path):
    done = run_ranks(2, wait_long, folder=tmp_path, seconds=40)
    assert done.codes == [0, 0], done.text


def wait_to_be_asked():
    """Rank 0 waits in a vote for rank 1, which waits to be asked to stop."""
    ranks = start_ranks("gloo", 5)
    vote(ranks, 0)
    training_begins()
    print("ready", flush=True)
    while ranks.rank == 1 and not stop_asked():
        time.sleep(0.05)
    vote(ranks, 0)
    stop_ranks()
    return 0


def test_a_run_that_is_suspended_for_longer_than_ranks_may_be_silent_goes_on_and_obeys(tmp_path):
    processes = fork_ranks(2, wait_to_be_asked, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt", tmp_path / "rank1.txt")
    send(processes, signal.SIGSTOP)
    time.sleep(9)  # longer than the 5 s of ranks, and than those with what torch's groups were given on top
    send(processes, signal.SIGCONT)
    time.sleep(1)
    send(processes[:1], signal.SIGINT)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes == [0, 0], done.text
    assert done.text.count("this process did not run for ") == 2


def test_a_rank_that_alone_is_suspended_ends_the_others(tmp_path):
    processes = fork_ranks(2, wait_to_be_asked, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt", tmp_path / "rank1.txt")
    send(processes[:1], signal.SIGSTOP)  # it keeps the store that the ranks hear of each other by
    processes[1].join(10)
    send(processes[:1], signal.SIGCONT)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes[1] == 1 and done.codes[0] != 0, done.text
    assert "rank 0 has died or is stopped" in (tmp_path / "rank1.txt").read_text()


def think_on_when_asked_to_stop():
    watchdog.REPEAT_SECONDS = 0.5
    training_begins()
    print("ready", flush=True)
    while not stop_asked():
        time.sleep(0.01)
    print("asked", flush=True)
    sit_and_think(60)


def test_a_suspension_after_a_request_to_stop_is_no_second_request_and_a_real_one_is_heard(tmp_path):
    processes = fork_ranks(1, think_on_when_asked_to_stop, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt")
    send(processes)
    wait_for_word("asked", tmp_path / "rank0.txt")
    send(processes, signal.SIGSTOP)
    time.sleep(1.5)  # longer than a beat
    send(processes, signal.SIGCONT)
    time.sleep(0.7)
    assert processes[0].is_alive()
    send(processes)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes == [1] and "quitting" in done.text, done.text


def sit_with_a_watch_that_fails():
    watchdog.BEAT_SECONDS = "a second"
    sit_and_think(60)


def test_a_watch_that_fails_ends_the_process_with_the_reason_and_the_stacks(tmp_path):
    done = run_ranks(1, sit_with_a_watch_that_fails, folder=tmp_path, seconds=10)
    assert done.codes == [1], done.text
    assert "TypeError: " in done.text and "the watchdog failed" in done.text and "sit_and_think" in done.text


def wait_for_stop():
    ranks = start_ranks("gloo", 60)
    gather_json(ranks, "ready")
    print("ready", flush=True)
    training_begins()
    if ranks.rank == 0:  # inside a library's call, where Python runs no handler
        dist.all_reduce(torch.zeros(1), group=ranks.cpu_group)
    else:
        while not stop_asked():
            time.sleep(0.01)
        dist.all_reduce(torch.zeros(1), group=ranks.cpu_group)
    return 0 if stop_asked() else 3


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_a_rank_that_waits_in_a_library_s_call_reaches_the_others(tmp_path, number):
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
    """A process in which LLVM has worked, as in every run on a GPU: it puts its own handlers in place of others'."""
    from tests.nn.kernels.test_kernel_targets import compiling_for, launch_cross_entropy

    os.environ["TRITON_CACHE_DIR"] = os.getcwd()
    with pytest.MonkeyPatch.context() as patch, compiling_for(80, patch) as kernels:
        launch_cross_entropy()
    assert kernels
    return wait_to_be_stopped()


def have_it_given_to_an_older_thread():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # as it is for a thread that was there before the watch
    return wait_to_be_stopped()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("function", (compile_a_kernel, have_it_given_to_an_older_thread))
def test_a_signal_is_heard_whatever_a_library_does_with_handlers(tmp_path, function, number):
    processes = fork_ranks(1, function, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt")
    send(processes, number)
    done = wait_for(processes, tmp_path, 20)
    assert done.codes == [0], done.text
    assert f"{number.name}: stopping after this step" in done.text


def sit_with_a_broken_stderr():
    """As under `2>&1 | tee file` once a Ctrl+C has ended tee."""
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


def test_a_repeated_signal_quits_though_nobody_reads_what_is_said(tmp_path):
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
def test_a_signal_to_all_descendants_does_not_end_a_program_that_a_rank_waits_for(tmp_path, number):
    processes = fork_ranks(1, wait_for_an_assembler, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt")
    (assembler,) = psutil.Process(processes[0].pid).children()
    assembler.send_signal(number)
    assert wait_for(processes, tmp_path, 20).codes == [0]


def test_the_first_sign_of_a_stop_before_training_ends_a_process_that_does_nothing_about_it(tmp_path):
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


@pytest.mark.parametrize(("failure", "code"), (("", 0), ("no room", 1)))
def test_a_stopped_rank_that_takes_long_to_end_keeps_the_exit_code_that_it_would_have(tmp_path, failure, code):
    (process,) = fork_ranks(1, leave_and_sit, failure, folder=tmp_path)
    wait_for_word("sits", tmp_path / "rank0.txt")
    send([process], signal.SIGTERM)
    assert wait_for([process], tmp_path, 10).codes == [code]


def leave_and_sit(failure):
    os.environ["WORLD_SIZE"] = "2"
    leave_ranks(failure)
    sit()
