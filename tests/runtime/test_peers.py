"""A rank that dies, hangs or is suspended: real processes, since only they can."""

import ctypes
import os
import signal
import time

from torch.distributed import HashStore

from model.runtime import peers
from model.runtime.distributed import start_ranks, stop_ranks, vote
from model.runtime.watchdog import stop_asked, training_begins
from tests.ranks import fork_ranks, run_ranks, send, wait_for, wait_for_word

TIMEOUT_S = 10


def hang(rank, kill=False):
    """`rank` never joins the second vote; with `kill` it is killed while the others are busy, rank 0 elsewhere."""
    if kill:
        peers.DEAD_SECONDS, peers.GRACE_SECONDS = 5.0, 1.0
        if os.environ["RANK"] == "0":
            peers._machine = lambda: "another machine"
    ranks = start_ranks("gloo", 60 if kill else TIMEOUT_S)  # busy ranks make no progress: none may count as hung
    vote(ranks, 0)
    if ranks.rank == rank:
        if kill:
            time.sleep(2 * peers.BEAT_SECONDS)  # until the others know it
            os.kill(os.getpid(), signal.SIGKILL)
        print("hangs_at", time.time(), flush=True)
        sit_and_think(60)
    elif kill:
        time.sleep(60)
    vote(ranks, 0)
    return 0


def sit_and_think(seconds):
    time.sleep(seconds)


def test_when_a_rank_hangs_all_end_in_time_name_it_and_print_their_stacks(tmp_path):
    rank = 0  # it hosts the store of the heartbeats
    done = run_ranks(3, hang, rank, folder=tmp_path, seconds=60)
    assert done.codes == [1, 1, 1], done.text
    (hung_at,) = [float(line.split()[1]) for line in done.text.splitlines() if line.startswith("hangs_at")]
    for other in range(3):
        path = tmp_path / f"rank{other}.txt"
        text = path.read_text()
        assert path.stat().st_mtime - hung_at < TIMEOUT_S, "a verdict takes a few heartbeats to reach all ranks"
        assert f"rank {rank} hangs: silent for" in text and "outside any collective" in text
        assert ("sit_and_think" in text) == (other == rank), "the stack shows where it hangs"
        assert "Thread 0x" in text


def test_a_rank_that_dies_while_the_others_are_busy_ends_them(tmp_path):
    done = run_ranks(3, hang, 1, True, folder=tmp_path, seconds=30)
    assert done.codes == [1, -9, 1], done.text
    elsewhere, here = ((tmp_path / f"rank{other}.txt").read_text() for other in (0, 2))
    assert "rank 1 has died: no heartbeat for 5 s" in elsewhere
    assert "rank 1 has died: its process is gone" in here


def hold_the_lock_of_the_interpreter():
    """Rank 1 is in a library's call that lets no other thread of its process run."""
    ranks = start_ranks("gloo", TIMEOUT_S)
    vote(ranks, 0)
    if ranks.rank == 1:
        while True:
            ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter's lock
    vote(ranks, 0)


def test_a_rank_whose_threads_cannot_run_is_named_and_killed(tmp_path):
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


def test_a_rank_that_is_slow_but_makes_progress_is_waited_for(tmp_path):
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


def test_a_run_suspended_for_longer_than_the_time_out_continues_and_still_obeys_a_stop(tmp_path):
    processes = fork_ranks(2, wait_to_be_asked, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt", tmp_path / "rank1.txt")
    send(processes, signal.SIGSTOP)
    time.sleep(9)  # longer than the time-out of 5 s and what torch would add to it
    send(processes, signal.SIGCONT)
    time.sleep(1)
    send(processes[:1], signal.SIGINT)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes == [0, 0], done.text
    assert done.text.count("this process did not run for ") == 2


def test_the_others_end_when_only_one_rank_is_suspended(tmp_path):
    processes = fork_ranks(2, wait_to_be_asked, folder=tmp_path)
    wait_for_word("ready", tmp_path / "rank0.txt", tmp_path / "rank1.txt")
    send(processes[:1], signal.SIGSTOP)  # rank 0 hosts the store of the heartbeats
    processes[1].join(10)
    send(processes[:1], signal.SIGCONT)
    done = wait_for(processes, tmp_path, 10)
    assert done.codes[1] == 1 and done.codes[0] != 0, done.text
    assert "rank 0 has died or is stopped" in (tmp_path / "rank1.txt").read_text()


def test_a_failed_collective_is_told_in_one_line_with_the_rank_that_ended():
    watched = peers.Peers(HashStore(), 0, 2, TIMEOUT_S, peers.Heartbeat())
    watched.heartbeats["1"] = peers.Heartbeat(ended="b.jsonl: a row is too long")
    error = (
        "[/__w/gloo/pair.cc:553] closed by peer [127.0.0.1]:2. This may be remote. GLHF!\nframe #0: c10::Error::Error"
    )
    message = watched.explain_failure("a vote", RuntimeError(error))
    assert message == "rank 1 ended: b.jsonl: a row is too long; a vote failed: closed by peer [127.0.0.1]:2"
