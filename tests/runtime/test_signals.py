"""A signal stops all ranks at the same step with a checkpoint, and a resumed run loses nothing."""

import contextlib
import functools
import json
import os
import pty
import re
import shlex
import signal
import threading
import time

import psutil
import pytest

from model.runtime import watchdog
from tests.ranks import launch, launcher, send, wait_for, wait_for_launch, wait_for_word
from tests.tiny import furnish, ids_by_epoch, journal, start, train, weights_hash, words
from train_low_mem import main

LONG = dict(epochs=10, save_steps=1000, dropout=0.1)
STEPS = 60
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOP_SECONDS = 20


@pytest.fixture(scope="module")
def calm_hash(home):
    """sha256 of the weights of an undisturbed run on two ranks."""

    @functools.cache
    def run():
        done = train(home, 2, output_dir="calm", **LONG)
        assert done.codes == [0, 0], done.text
        return weights_hash(home / "calm")

    return run


class Shell:
    """An interactive shell with job control on a terminal of its own."""

    def __init__(self, folder):
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], os.environ | dict(OMP_NUM_THREADS="1"))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):  # the shell has ended
            while data := os.read(self._terminal, 2**16):
                self.text += data.decode(errors="replace")

    def type(self, text):
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern, seconds=60):
        """The first match of `pattern` in the terminal's output."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"no {pattern} on the terminal:\n{self.text}"
            time.sleep(0.02)
        return found


@pytest.fixture
def shell(home):
    shell = Shell(home)
    yield shell
    children = psutil.Process(shell.pid).children(recursive=True)
    for process in (*children, psutil.Process(shell.pid)):
        process.kill()
    os.waitpid(shell.pid, 0)


def test_after_ctrl_z_and_fg_twice_ctrl_c_stops_with_a_checkpoint(home, shell):
    command = [*launcher("python"), *words(output_dir="foreground", **LONG | dict(epochs=10_000))]
    shell.type(shlex.join(map(str, command)) + "\n")
    wait_for_steps(home / "foreground", 3)
    (run,) = psutil.Process(shell.pid).children()
    for times in (1, 2):
        shell.type("\x1a")
        shell.wait_for(rf"(?s)(Stopped.*){{{times}}}")
        assert run.status() == psutil.STATUS_STOPPED
        time.sleep(1.2)  # longer than BEAT_SECONDS
        shell.type("fg\n")
        wait_for_steps(home / "foreground", 3)
    shell.type("\x03")
    shell.wait_for("SIGINT: stopping after this step")
    shell.wait_for("stopped on request at step", STOP_SECONDS)
    shell.type("echo code=$?.\n")
    assert shell.wait_for(r"code=(\d+)\.")[1] == "0"
    stop = journal(home / "foreground", "stop")[-1]
    assert (home / "foreground" / "checkpoints" / "LATEST").read_text() == f"step_{stop['step']:08d}"


def wait_for_steps(run_dir, steps, seconds=60):
    """Wait until the run has done `steps` more steps."""
    wait_for_lines(run_dir, "train", count_lines(run_dir, "train") + steps, seconds)


def wait_for_lines(run_dir, kind, number, seconds=60):
    """Wait until the journal has `number` lines of this kind."""
    deadline = time.monotonic() + seconds
    while count_lines(run_dir, kind) < number:
        assert time.monotonic() < deadline, f"{run_dir} did not reach {number} {kind} lines within {seconds} s"
        time.sleep(0.005)


def count_lines(run_dir, kind):
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(f'"kind":"{kind}"'.encode()) if path.exists() else 0


def check_stop(run_dir, asked_at):
    """Both ranks stopped at the same step, in time, with a checkpoint of it; returns that step."""
    stop = journal(run_dir, "stop")[-1]
    last_steps = {json.loads(path.read_text().splitlines()[-1])["step"] for path in run_dir.glob("samples_rank*.jsonl")}
    assert (last_steps, stop["reason"]) == ({stop["step"]}, "asked")
    assert stop["time"] - asked_at < STOP_SECONDS
    assert (run_dir / "checkpoints" / "LATEST").read_text() == f"step_{stop['step']:08d}"
    assert stop["step"] < STEPS, "the run was over before it was asked to stop: this test checked nothing"
    return stop["step"]


def finish_and_compare(home, name, calm_hash):
    done = train(home, 2, output_dir=name, is_keep_training=True, **LONG)
    assert done.codes == [0, 0], done.text
    assert journal(home / name, "stop")[-1]["reason"] == "finished"
    assert weights_hash(home / name) == calm_hash()
    assert all(ids == list(range(len(ids))) for ids in ids_by_epoch(home / name).values())


def test_each_signal_to_any_rank_stops_all_at_one_step_and_the_resumed_run_ends_with_the_same_weights(home, calm_hash):
    for number, receivers in zip(SIGNALS, (slice(2), slice(1), slice(1, 2)), strict=True):
        processes = start(home, 2, output_dir="asked", is_keep_training="auto", **LONG)
        wait_for_steps(home / "asked", 3)
        asked_at = time.time()
        send(processes[receivers], number)
        done = wait_for(processes, home)
        assert done.codes == [0, 0], done.text
        check_stop(home / "asked", asked_at)
    finish_and_compare(home, "asked", calm_hash)


def test_two_signals_during_a_save_lose_no_checkpoint(home):
    processes = start(home, 1, "save:0:4:slow", output_dir="behind", **LONG | dict(save_steps=4))
    wait_for_steps(home / "behind", 4)
    asked_at = time.time()
    send(processes, signal.SIGINT)
    time.sleep(3.5)  # longer than REPEAT_SECONDS
    send(processes, signal.SIGTERM)
    done = wait_for(processes, home)
    assert done.codes == [0], done.text
    stop = check_stop(home / "behind", asked_at)
    assert [line["step"] for line in journal(home / "behind", "save")] == [4, stop]


def test_no_rank_quits_at_a_second_signal_while_another_writes_a_checkpoint(home):
    faults = ("forward:0:4:slow", "save:0:4:slow")  # the step is longer than REPEAT_SECONDS
    processes = start(home, 2, ",".join(faults), output_dir="both", **LONG)
    for fault in faults:
        wait_for_word(f"{fault} fires", home / "rank0.txt")
        send(processes, signal.SIGINT)  # the second one before rank 1 has heard of the save
    done = wait_for(processes, home)
    assert done.codes == [0, 0], done.text
    assert (home / "both" / "checkpoints" / "LATEST").read_text() == "step_00000004"


def main_with_saves_of_at_most_a_second(words):
    watchdog.MAX_SAVING_SECONDS = 1.0
    return main(words)


def test_repeated_signals_quit_a_save_that_hangs(home):
    options = LONG | dict(save_steps=4)
    function = main_with_saves_of_at_most_a_second
    processes = start(home, 1, "save:0:4:hang", output_dir="hung", function=function, **options)
    wait_for_steps(home / "hung", 4)
    send(processes, signal.SIGINT)
    time.sleep(3.5)
    send(processes, signal.SIGINT)
    done = wait_for(processes, home, 10)
    assert done.codes == [1] and "quitting without a checkpoint" in done.text


def test_an_evaluation_before_a_kill_is_not_repeated(home):
    options = LONG | dict(eval_steps=4, save_steps=1000, epochs=1)
    processes = start(home, 1, "forward:0:6:hang", output_dir="once", **options)
    state = home / "once" / "checkpoints" / "step_00000004" / "state.json"
    wait_for_word('"evaluated_step": 4', state)
    send(processes, signal.SIGKILL)
    wait_for(processes, home)
    assert train(home, 1, output_dir="once", is_keep_training=True, **options).codes == [0]
    written = map(json.loads, (home / "once" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in written if line["kind"] == "eval"] == [4, 6]


def test_a_stop_in_an_evaluation_writes_its_checkpoint_once(home):
    train(home, 1, "evaluate:0:6:int", output_dir="stopped", **LONG | dict(save_steps=1000))
    assert [line["step"] for line in journal(home / "stopped", "save")] == [6]


def test_a_stop_in_an_evaluation_retries_a_save_that_the_disk_refused(home):
    done = train(home, 1, "save:0:6:enospc,evaluate:0:6:int", output_dir="again", **LONG)
    assert done.codes == [0], done.text
    assert ["error" in line for line in journal(home / "again", "save")] == [True, False]
    assert (home / "again" / "checkpoints" / "LATEST").read_text() == "step_00000006"


def test_a_kill_in_an_evaluation_loses_no_step_before_it(home):
    processes = start(home, 1, "evaluate:0:6:slow,evaluate:0:6:kill", output_dir="evaluated", **LONG)
    wait_for(processes, home)
    assert (home / "evaluated" / "checkpoints" / "LATEST").read_text() == "step_00000006"
    assert train(home, 1, output_dir="evaluated", is_keep_training=True, **LONG | dict(epochs=1)).codes == [0]
    (evaluation,) = journal(home / "evaluated", "eval")
    assert evaluation["step"] == 6


def test_signals_half_a_second_apart_are_one_request(home, calm_hash):
    processes = start(home, 2, "forward:all:4:slow", output_dir="repeated", **LONG)
    wait_for_steps(home / "repeated", 3)
    asked_at = time.time()
    for number in (signal.SIGINT, signal.SIGINT, *SIGNALS):
        send(processes, number)
        time.sleep(0.5)
    assert all(process.is_alive() for process in processes), "the step was over: this test checked nothing"
    done = wait_for(processes, home)
    assert done.codes == [0, 0], done.text
    assert check_stop(home / "repeated", asked_at) == 4
    finish_and_compare(home, "repeated", calm_hash)


def test_a_signal_in_an_evaluation_or_a_save_is_a_stop_like_any_other(home, calm_hash):
    faults = {4: "forward:1:4:term,save:0:4:term", 6: "evaluate:1:6:term", 12: "generate:0:12:int", 18: "save:0:18:int"}
    options = LONG | dict(save_steps=6, bleu_pairs=2, max_new_tokens=4, is_keep_training="auto")
    for step, fault in faults.items():
        asked_at = time.time()
        done = train(home, 2, fault, output_dir="within", **options)
        assert done.codes == [0, 0], done.text
        assert all(f"{word} fires" in done.text for word in fault.split(",")), done.text
        assert check_stop(home / "within", asked_at) == step
    finish_and_compare(home, "within", calm_hash)


@pytest.mark.parametrize(("number", "codes"), ((signal.SIGTERM, [0, 0]), (signal.SIGKILL, [-9, 1])))
def test_a_signal_to_the_rank_that_tokenises_ends_the_ranks_that_wait_for_it(tmp_path, number, codes):
    furnish(tmp_path)
    lines = (tmp_path / "train.jsonl").read_bytes()
    (tmp_path / "long.jsonl").write_bytes(lines * 4000)
    processes = start(tmp_path, 2, output_dir="run", train_file="long.jsonl", max_seq_len=24)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("model_save/tokens/.*.tmp/ids.arrow")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    send(processes[:1], number)
    done = wait_for(processes, tmp_path, STOP_SECONDS)
    assert done.codes == codes, done.text
    assert not list(tmp_path.glob("model_save/tokens/*/meta.json")), "the file was too short: this test checked nothing"


def test_a_second_signal_long_after_the_first_quits_a_step_that_does_not_end(home):
    (process,) = start(home, 1, "forward:0:3:hang", output_dir="stuck", **LONG)
    wait_for_steps(home / "stuck", 2)
    send([process])
    time.sleep(3.2)
    send([process])
    done = wait_for([process], home, seconds=10)
    assert done.codes == [1]
    assert "stopping after this step" in done.text and "quitting" in done.text


@pytest.mark.parametrize("receivers", ("the launcher", "the group and every descendant"))
def test_ctrl_c_under_accelerate_launch_stops_with_a_checkpoint(home, calm_hash, receivers):
    name = receivers.replace(" ", "_")
    process = launch([*launcher("accelerate"), *words(output_dir=name, **LONG | dict(epochs=100))], home)
    wait_for_steps(home / name, 3)
    asked_at = time.time()
    if receivers == "the launcher":
        os.kill(process.pid, signal.SIGINT)
    else:  # a terminal's Ctrl+C, then a shell script's trap that signals every descendant
        descendants = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.send_signal(signal.SIGINT)
    _, text = wait_for_launch(process, home)
    stop = journal(home / name, "stop")
    assert stop, text
    assert check_stop(home / name, asked_at) < STEPS
