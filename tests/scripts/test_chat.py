import json
import os
import pty
import re
import resource
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from model.data.answer_parts import join_parts
from model.formats.weights import model_directory
from model.generate.sampling import Sampling
from model.serve.answering import load_chat_model
from scripts.chat import DIM, ESCAPES, NOT_DIM, Talk, greet, main, respond
from tests.knowing import PAIRS, write_knowing_model

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chat.py"
ENVIRONMENT = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}  # more threads do not speed up a tiny model
LONG_ANSWERS = ["--max_new_tokens", "100000", "--repetition_penalty", "0.01"]  # favours a token that was there
SECONDS = 60


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with model_save/tiny/best, a model overfitted on PAIRS."""
    folder = tmp_path_factory.mktemp("project")
    write_knowing_model(folder / "model_save" / "tiny" / "best")
    (folder / "model_save" / "tiny" / "config.json").write_text("{}")
    single = shutil.copytree(folder / "model_save" / "tiny" / "best", folder / "single")
    (single / "generation_config.json").write_text(json.dumps(dict(chat_trainer=dict(single_turn=True))))
    return folder


def chat_through_pipe(folder, questions, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=folder, env=ENVIRONMENT, input=questions.encode(),
        capture_output=True, timeout=SECONDS,
    )  # fmt: skip


def said(talk, question):
    """The text of the answer."""
    return join_parts(talk.ask(question)).text


class Terminal:
    """chat.py in a pseudo terminal."""

    def __init__(self, folder, *arguments):
        self.output = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(sys.executable, [sys.executable, str(SCRIPT), *arguments], ENVIRONMENT)

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, text):
        """The output up to the end of `text`; later output is kept for the next call."""
        deadline = time.monotonic() + SECONDS
        while text.encode() not in self.output:
            assert select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0], self.output.decode()
            self.output += os.read(self.fd, 4096)
        seen, _, self.output = self.output.partition(text.encode())
        return seen.decode() + text

    def exit_code(self, key):
        """Type `key`, read the rest of the output and return the exit code of the process.

        Types it again every second until there is output: readline loses a signal that comes just after its prompt.
        """
        self.type(key)
        for _ in range(SECONDS):
            if select.select([self.fd], [], [], 1)[0]:
                break
            self.type(key)
        try:
            while data := os.read(self.fd, 4096):
                self.output += data
        except OSError:  # Linux reports the end of a pseudo terminal so
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_questions_from_a_pipe_are_answered_one_after_the_other_and_nothing_else_is_printed(project):
    commands = "/settings top_p 0.9\n/settings temperature 0\n/undo\n/what\n/save talk.jsonl\n"
    done = chat_through_pipe(
        project, f"\ufeff你好\n\n   \n请说一个字 \r\nhello\n{commands}{'字' * 40000}\nhello\nexit\n你好\n"
    )
    assert done.returncode == 0, done.stderr.decode()
    first, second, third = PAIRS.values()
    third = third.replace("\n", "\\n")
    lines = done.stdout.decode().split("\n")
    assert lines[:5] == [first, "", "", second, third]
    said = "temperature 1, .*", "temperature 0, .*", "2 questions are left", "commands: .*", "2 questions with .*"
    assert re.fullmatch("\n".join(said), "\n".join(lines[5:10]))
    assert lines[10:] == ["", third, ""] and "the question has 40,000 characters" in done.stderr.decode()
    saved = [json.loads(line)["messages"] for line in open(project / "talk.jsonl", encoding="utf-8")]
    assert [row[1]["content"] for row in saved] == [first, second], "each was asked by itself"


def test_an_answer_to_a_pipe_is_one_line_from_which_it_can_be_read_again():
    answer = "a\\n\nb\r\n\\"
    line = answer.translate(ESCAPES)
    assert "\n" not in line and "\r" not in line
    back = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}
    assert re.sub(r"\\.", lambda found: back[found[0]], line) == answer


def test_an_answer_cut_in_the_middle_of_a_character_shows_none_of_it(project):
    chat = load_chat_model(project / "model_save" / "tiny")
    assert (
        said(Talk(chat, Sampling(temperature=0.01, top_p=0.5), 12), "请说一个字") == "龘龘🐱"
    )  # 3, 3 and 4 of the 12 bytes; the other 2 begin a character


def test_a_terminal_shows_prompts_and_answers_and_ctrl_d_and_ctrl_c_exit_with_0(project):
    first, second, third = [
        Terminal(project, *words) for words in (["single"], ["--single_turn=False", "single"], LONG_ANSWERS)
    ]
    greeting = first.wait_for("> ")
    assert "single on c" in greeting and greeting.count("trained on single questions") == 1
    for question, expected in PAIRS.items():
        first.type(question + "\n")
        first.wait_for(question + "\r\n")
        assert first.wait_for("> ") == expected.replace("\n", "\r\n") + "\r\n> "
    first.type("cls\n")
    first.wait_for("\033[2J")
    first.wait_for("> ")
    assert "single questions" not in second.wait_for("> ")
    third.wait_for("> ")
    third.type("你好\n")
    third.wait_for("你好\r\n")
    time.sleep(0.3)
    third.type("\x03")
    third.wait_for("> ")  # the answer has ended, not the program
    third.type("/undo\n")
    third.wait_for("0 questions are left")  # it was a part of the conversation
    third.wait_for("> ")
    for terminal, key in ((third, "\x03"), (first, "\x04"), (second, "\x03")):
        assert terminal.exit_code(key) == 0
        assert b"Traceback" not in terminal.output


def test_a_model_of_single_questions_is_asked_each_by_itself(project):
    chat = load_chat_model(project / "single")
    assert chat.single_turn and not load_chat_model(project / "model_save" / "tiny").single_turn
    alone, together = (Talk(chat, chat.sampling, 64, single_turn) for single_turn in (True, False))
    for question, expected in PAIRS.items():
        assert said(alone, question) == expected
    answers = [said(together, question) for question in PAIRS]
    assert answers != list(PAIRS.values()), "it has learnt no conversation"


def test_a_directory_without_a_model_is_refused_with_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"no model in {tmp_path}: name a Hugging Face directory" in printed.err


def test_an_incomplete_or_damaged_model_is_refused(project, tmp_path):
    best = shutil.copytree(project / "model_save" / "tiny" / "best", tmp_path / "model")
    weights = load_file(best / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "wo" not in k}, best / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="does not fit this model: 4 tensors missing.*wo.weight"):
        load_chat_model(best)
    (best / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_chat_model(best)


INVALID = (
    dict(num_layers=2_000_000), dict(d_model=-1), dict(num_heads="4"), dict(d_kv=None), dict(dense_act_fn="none"),
    dict(feed_forward_proj="gated-none"), dict(feed_forward_proj=3), dict(dense_act_fn="gated-gelu"),
    dict(decoder_start_token_id="x"), dict(decoder_start_token_id=10**6), dict(tie_word_embeddings="no"),
    dict(vocab_size=0), dict(num_layers=256), dict(model_type="bert"), dict(vocab_size=100),
)  # fmt: skip


@pytest.mark.parametrize("changes", INVALID, ids=str)
def test_an_invalid_config_is_refused_with_a_reason_within_two_seconds_and_300_mib(project, tmp_path, changes, capsys):
    best = shutil.copytree(project / "model_save" / "tiny" / "best", tmp_path / "model")
    config = json.loads((best / "config.json").read_text())
    (best / "config.json").write_text(json.dumps(config | changes))
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main([str(best)]) == 2
    growth_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert time.monotonic() - began < 2 and growth_bytes < 300 * 2**20
    assert str(best) in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", (["--temperature", "-1"], ["--top_p", "1.5"], ["--max_new_tokens", "0"], ["--top_k", "x"])
)
def test_numbers_out_of_range_are_refused(project, words, capsys):
    assert main([str(project / "model_save" / "tiny"), *words]) == 2
    assert f"{words[0]}={words[1]}: must be" in capsys.readouterr().err.replace(".0:", ":")


def test_the_conversation_can_be_undone_saved_and_begun_anew_and_settings_changed(project, tmp_path, capsys):
    chat, file = load_chat_model(project / "model_save" / "tiny"), tmp_path / "talk.json"
    talk = Talk(chat, chat.sampling, 64)
    for line in ("你好", "hello", "/undo", f"/save {file}", f"/save {file}", f"/save {file}/x", "/settings top_p 0.9"):
        respond(talk, line, interactive=True)
    assert (talk.sampling.temperature, talk.sampling.top_p) == (1, 0.9)  # top_p has no effect without a temperature
    for line in ("/settings temperature 0.5", "/settings x 1", "/settings thinking on", "/settings thinking 1"):
        respond(talk, line, interactive=True)
    saved = json.loads(file.read_text())["messages"]
    assert saved == [dict(role="user", content="你好"), dict(role="assistant", content=PAIRS["你好"])]
    assert talk.sampling.temperature == 0.5 and talk.thinking is True
    respond(talk, "/reset", interactive=True)
    respond(talk, "/what", interactive=True)
    out = capsys.readouterr().out
    assert "talk.json is there already: name another file" in out and "cannot be written: Not a directory" in out
    assert (
        not talk.turns
        and "x is no setting: temperature" in out
        and "thinking=1: must be on, off" in out
        and "commands: /reset" in out
    )


def test_a_thought_is_dimmed_left_out_of_a_pipe_s_answer_and_saved_with_the_calls(
    project, tmp_path, capsys, monkeypatch
):
    chat, file = load_chat_model(project / "model_save" / "tiny"), tmp_path / "talk.jsonl"
    call = '{"name": "weather", "arguments": {"city": "北京\\u001b"}}'
    answer = [*"<think>\n想", "想\n</think>", "\n\n好。", *[f"\n<tool_call>{call}</tool_call>"] * 2]
    monkeypatch.setattr("model.serve.answering.Engine", lambda model, limits: Scripted(answer))
    monkeypatch.setattr(
        "model.serve.answering.TextStream", lambda tokenizer: SimpleNamespace(add=lambda piece, is_last: piece)
    )
    talk = Talk(chat, chat.sampling, 64)
    respond(talk, "hello", interactive=True)
    shown = capsys.readouterr().out
    line = r'call of weather: {"city": "北京\u001b"}'
    assert shown.replace(f"{NOT_DIM}{DIM}", "") == f"{DIM}想想{NOT_DIM}\n好。\n{line}\n{line}\n"
    respond(talk, "hello", interactive=False)
    respond(talk, f"/save {file}", interactive=True)
    piped = capsys.readouterr().out.split("\n")[0]
    assert "想" not in piped and piped.count("call of weather") == 2
    message = json.loads(file.read_text())["messages"][1]
    assert message["reasoning_content"] == "想想" and len(message["tool_calls"]) == 2


class Scripted:
    """An engine that gives these pieces, each as the ids of a step."""

    def __init__(self, pieces):
        self.pieces = pieces[::-1]

    def add(self, request):
        return 0

    @property
    def idle(self):
        return not self.pieces

    def step(self):
        piece = self.pieces.pop()
        return [SimpleNamespace(ids=piece, is_finished=not self.pieces)]


def test_a_model_that_has_hardly_been_trained_is_named_so(project, capsys):
    chat = load_chat_model(project / "model_save" / "tiny")
    journal = project / "model_save" / "tiny" / "metrics.jsonl"
    for loss, is_said in ((6.5, True), (2.5, False)):
        journal.write_text(json.dumps(dict(kind="eval", step=1, loss=loss)) + "\n")
        greet(chat)
        assert ("hardly been trained" in capsys.readouterr().out) == is_said
    journal.unlink()


def test_a_run_directory_stands_for_its_best_model_else_its_last(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("last", "best"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).touch()
        assert model_directory(tmp_path) == tmp_path / name
